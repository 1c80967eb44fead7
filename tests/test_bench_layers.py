"""The benchmark of layers: its FLOPs, the recurrence it holds the chunks against, and its table."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models.config import LinearAttention


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parent.parent / "scripts" / "bench_layers.py"
    spec = importlib.util.spec_from_file_location("bench_layers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config(bench):
    sizes = LinearAttention(key_heads=1, value_heads=2, key_dim=8, value_dim=6, conv_width=4)
    return bench.scaled("qwen3.5-27b", 320).replace(head_dim=8, linear_attention=sizes)


def test_flops_of_loops_count_every_turn(bench):
    """3 turns of a [2, 4] x [4, 4] product and a sum of 8 numbers."""

    def program(x, w):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ w + x, x)

    traced = jax.jit(program).trace(jnp.ones((2, 4)), jnp.ones((4, 4)))
    found = bench.count(traced.jaxpr.jaxpr)
    assert found.products == 3 * 2 * 2 * 4 * 4
    assert 3 * 8 <= found.rest <= 3 * (8 + 2)  # and the counter


def test_the_recurrence_is_the_same_layer(bench, config):
    x = jax.random.normal(jax.random.key(3), (1, 70, config.hidden_size))
    found = []
    for name in (bench.DELTA, bench.STEPS):
        run, weights = bench.mixer(config, name, "float32")
        found.append(jax.jit(run)(jax.tree.map(lambda leaf: 5 * leaf, weights), x))
    assert np.abs(found[0]).max() > 1e-3
    np.testing.assert_allclose(*found, atol=1e-5 * np.abs(found[0]).max(), rtol=0)


def test_a_tiny_run_fills_its_table(bench, config):
    found = bench.measure(config, dict.fromkeys(bench.PASSES, (bench.ATTENTION, bench.DELTA)), 64, "float32", 1)
    assert set(found) == set(bench.PASSES)
    forward, both = (found[name] for name in bench.PASSES)
    assert both["delta flops"] > 2 * forward["delta flops"]
    assert forward["delta ratio"] == 1
    lines = bench.table([forward]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| - |" in lines[2]  # no recurrence
