"""Several texts in a row: each has the hidden states and gradients that it has alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models import layers
from logra_jax.models.layers import positions_within

LENGTHS, WIDTH = (5, 1, 7, 3), 7
# Texts 1 to 4 in two rows of 13 slots, with padding between, before and behind.
PLACES = {1: (0, 0), 2: (0, 6), 3: (1, 1), 4: (0, 8)}


@pytest.fixture
def texts():
    """Ids `[4, 7]`, mask and random cotangents of texts with a row each, and the same packed with segments."""
    rng = np.random.default_rng(0)
    ids = rng.integers(1, 300, (4, WIDTH))
    mask = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
    pull = rng.standard_normal((4, WIDTH, 64)) * mask[..., None]
    packed = np.zeros((2, 13), int), np.zeros((2, 13), int), np.zeros((2, 13, 64))
    for text, (row, start) in PLACES.items():
        real = slice(start, start + LENGTHS[text - 1])
        for whole, own in zip(packed, (ids[text - 1], np.full(WIDTH, text), pull[text - 1]), strict=True):
            whole[row, real] = own[: LENGTHS[text - 1]]
    single = lambda *arrays: [jnp.asarray(x, jnp.float32 if x.dtype == float else jnp.int32) for x in arrays]
    return single(ids, mask, pull), single(*packed)


@pytest.mark.parametrize(("name", "reach"), [("tiny-qwen2-tied", None), ("tiny-qwen3", WIDTH)])
def test_packed_texts_are_the_texts_alone(name, reach, texts, load_checkpoint, monkeypatch):
    """In blocks of at most four queries, which with a reach see ten slots of thirteen."""
    checkpoint = load_checkpoint(name)
    model, params = checkpoint.model, checkpoint.params
    (ids, mask, pull), (packed_ids, segments, packed_pull) = texts

    @jax.jit
    def alone(params):
        hidden = model.hidden(params, ids, mask)
        return jnp.sum(hidden * pull), hidden

    @jax.jit
    def packed(params):
        hidden = model.hidden(params, packed_ids, segments=segments, reach=reach)
        return jnp.sum(hidden * packed_pull), hidden

    (_, expected), expected_grads = jax.value_and_grad(alone, has_aux=True)(params)
    monkeypatch.setattr(layers, "QUERY_BLOCK", 4)
    (_, found), grads = jax.value_and_grad(packed, has_aux=True)(params)
    size = float(jnp.abs(expected).max())
    for text, (row, start) in PLACES.items():
        real = LENGTHS[text - 1]
        one = found[row, start : start + real]
        np.testing.assert_allclose(one, expected[text - 1, :real], rtol=0, atol=1e-5 * size, err_msg=str(text))
    assert np.isfinite(found).all()
    for leaf, other in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=2e-5 * float(jnp.abs(other).max()))


def test_positions_start_anew():
    segments = jnp.asarray([[3, 3, 3, 1, 0, 0, 2, 2], [0, 5, 5, 6, 6, 6, 6, 0]])
    expected = [[0, 1, 2, 0, 0, 1, 0, 1], [0, 0, 1, 0, 1, 2, 3, 0]]
    np.testing.assert_array_equal(positions_within(segments), expected)


def test_segments_go_with_neither_mask_nor_cache(load_checkpoint):
    checkpoint = load_checkpoint("tiny-llama")
    ids = jnp.ones((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="segments stand for the attention mask"):
        checkpoint.model.hidden(checkpoint.params, ids, ids, segments=ids)
    with pytest.raises(ValueError, match="have no cache"):
        checkpoint.model.hidden(checkpoint.params, ids, segments=ids, cache=checkpoint.model.init_cache(1, 4))
