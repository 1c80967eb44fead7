"""The benchmark of one update: a tiny run of it, and its table."""

import importlib.util
from pathlib import Path

import jax
import pytest

from logra_jax.config import load_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_update", ROOT / "scripts" / "bench_update.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_of_a_tiny_model(bench, fixtures, command_settings):
    settings = [
        f"model.path={fixtures / 'tiny-qwen2-tied'}", "model.compute_dtype=float32", "data.max_prompt_length=4",
        "rollout.max_new_tokens=6", "rollout.prompts=2", "rollout.generations=2", "loss.micro_batch=2",
        "optimizer.rank=8", "kl.probe_responses=2", "kl.check_every=0", "mesh.fsdp=1",
    ]  # fmt: skip
    found = bench.measure(load_config(None, settings), "logra", repeats=1, brief=True)
    assert "error" not in found
    # float32 weights of tests/fixtures/tiny-qwen2-tied are in both programs.
    weights = 4 * (3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 320 * 64)
    assert found["update_compiled"] > weights
    assert found["rollout_compiled"] > weights
    assert found["decode_tokens_s"] == pytest.approx(4 * 6 / (found["rollout_ms"] / 1e3))
    assert found["update_ms"] > 0


def test_flops_are_near_the_limit(bench, fixtures):
    """A wide layer and few tokens: what is not a product of its matrices counts little."""
    from logra_jax.models.presets import PRESETS

    config = load_config(None, ["model.preset=qwen2.5-1.5b", "model.path=", "optimizer.rank=256"])
    found = bench.layer_flops(config, PRESETS["qwen2.5-1.5b"])
    wide, mlp, kv, r = 1536, 8960, 256, 256
    matrices = [(wide, wide)] * 2 + [(wide, kv)] * 2 + [(wide, mlp)] * 2 + [(mlp, wide)]
    assert found["layer_flops_limit"] == sum(2 * (3 * k * d + r * (k + d)) for k, d in matrices)
    assert found["layer_flops"] == pytest.approx(found["layer_flops_limit"], rel=0.1)


def test_table_of_one_that_ran_out_of_memory(bench):
    columns = {
        "logra": {"devices": 1, "kind": "card", "update_compiled": 2**31, "update_ms": 50.0},
        "adamw": {"devices": 1, "kind": "card", "update_compiled": 2**32, "error": "out of memory"},
    }
    lines = bench.table(columns).splitlines()
    assert lines[0] == "| 1 x card | logra | adamw |"
    assert "| update, compiled, GiB | 2.00 (0.50) | 4.00 |" in lines
    assert "| update, ms | 50 | - |" in lines
    assert lines[-1] == "| ended by | - | out of memory |"


def test_running_out_of_memory_is_a_result(bench, fixtures, monkeypatch):
    def raises(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes")

    monkeypatch.setattr(bench, "_compiled", raises)
    settings = [f"model.path={fixtures / 'tiny-qwen2-tied'}", "mesh.fsdp=1"]
    assert bench.measure(load_config(None, settings), "adamw", 1)["error"] == "out of memory"
