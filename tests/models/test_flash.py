"""cuDNN's attention as the model calls it. There is no cuDNN here: XLA stands in behind the same call."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax import build, distributed
from logra_jax.build import choose_attention
from logra_jax.config import load_config
from logra_jax.errors import UserError
from logra_jax.models import CausalLM, flash, layers
from logra_jax.models.layers import attend

CONFIG = TINY.replace(num_hidden_layers=1, tie_word_embeddings=True)
RNG = np.random.default_rng(0)
# Rows with padding on the left, on the right, on both sides, none, and a row of padding alone.
BOUNDS = [(3, 9), (0, 4), (2, 7), (0, 9), (4, 4)]
REAL = np.array([[start <= t < stop for t in range(9)] for start, stop in BOUNDS])


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(layers, "attend_to_front", partial(flash.attend_to_front, implementation="xla"))
    monkeypatch.setattr(flash, "TILE", 4)
    with jax.numpy_dtype_promotion("standard"):  # XLA's version needs it
        yield


def test_front_attention_is_masked_attention(stand_in):
    """Values and gradients of real tokens, grouped heads; zeros, not NaN, at padding that holds NaN."""
    lengths = jnp.asarray([5, 2, 7, 0])
    real = np.arange(7)[None] < np.asarray(lengths)[:, None]
    q, k, v, weight = (jnp.asarray(RNG.normal(size=(4, 7, heads, 8)), jnp.float32) for heads in (6, 2, 2, 6))
    mask = np.tril(np.ones((7, 7), bool))[None] & real[:, None]
    weight = weight * real[..., None, None]

    def loss(q, k, v, poison):
        spoil = lambda x: jnp.where(real[..., None, None], x, poison)
        return jnp.sum(weight * flash.attend_to_front(spoil(q), spoil(k), spoil(v), lengths, "xla"))

    def expected(q, k, v):
        return jnp.sum(weight * attend(q, k, v, jnp.asarray(mask)))

    found = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v, jnp.nan)
    wanted = jax.jit(jax.value_and_grad(expected, (0, 1, 2)))(q, k, v)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    out = jax.jit(partial(flash.attend_to_front, implementation="xla"))(q, k, v, lengths)
    assert (np.asarray(out)[~real] == 0).all()


def test_model_with_rows_moved_to_the_front(stand_in):
    """States and gradients are those of blocked attention, wherever the padding is."""
    model = CausalLM(CONFIG, scan_unroll=1, remat="full")
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, model.init_params(jax.random.key(0)))
    ids = RNG.integers(0, 32, REAL.shape, dtype=np.int32)
    weight = jnp.asarray(RNG.normal(size=(*REAL.shape, 16)) * REAL[..., None], jnp.float32)

    def loss(params, model):
        return jnp.sum(weight * model.hidden(params, ids, jnp.asarray(REAL)))

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    found, expected = run(params, model.replace(attention="cudnn")), run(params, model)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=0)


class Described(NamedTuple):
    """As much of a device as is looked at."""

    platform: str
    device_kind: str
    compute_capability: str


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (jax.devices("cpu")[0], "cpu is not an NVIDIA GPU"),
        (Described("gpu", "AMD Instinct MI300X", "gfx942"), "AMD Instinct MI300X is not an NVIDIA GPU"),
        (Described("gpu", "Tesla V100", "7.0"), "Tesla V100 has compute capability 7.0, and it takes 8.0"),
    ],
)
def test_devices_without_it(device, reason):
    assert flash.why_not_cudnn(CONFIG, device) == reason
    for attention, compute in (("auto", "bfloat16"), ("auto", "float32"), ("blocked", "bfloat16")):
        config = load_config(None, [f"model.attention={attention}", f"model.compute_dtype={compute}"])
        assert choose_attention(config, CONFIG, device) == "blocked"
    with pytest.raises(UserError, match=f"model.attention=cudnn: {reason}; set model.attention=auto or blocked"):
        choose_attention(load_config(None, ["model.attention=cudnn", "model.compute_dtype=bfloat16"]), CONFIG, device)


def test_what_cannot_be_compiled_is_not_chosen():
    """Here the library is missing; elsewhere it may be too old for the device, or the heads too large."""
    device = jax.devices("cpu")[0]
    assert "it cannot be compiled (" in flash._compiles(4, 2, 4, device)


def test_processes_attend_in_one_way(monkeypatch):
    said, agreed = [0, 1], []
    monkeypatch.setattr(build, "why_not_cudnn", lambda shape, device: "no library" if said[0] else None)
    monkeypatch.setattr(distributed, "largest", lambda own: max(own, said[1]))  # of two processes
    monkeypatch.setattr(distributed, "agree", agreed.append)
    auto, wanted = (
        load_config(None, [f"model.attention={attention}", "model.compute_dtype=bfloat16"])
        for attention in ("auto", "cudnn")
    )
    assert choose_attention(auto, CONFIG, None) == "blocked"
    said[:] = 0, 0
    assert choose_attention(auto, CONFIG, None) == "cudnn"
    assert agreed == [None, None]
    said[:] = 1, 1
    choose_attention(wanted, CONFIG, None)  # raised by `agree`, on all
    assert "model.attention=cudnn: no library" in str(agreed[2])
