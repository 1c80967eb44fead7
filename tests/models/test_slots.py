"""Sketch slots in place of kernels: through merge, layer scan, remat, decoding and the output head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tiny import TINY

from logra_jax.models import CausalLM
from logra_jax.optim import DEFAULT_TARGETS, SketchSpec, merge, sketched_value_and_grad, with_slots
from logra_jax.optim.twin import signs

MODEL = CausalLM(TINY, scan_unroll=1)
IDS = np.random.default_rng(5).integers(0, 32, (2, 7), dtype=np.int32)
SPEC = SketchSpec(rank=4, seed=9, targets=(*DEFAULT_TARGETS, r"^lm_head\.weight$"), names=MODEL.weight_names())


def test_sketches_are_projected_dense_gradients(random_params):
    """A G, A from the numpy twin, for every target of every layer and the head, however layers are run."""
    params = random_params(MODEL)
    train, frozen = SPEC.split(params)

    def loss(train, model):
        return jnp.square(model.logits(merge(train, frozen), IDS)).mean()

    dense = jax.jit(jax.grad(loss), static_argnums=1)(train, MODEL)
    expected = {}
    for path, names in MODEL.weight_names().items():
        leaf = dense
        for key in path.split("/"):
            leaf = leaf[key]
        if leaf is not None:
            rows = np.asarray(leaf, np.float64).reshape(len(names), *leaf.shape[-2:])
            sketched = [signs(9, 3, n, 4, g.shape[0]) / 2 @ g for n, g in zip(names, rows, strict=True)]
            expected[path] = np.stack(sketched).reshape(*leaf.shape[:-2], 4, -1)
    assert len(expected) == 8
    for change in ({"scan_unroll": 3}, {"remat": "full"}, {"remat": "projected"}, {"remat": "offload"}):
        model = MODEL.replace(**change)
        run = sketched_value_and_grad(partial(loss, model=model), SPEC, materialize=False)
        _, grads = jax.jit(partial(run, step=3))(train)
        for path, sketch in expected.items():
            found = grads
            for key in path.split("/"):
                found = found[key]
            np.testing.assert_allclose(found, sketch, atol=1e-5 * np.abs(sketch).max(), rtol=0, err_msg=path)


def test_decoding_with_slots_is_decoding_with_their_kernels(random_params):
    model = MODEL.replace(compute_dtype="bfloat16")
    params = random_params(model)
    train, frozen = SPEC.split(params)
    slots = merge(with_slots(train, SPEC, 0), frozen)
    run = jax.jit(lambda params: model.hidden(params, IDS, cache=model.init_cache(2, 9)))
    (hidden, cache), (expected, _) = run(slots), run(params)
    np.testing.assert_array_equal(hidden, expected)
    assert cache.slot == 7
    logits = jax.jit(model.logits)(slots, IDS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, jax.jit(model.logits)(params, IDS), atol=0.02, rtol=0)
