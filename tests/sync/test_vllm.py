"""Real servers, on this machine's CPU: only where an environment with vLLM is named (scripts/install_vllm_cpu.sh)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("LOGRA_VLLM_PYTHON", "")
ROOT = Path(__file__).parents[2]
FIXTURE, DEMO = ROOT / "tests/fixtures/tiny-qwen3", ROOT / "logra_jax/demo/model"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not PYTHON,
        reason="LOGRA_VLLM_PYTHON names no interpreter with vLLM; bash scripts/install_vllm_cpu.sh DIR makes one",
    ),
]


@pytest.mark.parametrize(
    ("model", "ranks"), [(FIXTURE, 1), (FIXTURE, 2), (DEMO, 2)], ids=["qwen3-1", "qwen3-2", "qwen2-2"]
)
def test_the_servers_policy_is_that_of_the_trainer(model: Path, ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/check_vllm.py", "--python", PYTHON, "--model", model]
    command += ["--updates", "6", "--tensor-parallel", str(ranks), "--log", tmp_path / "log"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # Log-probabilities of some -6, divided by the temperature, from sums in another order: 1e-5 is 20 roundings.
    for moment in ("before", "after", "after_reload"):
        assert found[moment] < 1e-5, found
    assert found["moved"] > 0.1
    assert found["blob_bytes"] < found["float32_bytes"] / 5
