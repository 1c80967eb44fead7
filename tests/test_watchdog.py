"""A process that makes no progress says where it hangs, and leaves."""

import subprocess
import sys
import time

import pytest

from logra_jax.watchdog import Watchdog

HANGS = """
import sys, time, pathlib
from logra_jax.watchdog import Watchdog
def hang_here():
    time.sleep(60)
with Watchdog(1.0, pathlib.Path(sys.argv[1])) as watchdog:
    for _ in range(4):
        time.sleep(0.5)
        watchdog.beat()
    print("alive", flush=True)
    hang_here()
"""


def test_a_hang_is_ended(tmp_path):
    file = tmp_path / "stacks.txt"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS, str(file)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 4
    assert 3.0 < time.monotonic() - began < 30.0  # four beats, and the deadline after the last of them
    assert done.stdout == "alive\n"
    assert "no progress for 1 s (processes.hang_s)" in done.stderr
    for text in (done.stderr, file.read_text()):
        assert "in hang_here" in text


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_one_that_ends_in_time_is_left_alone(seconds, tmp_path):
    with Watchdog(seconds, tmp_path / "stacks.txt") as watchdog:
        watchdog.beat()
        time.sleep(0.3 - seconds)
    time.sleep(0.3)
    assert list(tmp_path.iterdir()) == []
