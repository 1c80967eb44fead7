"""LoRA kernels in a decoder: the base to begin with, then W + s A B, forward and backward."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax.models import CausalLM
from logra_jax.optim import LoraKernel, SketchSpec, add_adapters, merge, merge_adapters, split_adapters

MODEL = CausalLM(TINY, scan_unroll=1)
IDS = np.random.default_rng(5).integers(0, 32, (2, 7), dtype=np.int32)
SPEC = SketchSpec(rank=4, seed=9, names=MODEL.weight_names())


def is_adapted(node):
    return isinstance(node, LoraKernel)


def loss(params):
    return jnp.square(MODEL.logits(params, IDS)).mean()


@pytest.fixture
def adapted(random_params):
    """Adapters in all seven projections, with s = 1.5 and B no longer zero."""

    def fill(node):
        noise = np.random.default_rng(node.b.size).standard_normal(node.b.shape, np.float32)
        return replace(node, b=jnp.asarray(noise * np.float32(0.1)))

    tree = add_adapters(random_params(MODEL), SPEC, alpha=6.0)
    filled = jax.tree.map(lambda node: fill(node) if is_adapted(node) else node, tree, is_leaf=is_adapted)
    assert sum(map(is_adapted, jax.tree.leaves(filled, is_leaf=is_adapted))) == 7
    return filled


def test_a_new_adapter_changes_no_bit(random_params):
    model = MODEL.replace(compute_dtype="bfloat16")
    params = random_params(model)
    run = jax.jit(lambda params: model.hidden(params, IDS, cache=model.init_cache(2, 9)))
    (hidden, cache), (wanted, _) = run(add_adapters(params, SPEC)), run(params)
    np.testing.assert_array_equal(hidden, wanted)
    assert cache.slot == 7


def test_gradients_are_those_of_the_sum(adapted):
    """With G the gradient of a plain W + s A B: s G B^T for A, s A^T G for B, and nothing for W."""
    train, frozen = split_adapters(adapted)
    value, grads = jax.jit(jax.value_and_grad(lambda train: loss(merge(train, frozen))))(train)
    plain = merge_adapters(adapted)
    wanted, dense = jax.jit(jax.value_and_grad(loss))(plain)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    compared = []

    def compare(node, grad, whole):
        if is_adapted(node):
            a, b, g = (np.asarray(x, np.float64) for x in (node.a, node.b, whole))
            for found, exact in ((grad.a, 1.5 * g @ b.swapaxes(1, 2)), (grad.b, 1.5 * a.swapaxes(1, 2) @ g)):
                np.testing.assert_allclose(found, exact, atol=1e-5 * np.abs(exact).max(), rtol=0)
                compared.append(found.dtype.name)
            assert grad.kernel is None

    jax.tree.map(compare, adapted, grads, dense, is_leaf=is_adapted)
    assert compared == ["float32"] * 14
