"""One contract for every transformation: what optax, jit, checkpoints and sharding take for granted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax import (
    SketchSpec,
    apply_updates,
    cosine_budget,
    guard_nonfinite,
    lift,
    logra,
    predict_kl,
    rounding_keys,
    scale_by_predicted_kl,
    scale_by_row_adam,
    scale_by_update_ratio,
    sketch,
    sketch_count,
    sketched,
    sketched_value_and_grad,
    state_shardings,
)

SPEC = SketchSpec(rank=4, seed=3, refresh=2, targets=("kernel",))


def chain(*links, spec=SPEC, dense=False):
    """Links between the first and the last one; a lift that suits `optax.apply_updates` where dense."""
    return optax.chain(sketch(spec), *links, lift(spec, dense=dense))


def injected(factory, **numbers):
    """Hyperparameters as float32 arrays in the state; integers stay in the spec."""
    return optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(**numbers)


MAKE = {
    "row_adam norm-preserving": lambda: chain(scale_by_row_adam(preserve_norm=True), optax.scale(-1.0)),
    "row_adam momentum": lambda: chain(scale_by_row_adam(b1=0.9, spec=SPEC), optax.scale(-0.03)),
    "update_ratio schedule": lambda: chain(
        scale_by_row_adam(), scale_by_update_ratio(optax.cosine_decay_schedule(0.05, 60), SPEC)
    ),
    "predicted_kl schedule": lambda: chain(
        scale_by_row_adam(), optax.scale(-0.03), scale_by_predicted_kl(cosine_budget(0.1, 0.01, 40))
    ),
    "lift decay": lambda: optax.chain(
        sketch(SPEC), scale_by_row_adam(), optax.scale(-0.03), lift(SPEC, weight_decay=1e-3)
    ),
    "lift dense": lambda: chain(scale_by_row_adam(), optax.scale(-0.03), dense=True),
    "sketched adam": lambda: chain(sketched(optax.adam(0.05), SPEC)),
    "partition": lambda: optax.chain(
        optax.partition(
            {
                "sketched": optax.chain(sketch(SPEC), scale_by_row_adam(), scale_by_update_ratio(0.03, SPEC)),
                "dense": optax.adam(1e-2),
            },
            SPEC.labels(params()),
        ),
        scale_by_predicted_kl(0.05),
        lift(SPEC),
    ),
    "masked": lambda: optax.chain(
        optax.masked(
            optax.chain(sketch(SPEC), scale_by_row_adam(), scale_by_update_ratio(0.03, SPEC)),
            jax.tree.map(lambda label: label == "sketched", SPEC.labels(params())),
        ),
        optax.masked(optax.sgd(0.01), jax.tree.map(lambda label: label == "dense", SPEC.labels(params()))),
        lift(SPEC),
    ),
    "injected momentum": lambda: chain(
        injected(functools.partial(scale_by_row_adam, spec=SPEC), b1=0.5), optax.scale(-0.03)
    ),
    "injected ratio": lambda: chain(
        scale_by_row_adam(), injected(functools.partial(scale_by_update_ratio, spec=SPEC), ratio=0.03)
    ),
    "injected kl": lambda: chain(
        scale_by_row_adam(), optax.scale(-0.03), injected(scale_by_predicted_kl, budget=0.05, alpha_max=2.0)
    ),
    "logra ratio": lambda: logra(SPEC, update_ratio=0.03, kl_budget=0.05, dense=optax.adam(1e-2)),
    "logra rate": lambda: logra(
        SPEC, learning_rate=optax.constant_schedule(0.03), b1=0.5, dense=optax.sgd(0.1), weight_decay=0.01
    ),
}


def params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    tree = {
        "layers": {"kernel": jax.random.normal(keys[0], (2, 16, 16)) * 0.25, "bias": jnp.zeros((2, 16))},
        "out": {"kernel": jax.random.normal(keys[1], (16, 8)) * 0.25, "bias": jnp.zeros(8)},
    }
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def logits(p, x):
    def layer(h, leaf):
        return jnp.tanh(h @ leaf["kernel"].astype(h.dtype) + leaf["bias"].astype(h.dtype)[None, :]), None

    h, _ = jax.lax.scan(layer, x, p["layers"])
    return h @ p["out"]["kernel"].astype(h.dtype) + p["out"]["bias"].astype(h.dtype)[None, :]


def data():
    x = jax.random.normal(jax.random.key(7), (64, 16))
    return x, jnp.argmax(x[:, :8], axis=-1)


def loss_fn(p, x, y):
    logp = jax.nn.log_softmax(logits(p, x), axis=-1)
    return -jnp.mean(jnp.take_along_axis(logp, y[:, None], axis=-1))


def make_step(tx, dense=False):
    def step(p, state, x, y):
        count = sketch_count(state)
        loss, grads = sketched_value_and_grad(loss_fn, SPEC, materialize=False)(p, x, y, step=count)
        fn = predict_kl(lambda q: logits(q, x), p, SPEC, step=count, mask=jnp.ones(64), materialize=False)
        updates, state = tx.update(
            grads,
            state,
            p,
            predict_kl=fn,
            kl_mismatch=jnp.float32(0),
            value=loss,
            an_argument_nobody_expects=1,
        )
        if dense:
            return optax.apply_updates(p, updates), state, loss
        return apply_updates(p, updates, keys=rounding_keys(SPEC, p, count)), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


@pytest.fixture(params=list(MAKE))
def case(request):
    """optax itself promotes integers to floats, so strict promotion is off around whole chains."""
    with jax.numpy_dtype_promotion("standard"):
        yield request.param, MAKE[request.param]()


def test_converges_with_stable_state_and_one_compilation(case) -> None:
    """Donated, with unknown extra arguments; structure, shapes and dtypes stay; nothing recompiles."""
    name, tx = case
    step, (x, y) = make_step(tx, dense="dense" in name), data()
    p, state = params(), tx.init(params())

    def signature(tree):
        return jax.tree.map(lambda v: (v.shape, v.dtype), tree)

    first, shapes, losses = signature(state), signature(p), []
    assert all(v.size > 0 for v in jax.tree.leaves(state))
    for _ in range(40):
        p, state, loss = step(p, state, x, y)
        losses.append(float(loss))
        assert jax.tree.structure(signature(state)) == jax.tree.structure(first)
    assert signature(state) == first
    assert signature(p) == shapes
    assert step._cache_size() == 1
    assert losses[-1] < 0.5 * losses[0]
    assert int(sketch_count(state)) == 40


def test_init_looks_at_shapes_only(case) -> None:
    _, tx = case
    abstract = jax.eval_shape(params)

    def signature(tree):
        return jax.tree.map(lambda v: (v.shape, v.dtype), tree)

    want = signature(tx.init(params()))
    assert signature(jax.eval_shape(tx.init, abstract)) == want


@pytest.mark.parametrize("name", ["logra ratio"])
def test_bfloat16_parameters_keep_their_dtype(name) -> None:
    with jax.numpy_dtype_promotion("standard"):
        tx, (x, y) = MAKE[name](), data()
        step = make_step(tx)
        p, state = params(jnp.bfloat16), tx.init(params(jnp.bfloat16))
        dtypes = [v.dtype for v in jax.tree.leaves(state)]
        for _ in range(30):
            p, state, loss = step(p, state, x, y)
        assert all(v.dtype == jnp.bfloat16 for v in jax.tree.leaves(p))
        assert [v.dtype for v in jax.tree.leaves(state)] == dtypes
        assert float(loss) < 0.7 * float(loss_fn(params(jnp.bfloat16), x, y))


@pytest.mark.parametrize("name", ["logra ratio"])
def test_sharded_equals_unsharded(name) -> None:
    """Parameters over two axes of devices, the state beside them: the same numbers as on one device."""
    with jax.numpy_dtype_promotion("standard"):
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tensor"))
        spread = {
            (16, 8): PartitionSpec("fsdp", "tensor"),
            (2, 16, 16): PartitionSpec(None, "fsdp", "tensor"),
            (2, 16): PartitionSpec(None, "tensor"),
            (8,): PartitionSpec(),
        }
        tx, (x, y) = MAKE[name](), data()
        results = []
        for put in (lambda v: v, lambda v: jax.device_put(v, NamedSharding(mesh, spread[v.shape]))):
            p = jax.tree.map(put, params())
            state = jax.jit(tx.init, out_shardings=state_shardings(tx, p))(p)
            step = make_step(tx)
            for _ in range(3):
                p, state, _ = step(p, state, x, y)
            results.append(jax.device_get(p))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *results)


@pytest.mark.parametrize("name", ["logra rate", "injected momentum"])
def test_resumed_run_equals_unbroken_run(name) -> None:
    """Saved as plain arrays at step 3 of 6, in the middle of a projection's life (refresh 2): bit-equal."""
    with jax.numpy_dtype_promotion("standard"):
        tx, (x, y) = MAKE[name](), data()
        step = make_step(tx)
        p, state = params(), tx.init(params())
        for i in range(6):
            p, state, _ = step(p, state, x, y)
            if i == 2:
                saved = [np.array(v) for v in jax.tree.leaves((p, state))]
        fresh = MAKE[name]()
        structure = jax.tree.structure((params(), fresh.init(params())))
        q, restored = jax.tree.unflatten(structure, [jnp.asarray(v) for v in saved])
        again = make_step(fresh)
        for _ in range(3):
            q, restored, _ = again(q, restored, x, y)
        jax.tree.map(np.testing.assert_array_equal, (q, restored), (p, state))


def test_our_own_links_are_strict() -> None:
    """Without optax's own links, the whole step runs with rank promotion forbidden and dtypes strict."""
    tx = guard_nonfinite(
        chain(
            scale_by_row_adam(b1=0.5, spec=SPEC),
            scale_by_update_ratio(0.03, SPEC),
            scale_by_predicted_kl(0.05),
        )
    )
    x, y = data()
    loss = make_step(tx)(params(), tx.init(params()), x, y)[2]
    assert np.isfinite(float(loss))
