"""A small stacked model with every kind of leaf, and projections rebuilt in numpy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import SketchSpec
from logra_jax.optim import twin

L, K, D, V, R = 3, 16, 16, 8, 4


class Toy(NamedTuple):
    """Three stacked layers with biases, and a head. Kernels are targets; `logits` works on slots."""

    params: Any
    spec: SketchSpec
    logits: Callable[..., Any]
    loss: Callable[..., Any]
    x: Any
    y: Any


def _logits(params: Any, x: Any, remat: bool = True) -> Any:
    def layer(h: Any, leaf: Any) -> Any:
        return jnp.tanh(h @ leaf["up"]["kernel"] + leaf["up"]["bias"][None, :]), None

    h, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])
    return h @ params["head"]["kernel"]


def _loss(params: Any, x: Any, y: Any) -> Any:
    logp = jax.nn.log_softmax(_logits(params, x), axis=-1)
    return -jnp.mean(jnp.take_along_axis(logp, y[:, None], axis=-1))


@pytest.fixture
def toy() -> Toy:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "head": {"kernel": jax.random.normal(keys[0], (D, V)) * 0.3},
        "layers": {
            "up": {
                "bias": jax.random.normal(keys[1], (L, D)) * 0.1,
                "kernel": jax.random.normal(keys[2], (L, K, D)) * 0.25,
            }
        },
    }
    names = {
        "layers/up/kernel": tuple(f"model.layers.{i}.up.weight" for i in range(L)),
        "layers/up/bias": tuple(f"model.layers.{i}.up.bias" for i in range(L)),
        "head/kernel": ("lm_head.weight",),
    }
    spec = SketchSpec(rank=R, seed=5, targets=("up", "lm_head"), names=names)
    x = jax.random.normal(keys[3], (32, K))
    return Toy(params, spec, _logits, _loss, x, jnp.argmax(x[:, :V], axis=-1))


def projection(spec: SketchSpec, name: str, k: int, update: int = 0) -> np.ndarray:
    """A `[r, k]` in float64, from the numpy twin."""
    return twin.signs(spec.seed, update, name, spec.rank, k).astype(np.float64) / np.sqrt(spec.rank)


@pytest.fixture
def project() -> Callable[..., np.ndarray]:
    return projection
