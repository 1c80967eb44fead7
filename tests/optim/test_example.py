"""The example that users copy: it runs, and it learns."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "docs" / "example.py"


def test_example_learns_and_is_short() -> None:
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) <= 26
    out = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True).stdout
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", out)]
    assert losses[0] > 1.3  # four classes: ln 4
    assert losses[-1] < 0.05
