"""Single parts against float64 numpy, written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax.models.layers import Rope, attend, rotate


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_attention_is_the_formula_with_each_query_head_on_its_group():
    rng = np.random.default_rng(0)
    batch, time, slots, heads, kv_heads, size = 2, 3, 5, 6, 2, 4
    q = rng.standard_normal((batch, time, heads, size))
    k, v = rng.standard_normal((2, batch, slots, kv_heads, size))
    mask = rng.random((batch, time, slots)) < 0.6
    mask[..., 0] = True
    expected = np.zeros((batch, time, heads, size))
    for b in range(batch):
        for h in range(heads):
            group = h * kv_heads // heads
            scores = q[b, :, h] @ k[b, :, group].T / np.sqrt(size)
            expected[b, :, h] = softmax(np.where(mask[b], scores, -np.inf)) @ v[b, :, group]
    single = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    np.testing.assert_allclose(attend(*single, jnp.asarray(mask)), expected, atol=1e-5, rtol=0)


def test_attention_that_may_see_nothing_is_finite():
    x = jnp.ones((1, 2, 2, 4)) * 1e4
    mask = jnp.zeros((1, 2, 2), bool)
    out, grads = jax.value_and_grad(lambda q: attend(q, x, x, mask).sum())(x)
    assert np.isfinite(out)
    assert np.isfinite(grads).all()


def test_softmax_is_taken_in_float32_for_bfloat16_inputs():
    """Scores 64 and 64.25 (before scaling) are one number in bfloat16, whose step there is 0.5."""
    q = jnp.ones((1, 1, 1, 2), jnp.bfloat16)
    k = jnp.asarray([[64, 0], [64, 0.25]], jnp.bfloat16)[None, :, None]
    v = jnp.eye(2, dtype=jnp.bfloat16)[None, :, None]
    weights = attend(q, k, v, jnp.ones((1, 1, 2), bool))
    expected = softmax(np.array([64, 64.25]) / np.sqrt(2))
    np.testing.assert_allclose(np.asarray(weights, np.float64)[0, 0, 0], expected, atol=2**-8, rtol=0)


def test_rotation_turns_pairs_half_a_head_apart():
    rng = np.random.default_rng(1)
    x, angles = rng.standard_normal((1, 3, 2, 8)), rng.standard_normal((1, 3, 4))
    rope = Rope(jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x, jnp.float32), rope), expected, atol=1e-6, rtol=0)
