"""`logra` composes, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from logra_jax import (
    UserError,
    apply_updates,
    kl_link,
    lift,
    logra,
    predict_kl,
    scale_by_predicted_kl,
    scale_by_row_adam,
    scale_by_update_ratio,
    sketch,
    sketch_count,
    sketched_value_and_grad,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def standard_promotion():
    """optax's Adam and schedules mix integers and floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def three_steps(toy, tx, train, frozen_bias=None):
    def loss(p):
        return toy.loss(full(p), toy.x, toy.y)

    def full(p):
        up = p["layers"]["up"]
        return p if up["bias"] is not None else {**p, "layers": {"up": {**up, "bias": frozen_bias}}}

    @jax.jit
    def step(p, state):
        count = sketch_count(state)
        grads = sketched_value_and_grad(loss, toy.spec)(p, step=count)[1]
        fn = predict_kl(lambda p: toy.logits(full(p), toy.x), p, toy.spec, step=count, mask=jnp.ones(32))
        updates, state = tx.update(grads, state, p, predict_kl=fn)
        return apply_updates(p, updates), state

    state = tx.init(train)
    for _ in range(3):
        train, state = step(train, state)
    return train, state


@pytest.mark.parametrize("by", ["ratio", "rate"])
def test_equals_the_chain_written_out(toy, by) -> None:
    toy = toy._replace(spec=dataclasses.replace(toy.spec, refresh=2))  # lasts long enough for momentum
    spec = toy.spec
    train, frozen = spec.split(toy.params)
    bias = frozen["layers"]["up"]["bias"]
    if by == "ratio":
        alias = logra(spec, update_ratio=1e-2, kl_budget=1e-3, weight_decay=1e-3)
        links = [scale_by_row_adam(preserve_norm=True), scale_by_update_ratio(1e-2, spec)]
        last = lift(spec, weight_decay=1e-3, learning_rate=1e-2)
    else:
        rate = optax.linear_schedule(1e-3, 1e-2, 2)
        alias = logra(spec, learning_rate=rate, kl_budget=1e-3, weight_decay=1e-1, b1=0.5)
        links = [scale_by_row_adam(b1=0.5, spec=spec), optax.scale_by_learning_rate(rate)]
        last = lift(spec, weight_decay=1e-1, learning_rate=rate)
    chain = optax.chain(sketch(spec), *links, scale_by_predicted_kl(1e-3), last)
    got, want = three_steps(toy, alias, train, bias), three_steps(toy, chain, train, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got[0], want[0])
    jax.tree.map(np.testing.assert_array_equal, kl_link(got[1]), kl_link(want[1]))


def test_dense_leaves_have_their_own_optimizer_and_share_alpha(toy) -> None:
    """The step of Adam on the biases is its own times alpha; weight decay leaves them alone."""
    tx = logra(toy.spec, update_ratio=1e-2, kl_budget=1e-5, dense=optax.adam(1e-3), weight_decay=0.5)

    @jax.jit
    def step(params, state):
        grads = sketched_value_and_grad(toy.loss, toy.spec, materialize=False)(params, toy.x, toy.y, step=0)[1]
        fn = predict_kl(lambda p: toy.logits(p, toy.x), params, toy.spec, step=0, mask=jnp.ones(32))
        return grads, *tx.update(grads, state, params, predict_kl=fn)

    grads, updates, state = step(toy.params, tx.init(toy.params))
    alone = optax.adam(1e-3)
    own, _ = alone.update(grads["layers"]["up"]["bias"], alone.init(toy.params["layers"]["up"]["bias"]))
    alpha = kl_link(state).alpha
    assert 0 < float(alpha) < 1
    np.testing.assert_allclose(updates["layers"]["up"]["bias"], alpha * own, rtol=1e-6)
    assert float(updates["head"]["kernel"].decay) == np.float32(0.5 * 1e-2)


def test_without_kl_link(toy) -> None:
    train, _ = toy.spec.split(toy.params)
    tx = logra(toy.spec, learning_rate=1e-2)
    with pytest.raises(UserError, match="0 scale_by_predicted_kl"):
        kl_link(tx.init(train))


def test_form_of_row_adam(toy) -> None:
    """preserve_norm follows the kind of step unless it is said."""
    train, _ = toy.spec.split(toy.params)
    grads = sketched_value_and_grad(lambda p: jnp.sum(jnp.square(p["head"]["kernel"])), toy.spec)(train, step=0)[1]
    grads["layers"]["up"]["kernel"] = jnp.ones((3, 4, 16))

    def factor(**kw):
        return logra(toy.spec, **kw).update(grads, logra(toy.spec, **kw).init(train), train)[0]["head"]["kernel"].factor

    plain = factor(learning_rate=1.0)
    np.testing.assert_array_equal(plain, factor(learning_rate=1.0, preserve_norm=False))
    kept = factor(learning_rate=1.0, preserve_norm=True)
    np.testing.assert_allclose(jnp.linalg.norm(kept), jnp.linalg.norm(grads["head"]["kernel"]), rtol=1e-5)
    assert not np.allclose(plain, kept)
    np.testing.assert_array_equal(factor(update_ratio=0.1), factor(update_ratio=0.1, preserve_norm=True))


def test_refusals(toy) -> None:
    with pytest.raises(UserError, match="neither is set"):
        logra(toy.spec)
    with pytest.raises(UserError, match="both are set"):
        logra(toy.spec, learning_rate=1e-3, update_ratio=1e-3)
    with pytest.raises(UserError, match=r"layers/up/bias is trained but is no target; pass dense="):
        logra(toy.spec, update_ratio=1e-3).init(toy.params)
    tx = logra(toy.spec, update_ratio=1e-3, kl_budget=1e-3)
    train, _ = toy.spec.split(toy.params)
    with pytest.raises(UserError, match="needs the parameters"):
        tx.update(train, tx.init(train))
    assert "2610.06647" in logra.__doc__
