"""The prediction against real divergences, and what the link does with it."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from logra_jax import (
    HiddenHead,
    SketchSpec,
    UserError,
    apply_updates,
    cosine_budget,
    kl_link,
    lift,
    mismatch_average,
    predict_kl,
    scale_by_predicted_kl,
    sketch_count,
)


def direction(toy, scale=1.0):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    return {"head": {"kernel": draw(4, 8)}, "layers": {"up": {"bias": draw(3, 16), "kernel": draw(3, 4, 16)}}}


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def numpy_logits(params, x):
    """The toy model in float64 numpy."""
    up = params["layers"]["up"]
    for kernel, bias in zip(up["kernel"], up["bias"], strict=True):
        x = np.tanh(x @ kernel + bias)
    return x @ params["head"]["kernel"]


def numpy_prediction(toy, project, updates, mask, temperature, count, step=1e-5):
    """q from a central difference of float64 logits along the full-size direction."""
    wide = partial(jax.tree.map, lambda v: np.asarray(v, np.float64))
    params, u, x = wide(toy.params), wide(updates), np.asarray(toy.x, np.float64)
    a = [project(toy.spec, f"model.layers.{i}.up.weight", 16, count) for i in range(3)]
    full = {
        "head": {"kernel": project(toy.spec, "lm_head.weight", 16, count).T @ u["head"]["kernel"]},
        "layers": {
            "up": {
                "bias": u["layers"]["up"]["bias"],
                "kernel": np.stack([a[i].T @ u["layers"]["up"]["kernel"][i] for i in range(3)]),
            }
        },
    }

    def at(t):
        return numpy_logits(jax.tree.map(lambda w, d: w + t * d, params, full), x)

    z_dot = (at(step) - at(-step)) / (2 * step) / temperature
    p = softmax(at(0) / temperature)
    c = z_dot - (p * z_dot).sum(-1, keepdims=True)
    q = 0.5 * (p * c**2).sum(-1)
    return float((q * mask).sum() / mask.sum()), full


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("materialize", [None, True])
def test_prediction_is_the_finite_difference(toy, project, temperature, materialize) -> None:
    """Sketched and dense leaves move at once; every third position does not count, one counts double."""
    mask = (np.arange(32) % 3 > 0).astype(np.float32)
    mask[1] = 2.0

    def fn(u, step):
        return predict_kl(lambda p: toy.logits(p, toy.x), toy.params, toy.spec, step, mask, temperature, materialize)(u)

    got = jax.jit(fn)(direction(toy), jnp.int32(2))
    want, _ = numpy_prediction(toy, project, direction(toy), mask, temperature, 2)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_prediction_is_the_divergence_of_a_small_step(toy, project) -> None:
    updates = direction(toy)
    q, full = numpy_prediction(toy, project, updates, np.ones(32), 1.0, 0)

    def wide(tree):
        return jax.tree.map(lambda v: np.asarray(v, np.float64), tree)

    eps = 1e-4
    moved = jax.tree.map(lambda w, d: w + eps * d, wide(toy.params), full)
    x = np.asarray(toy.x, np.float64)
    old, new = softmax(numpy_logits(wide(toy.params), x)), softmax(numpy_logits(moved, x))
    real = np.mean((old * (np.log(old) - np.log(new))).sum(-1))
    np.testing.assert_allclose(real / eps**2, q, rtol=1e-2)
    got = predict_kl(lambda p: toy.logits(p, toy.x), toy.params, toy.spec, 0, jnp.ones(32))(updates)
    np.testing.assert_allclose(got, q, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 7, 32, 1000])
@pytest.mark.parametrize("train_head", [True, False])
def test_chunks_equal_the_whole(toy, chunk, train_head) -> None:
    head = toy.params["head"]["kernel"]
    params = {"layers": toy.params["layers"], **({"out": head} if train_head else {})}
    spec = SketchSpec(rank=4, targets=("up",))
    updates = {"layers": direction(toy)["layers"], **({"out": head * 0.5} if train_head else {})}
    mask = (jnp.arange(32).reshape(4, 8) % 5 != 0).astype(jnp.float32)

    def hidden(p):
        h = toy.x.reshape(4, 8, 16)
        for i in range(3):
            take = jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"]["up"])
            h = jnp.tanh(h @ take["kernel"] + take["bias"][None, None, :])
        return h

    def output(p):
        return p["out"] if train_head else head

    whole = predict_kl(lambda p: hidden(p) @ output(p), params, spec, 0, mask, 0.8)(updates)

    def in_chunks(p):
        return HiddenHead(hidden(p), output(p))

    got = predict_kl(in_chunks, params, spec, 0, mask, 0.8, chunk=chunk)(updates)
    np.testing.assert_allclose(got, whole, rtol=1e-6)


def test_logits_of_all_tokens_are_never_formed() -> None:
    tokens, d, vocabulary = 64, 12, 50
    spec = SketchSpec(rank=3, targets=("w",))
    params = {"w": jnp.ones((d, d)) * 0.1}
    x = jnp.ones((4, tokens // 4, d))
    head = jax.random.normal(jax.random.key(0), (d, vocabulary))
    fn = predict_kl(lambda p: HiddenHead(x @ p["w"], head), params, spec, 0, jnp.ones((4, tokens // 4)), chunk=8)
    text = jax.jit(fn).lower({"w": jnp.ones((3, d))}).as_text()
    assert f"8x{vocabulary}xf32" in text or f"4x2x{vocabulary}xf32" in text
    assert f"tensor<{tokens}x{vocabulary}xf32>" not in text
    assert f"tensor<4x{tokens // 4}x{vocabulary}xf32>" not in text
    # The head is not trained: its zero tangent is never multiplied.
    assert text.count("dot_general") == 4 + 1  # x W, x A^T, (x A^T) U, hidden head, hidden_dot head


def test_positions_that_do_not_count_may_be_anything(toy) -> None:
    mask = jnp.ones(32).at[3].set(0.0)
    bad = toy.x.at[3].set(jnp.nan)

    def fn(x, mask):
        return predict_kl(lambda p: toy.logits(p, x), toy.params, toy.spec, 0, mask)(direction(toy))

    np.testing.assert_allclose(fn(bad, mask), fn(toy.x, mask), rtol=1e-6)
    assert np.isnan(fn(bad, jnp.ones(32)))
    assert fn(toy.x, jnp.zeros(32)) == 0


def test_banned_tokens() -> None:
    """A logit of minus infinity has probability 0 and takes no part, whatever its tangent is."""
    params, move = {"s": jnp.zeros(())}, {"s": jnp.ones(())}
    weights, tangent = jnp.asarray([[1.0, 1.0, 0.0]]), jnp.asarray([[1.0, 3.0, 5.0]])

    def logits(p):
        return jnp.log(weights * (1 + p["s"] * tangent))

    assert np.isnan(jax.jvp(logits, (params,), (move,))[1][0, 2])
    np.testing.assert_allclose(predict_kl(logits, params, None, 0, jnp.ones(1))(move), 0.5, rtol=1e-6)


def test_mask_must_fit(toy) -> None:
    with pytest.raises(UserError, match=r"mask has shape \(31,\), the logits have positions \(32,\)"):
        predict_kl(lambda p: toy.logits(p, toy.x), toy.params, toy.spec, 0, jnp.ones(31))(direction(toy))


def link(q, updates=None, budget=1e-3, **kwargs):
    tx = scale_by_predicted_kl(budget, **{k: v for k, v in kwargs.items() if k == "alpha_max"})
    updates = {"w": jnp.asarray([3.0, -4.0])} if updates is None else updates
    extra = {k: v for k, v in kwargs.items() if k != "alpha_max"}
    return tx.update(updates, tx.init(updates), updates, predict_kl=lambda _: jnp.float32(q), **extra)


@pytest.mark.parametrize(("q", "alpha"), [(4e-3, 0.5), (1e-3, 1.0), (1e-9, 3.0), (1e-37, 3.0), (1e30, 3.1622776e-17)])
def test_alpha(q, alpha) -> None:
    new, state = link(q)
    np.testing.assert_allclose(state.alpha, alpha, rtol=1e-5)
    np.testing.assert_allclose(new["w"], alpha * np.array([3.0, -4.0]), rtol=1e-5)
    assert bool(state.ok)
    assert float(state.alpha) ** 2 * q <= 1e-3 * (1 + 1e-5)


def test_no_prediction_no_change() -> None:
    new, state = link(0.0)
    assert float(state.alpha) == 1.0
    np.testing.assert_array_equal(new["w"], [3.0, -4.0])


@pytest.mark.parametrize("q", [np.nan, np.inf, -np.inf, -1e-9])
def test_unusable_predictions_move_nothing(q) -> None:
    new, state = link(q)
    np.testing.assert_array_equal(new["w"], [0.0, 0.0])
    assert (float(state.alpha), bool(state.ok)) == (0.0, False)
    np.testing.assert_array_equal(state.predicted_kl, np.float32(q))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_updates_and_mismatches_move_nothing(bad) -> None:
    new, state = link(1e-3, {"w": jnp.asarray([bad, 1.0])})
    np.testing.assert_array_equal(new["w"], [0.0, 0.0])
    assert not bool(state.ok)
    new, state = link(1e-3, kl_mismatch=jnp.float32(np.nan))
    np.testing.assert_array_equal(new["w"], [0.0, 0.0])


def test_mismatch_lowers_the_budget_to_a_half_at_most() -> None:
    for m, budget in ((0.0, 1e-3), (2e-4, 8e-4), (7e-4, 5e-4), (1.0, 5e-4)):
        np.testing.assert_allclose(link(1.0, kl_mismatch=m)[1].budget, budget, rtol=1e-6)


def test_schedule_and_own_cap() -> None:
    tx = scale_by_predicted_kl(cosine_budget(4e-2, 1e-2, 3), alpha_max=10.0)
    state, seen = tx.init({"w": jnp.ones(2)}), []
    for _ in range(4):
        _, state = tx.update({"w": jnp.ones(2)}, state, predict_kl=lambda _: jnp.float32(1e-3))
        seen.append((float(state.budget), float(state.alpha)))
    np.testing.assert_allclose(np.array(seen)[:, 0], [4e-2, 2.5e-2, 1e-2, 1e-2], rtol=1e-5)
    np.testing.assert_allclose(np.array(seen)[:, 1], np.sqrt(np.array([40, 25, 10, 10])), rtol=1e-5)
    assert int(state.count) == 4


def test_plain_adam_is_bounded(toy) -> None:
    """Dense updates, dense tangent: the divergence that comes out is the budget, for any learning rate."""
    budget = 1e-4
    tx = optax.chain(optax.adam(3e-2), scale_by_predicted_kl(budget, alpha_max=1e6))

    @jax.jit
    def step(params, state):
        grads = jax.grad(toy.loss)(params, toy.x, toy.y)
        fn = predict_kl(lambda p: toy.logits(p, toy.x), params, toy.spec, step=0, mask=jnp.ones(32))
        updates, state = tx.update(grads, state, params, predict_kl=fn)
        return apply_updates(params, updates), state

    params, state, losses = toy.params, tx.init(toy.params), []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(5):
            losses.append(float(toy.loss(params, toy.x, toy.y)))
            before, (params, state) = params, step(params, state)
            old, new = (jax.nn.log_softmax(toy.logits(p, toy.x)) for p in (before, params))
            real = float(jnp.mean(jnp.sum(jnp.exp(old) * (old - new), axis=-1)))
            assert 0.85 * budget < real < 1.15 * budget
    assert losses[-1] < losses[0]
    no_spec = predict_kl(lambda p: toy.logits(p, toy.x), params, None, step=0, mask=jnp.ones(32))
    with_spec = predict_kl(lambda p: toy.logits(p, toy.x), params, toy.spec, step=0, mask=jnp.ones(32))
    np.testing.assert_array_equal(no_spec(params), with_spec(params))


def test_clear_errors(toy) -> None:
    tx = scale_by_predicted_kl(1e-3)
    state = tx.init({"w": jnp.ones(2)})
    with pytest.raises(UserError, match="needs predict_kl="):
        tx.update({"w": jnp.ones(2)}, state)
    with pytest.raises(UserError, match="budget is 0"):
        scale_by_predicted_kl(0)
    inside = optax.masked(tx, {"a": True, "b": False})
    with pytest.raises(UserError, match="put it after"):
        inside.init({"a": jnp.ones(2), "b": jnp.ones(2)})
    late = optax.chain(lift(toy.spec), tx)
    with pytest.raises(UserError, match="lift comes after"):
        late.update(direction(toy), late.init(toy.params), toy.params, predict_kl=lambda _: jnp.float32(1))
    with pytest.raises(UserError, match="0 scale_by_predicted_kl"):
        kl_link(optax.adam(1e-3).init({"w": jnp.ones(2)}))
    with pytest.raises(UserError, match="has 2 scale_by_predicted_kl"):
        kl_link((state, {"again": state}))
    with pytest.raises(UserError, match=r"no sketch\(\.\.\.\) link"):
        sketch_count(state)
    with pytest.raises(UserError, match="cosine_budget"):
        cosine_budget(1e-3, 0.0, 10)


def test_mismatch_average_ignores_negative_observations() -> None:
    np.testing.assert_allclose(mismatch_average(jnp.float32(1e-3), jnp.float32(-5.0)), 7e-4, rtol=1e-6)


X64 = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from logra_jax import SketchSpec, predict_kl, with_slots
spec = SketchSpec(rank=3, targets=("w",))
w = jax.random.normal(jax.random.key(0), (12, 6), jnp.float64)
u = jax.random.normal(jax.random.key(1), (3, 6), jnp.float32)
x = jax.random.normal(jax.random.key(2), (5, 12), jnp.float64)
logits = lambda p: jnp.sin(x @ p["w"])
slots = with_slots({"w": w}, spec, 4)["w"]
from logra_jax.optim.projection import expand_leaf
full = expand_leaf(u, slots.key_data, spec.matrices({"w": w})["w"], "rademacher").astype(jnp.float64)
along = lambda t: logits({"w": w + t * full})
h = 1e-6
z_dot = (along(h) - along(-h)) / (2 * h)
p = jax.nn.softmax(along(0.0))
c = z_dot - jnp.sum(p * z_dot, -1, keepdims=True)
want = float(jnp.mean(0.5 * jnp.sum(p * c**2, -1)))
got = float(predict_kl(logits, {"w": w}, spec, 4, jnp.ones(5))({"w": u}))
print(abs(got / want - 1))
"""


def test_in_double_precision() -> None:
    """x64 programs work, and there the tangent equals a finite difference to the float32 of the sketch."""
    out = subprocess.run([sys.executable, "-c", X64], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 1e-6
