"""A bad number anywhere: nothing moves, nothing counts, and the flags say so."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from logra_jax import (
    UserError,
    apply_updates,
    guard_nonfinite,
    kl_link,
    lift,
    logra,
    scale_by_predicted_kl,
    scale_by_row_adam,
    sketch,
    sketch_count,
    sketched_value_and_grad,
    step_ok,
)


@pytest.fixture
def run(toy):
    """A jitted, donated step of a guarded chain: decay, momentum, Adam on the biases, the KL link."""
    with jax.numpy_dtype_promotion("standard"):
        spec = dataclasses.replace(toy.spec, refresh=0)
        inner = optax.partition(
            {
                "sketched": optax.chain(sketch(spec), scale_by_row_adam(spec=spec, b1=0.5), optax.scale(-0.01)),
                "dense": optax.adam(1e-3),
            },
            spec.labels(toy.params),
        )
        tx = guard_nonfinite(optax.chain(inner, scale_by_predicted_kl(1e-3), lift(spec, weight_decay=0.1)))

        def step(params, state, grads, q):
            updates, state = tx.update(grads, state, params, predict_kl=lambda _: q)
            return apply_updates(params, updates), state

        grads = sketched_value_and_grad(toy.loss, spec)(toy.params, toy.x, toy.y, step=0)[1]
        yield tx, jax.jit(step, donate_argnums=(0, 1)), grads


def copies(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


def equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def damage(grads, kernel=False, value=np.nan):
    bad = jax.tree.map(lambda x: x, grads)
    if kernel:
        bad["head"]["kernel"] = bad["head"]["kernel"].at[1, 2].set(value)
    else:
        bad["layers"]["up"]["bias"] = bad["layers"]["up"]["bias"].at[0, 3].set(value)
    return bad


@pytest.mark.parametrize("what", ["sketch", "inf sketch", "dense", "prediction", "negative"])
def test_bad_step_is_an_exact_no_op(toy, run, what) -> None:
    tx, step, grads = run
    params, state = jax.tree.map(jnp.array, toy.params), tx.init(toy.params)
    params, state = step(params, state, grads, jnp.float32(1e-3))
    assert bool(step_ok(state))
    before, kept = copies(params), copies(state)
    bad = {
        "sketch": damage(grads, kernel=True),
        "inf sketch": damage(grads, kernel=True, value=np.inf),
        "dense": damage(grads),
    }.get(what, grads)
    q = {"prediction": np.nan, "negative": -1.0}.get(what, 1e-3)
    params, state = step(params, state, bad, jnp.float32(q))
    equal(params, before)
    link = kl_link(state)
    assert (float(link.alpha), bool(link.ok), bool(step_ok(state))) == (0.0, False, False)
    np.testing.assert_array_equal(link.predicted_kl, np.float32(q))
    reset = state._replace(ok=kept.ok)

    def flags(s):
        return jax.tree.map(
            lambda node: node.count if isinstance(node, type(link)) else node,
            s,
            is_leaf=lambda node: isinstance(node, type(link)),
        )

    equal(flags(copies(reset)), flags(kept))
    assert int(sketch_count(state)) == 1
    # The next good step goes on as if the bad one had not been.
    again, state = step(params, state, grads, jnp.float32(1e-3))
    straight, _ = step(jax.tree.map(jnp.array, before), jax.tree.map(jnp.array, kept), grads, jnp.float32(1e-3))
    equal(again, straight)
    assert bool(step_ok(state))


def test_good_steps_are_those_of_the_chain(toy) -> None:
    spec = toy.spec

    def make():
        return optax.chain(sketch(spec), scale_by_row_adam(), optax.scale(-0.01), lift(spec))

    grads = {
        "head": {"kernel": jnp.ones((4, 8))},
        "layers": {"up": {"bias": jnp.ones((3, 16)), "kernel": jnp.ones((3, 4, 16))}},
    }
    with jax.numpy_dtype_promotion("standard"):

        def run(tx):
            return jax.jit(tx.update)(grads, tx.init(toy.params), toy.params)

        (plain, state), (guarded, own) = run(make()), run(guard_nonfinite(make()))
    equal(plain, guarded)
    equal(state, own.inner_state)


def test_infinities_that_belong_to_a_state_are_no_reason_to_stop() -> None:
    """Some optax transformations start from infinity (a best value so far)."""

    def start(params):
        return {"best": jnp.float32(jnp.inf), "sum": jnp.float32(0)}

    def update(updates, state, params=None):
        return updates, {"best": state["best"], "sum": state["sum"] + updates["w"][0] * 1e38}

    tx = guard_nonfinite(optax.GradientTransformation(start, update))
    state = tx.init({"w": jnp.ones(1)})
    _, state = tx.update({"w": jnp.ones(1)}, state)
    assert bool(step_ok(state))
    moved, state = tx.update({"w": jnp.full(1, 9.0)}, state)  # the sum overflows
    assert not bool(step_ok(state))
    assert float(moved["w"][0]) == 0.0
    np.testing.assert_allclose(state.inner_state["sum"], 1e38, rtol=1e-5)


def test_no_guard() -> None:
    with pytest.raises(UserError, match="no guard_nonfinite"):
        step_ok(optax.sgd(0.1).init({"w": jnp.ones(2)}))


def test_alias_is_guarded(toy) -> None:
    train, _ = toy.spec.split(toy.params)
    tx = logra(toy.spec, update_ratio=1e-2)
    grads = {"head": {"kernel": jnp.full((4, 8), jnp.nan)}, "layers": {"up": {"bias": None}}}
    grads["layers"]["up"]["kernel"] = jnp.ones((3, 4, 16))
    updates, state = jax.jit(tx.update)(grads, tx.init(train), train)
    equal(apply_updates(train, updates), train)
    assert not bool(step_ok(state))
