"""Real servers, on this machine's CPU: only where an environment with vLLM is named (scripts/install_vllm_cpu.sh)."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from real_vllm import PYTHON, ROOT, needs_vllm

from logra_jax.config import PACKAGED
from logra_jax.models import CausalLM, ModelConfig, save_hf

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def models(fixtures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with head norms and a head of its own, and one with biases and a tied head."""
    folder = tmp_path_factory.mktemp("served") / "qwen2"
    raw = json.loads((PACKAGED / "model/config.json").read_text())  # heads of 32, the least that vLLM takes on a CPU
    raw |= {"num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 512}
    model = CausalLM(ModelConfig.from_hf(raw))
    save_hf(model, model.init_params(jax.random.key(0), "float32"), folder)
    return {"qwen2": folder, "qwen3": fixtures / "tiny-qwen3"}


@pytest.mark.parametrize(
    ("model", "ranks", "stages"), [("qwen3", 1, 1), ("qwen3", 2, 1), ("qwen2", 2, 1), ("qwen3", 1, 2)]
)
def test_the_servers_policy_is_that_of_the_trainer(
    models: dict, model: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    command = [sys.executable, ROOT / "scripts/check_vllm.py", "--python", PYTHON, "--model", models[model]]
    command += [
        "--updates",
        "6",
        "--tensor-parallel",
        str(ranks),
        "--pipeline-parallel",
        str(stages),
        "--log",
        tmp_path / "log",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # Log-probabilities of some -6, divided by the temperature, from sums in another order: 1e-5 is 20 roundings.
    for moment in ("before", "after", "after_reload"):
        assert found[moment] < 1e-5, found
    assert found["moved"] > 0.1
    assert found["blob_bytes"] < found["float32_bytes"] / 5
