"""Realised KL against float64 numpy, and the draw of the probe rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.optim.predicted_kl import HiddenHead
from logra_jax.rl.kl import draw_probe, policy_kl


def _log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [4, 512])
def test_policy_kl_is_the_definition(scale, temperature, chunk):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(3, 5, 8)), rng.normal(size=(8, 33))
    change = rng.normal(size=hidden.shape) * scale
    # The reference uses the very float32 numbers that the function sees, in float64.
    old, new, w = (np.float32(x) for x in (hidden, hidden + change, head))
    mask = np.arange(5)[None] < np.array([5, 2, 3])[:, None]
    p, q = (_log_softmax(x.astype(np.float64) @ w / temperature) for x in (old, new))
    expected = ((np.exp(p) * (p - q)).sum(-1) * mask).sum() / mask.sum()
    side = [HiddenHead(jnp.asarray(x), jnp.asarray(w)) for x in (old, new)]
    found = policy_kl(*side, jnp.asarray(mask), temperature, chunk=chunk)
    # Rounding of the logits (about 1e-6) bounds what float32 can tell of the change.
    np.testing.assert_allclose(found, expected, rtol=1e-4 + 1e-6 / scale)


def test_policy_kl_of_nothing_is_zero():
    side = HiddenHead(jnp.ones((1, 2, 3)), jnp.ones((3, 4)))
    assert policy_kl(side, side, jnp.zeros((1, 2), bool), 1.0) == 0.0


def test_probe_rows_are_distinct_and_spread_over_prompts():
    rows = draw_probe(seed=3, update=7, prompts=6, generations=4, responses=6)
    assert sorted(rows // 4) == list(range(6))
    many = draw_probe(seed=3, update=7, prompts=6, generations=4, responses=15)
    assert len(set(many)) == 15
    assert np.bincount(many // 4, minlength=6).max() - np.bincount(many // 4, minlength=6).min() <= 1
    assert sorted(draw_probe(3, 7, 6, 4, 100)) == list(range(24))


def test_probe_rows_follow_seed_and_update_alone():
    draw = [tuple(draw_probe(s, u, 16, 8, 8)) for s, u in [(0, 0), (0, 0), (0, 1), (1, 0)]]
    assert draw[0] == draw[1]
    assert len(set(draw)) == 3
