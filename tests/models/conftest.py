"""The tiny checkpoints with their float32 reference numbers from torch, each loaded once."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models import load_hf

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = ("tiny-qwen2-tied", "tiny-qwen2-sharded", "tiny-qwen2-bf16", "tiny-qwen3", "tiny-llama", "tiny-qwen3_5-text")
# Largest difference of logits, and of gradients relative to their largest entry. Torch's own hybrid differs by
# 4e-5 from float64, and by 3e-5 between a padded and an unpadded row; its dense models by less than 1e-5.
DENSE, HYBRID = (1e-4, 1e-4), (3e-4, 5e-4)


@cache
def loaded(name: str) -> SimpleNamespace:
    model, params = load_hf(FIXTURES / name)
    model = model.replace(scan_unroll=1)  # compiles fastest; unrolling is compared with it elsewhere
    with np.load(FIXTURES / name / "reference.npz") as arrays:
        reference = dict(arrays)
    facts = json.loads((FIXTURES / name / "reference.json").read_text())
    return SimpleNamespace(
        name=name,
        folder=FIXTURES / name,
        model=model,
        params=params,
        logits=jax.jit(model.logits),
        ref=reference,
        facts=facts,
        tolerance=HYBRID if model.config.linear_attention else DENSE,
    )


@pytest.fixture(params=NAMES)
def checkpoint(request) -> SimpleNamespace:
    """Each checkpoint in turn, in float32: name, folder, model, params, logits (compiled), ref, facts, tolerance."""
    return loaded(request.param)


@pytest.fixture
def load_checkpoint():
    """A checkpoint by its name."""
    return loaded


@pytest.fixture
def random_params():
    """`random_params(model, seed)`: normal weights of deviation 0.2 around 1 for norms and 0 for all else."""

    def draw(model, seed=0):
        rng = np.random.default_rng(seed)

        def leaf(path, shape):
            noise = rng.standard_normal(shape.shape, np.float32) * np.float32(0.2)
            plain = path[-1].key == "scale" and not model.config.zero_centered_norms
            return jnp.asarray(noise + 1 if plain else noise)

        return jax.tree.map_with_path(leaf, model.abstract_params())

    return draw
