"""What each remat policy keeps for the backward pass, and what that computes again; values are in test_slots.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax.models import CausalLM
from logra_jax.optim import SketchSpec, merge
from logra_jax.optim.slot import place

LAYERS, HIDDEN, ROWS, TIME, RANK, TARGETS = 3, 16, 2, 7, 5, 7
CONFIG = TINY.replace(tie_word_embeddings=True, qkv_bias=False)


def backward(remat):
    """(types of what the backward pass of a sketched model keeps, its program as text)."""
    model = CausalLM(CONFIG, scan_unroll=1, remat=remat)
    spec = SketchSpec(rank=RANK, names=model.weight_names())
    train, frozen = spec.split(jax.tree.map(lambda x: jnp.zeros(x.shape), model.abstract_params()))
    free, tree = place(lambda _: None, train, spec.matrices(train), spec, 0, False)
    ids = np.zeros((ROWS, TIME), np.int32)
    _, pullback = jax.vjp(lambda free: model.hidden(merge(tree(free), frozen), ids).sum(), free)
    return [jax.typeof(x) for x in jax.tree.leaves(pullback)], str(jax.make_jaxpr(pullback)(jnp.ones(())))


@pytest.mark.parametrize(
    ("remat", "kept", "states", "drawn", "products"),
    # Backwards, seven kernels take two products each, attention four. Full: seven projections, and once more q, k, v,
    # scores, mixture, o, gate, up. Projected: of those not the mixture and o.
    [("full", 0, 1, 7, 18 + 7 + 8), ("projected", 7, 2, 0, 18 + 6), ("offload", 0, 1, 7, 18 + 7 + 8)],
)
def test_what_is_kept_and_what_is_computed_again(remat, kept, states, drawn, products):
    residuals, program = backward(remat)
    projected = [x for x in residuals if x.shape == (LAYERS, ROWS * TIME, RANK)]
    inputs = [x for x in residuals if x.shape == (LAYERS, ROWS, TIME, HIDDEN)]
    assert (len(projected), len(inputs)) == (kept, states)
    host = [x.memory_space == jax.memory.Space.Host for x in inputs]
    assert host == [remat == "offload"] * states
    assert len(re.findall(r"= (?:random_bits|threefry2x32)\b", program)) == drawn
    assert program.count("= dot_general[") == products
