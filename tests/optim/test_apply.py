"""Low-rank updates: values, memory, layouts, shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax import (
    LowRank,
    SketchSpec,
    Target,
    UserError,
    apply_updates,
    lift,
    rounding_keys,
    scale_by_row_adam,
    sketch,
    sketched,
    state_shardings,
)
from logra_jax.optim import twin


def factors(toy):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"head": {"kernel": draw(4, 8)}, "layers": {"up": {"bias": draw(3, 16), "kernel": draw(3, 4, 16)}}}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("decay", "rate"), [(0.0, 1.0), (0.1, 0.5)])
def test_values(toy, project, dense, decay, rate) -> None:
    tx = lift(toy.spec, weight_decay=decay, learning_rate=rate, dense=dense)
    state = tx.init(toy.params)._replace(count=jnp.int32(6))
    d = factors(toy)
    updates, after = jax.jit(tx.update)(d, state, toy.params)
    assert int(after.count) == 7
    new = (optax.apply_updates if dense else apply_updates)(toy.params, updates)

    def wide(v):
        return np.asarray(v, np.float64)

    for i in range(3):
        a = project(toy.spec, f"model.layers.{i}.up.weight", 16, 6)
        kernel = wide(toy.params["layers"]["up"]["kernel"][i])
        want = (1 - decay * rate) * kernel + a.T @ wide(d["layers"]["up"]["kernel"][i])
        np.testing.assert_allclose(new["layers"]["up"]["kernel"][i], want, rtol=0, atol=3e-6)
    a = project(toy.spec, "lm_head.weight", 16, 6)
    want = (1 - decay * rate) * wide(toy.params["head"]["kernel"]) + a.T @ wide(d["head"]["kernel"])
    np.testing.assert_allclose(new["head"]["kernel"], want, rtol=0, atol=3e-6)
    bias = toy.params["layers"]["up"]["bias"] + d["layers"]["up"]["bias"]
    np.testing.assert_array_equal(new["layers"]["up"]["bias"], bias)


def test_schedules_of_decay(toy) -> None:
    def rate(count):
        return jnp.where(count == 6, 0.25, 0.0)

    tx = lift(toy.spec, weight_decay=0.5, learning_rate=rate)
    for count, decay in ((6, 0.125), (5, 0.0)):
        state = tx.init(toy.params)._replace(count=jnp.int32(count))
        updates, _ = tx.update(factors(toy), state, toy.params)
        assert isinstance(updates["head"]["kernel"], LowRank)
        assert float(updates["head"]["kernel"].decay) == decay


def test_frozen_leaves_and_zero_factors_change_nothing(toy) -> None:
    train, _ = toy.spec.split(toy.params)
    tx = lift(toy.spec)
    zero = jax.tree.map(jnp.zeros_like, factors(toy))
    zero["layers"]["up"]["bias"] = None
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), train)
    for tree in (train, half):
        updates, _ = tx.update(zero, tx.init(tree), tree)
        new = apply_updates(tree, updates, keys=rounding_keys(toy.spec, tree, 0))
        assert new["layers"]["up"]["bias"] is None
        jax.tree.map(np.testing.assert_array_equal, new, tree)
        assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, tree)


@pytest.mark.parametrize(
    ("shape", "in_axes", "out_axes"),
    [
        ((12, 2, 4), (-3,), (-2, -1)),
        ((3, 12, 2, 4), (-3,), (-2, -1)),
        ((3, 2, 6, 8), (-3, -2), (-1,)),
        ((8, 12), (-1,), (-2,)),
        ((12, 3, 8), (-3,), (-1,)),
        ((2, 3, 12, 8), (-2,), (-1,)),
    ],
)
def test_layouts(shape, in_axes, out_axes) -> None:
    """Each leaf, as the matrices it holds: written out with numpy."""
    spec = SketchSpec(rank=3, targets=(Target("w", in_axes, out_axes),))
    w = jax.random.normal(jax.random.key(0), shape)
    matrix = spec.matrices({"w": w})["w"]
    d = jax.random.normal(jax.random.key(1), matrix.sketch_shape(3))
    tx = lift(spec)
    got = jax.jit(lambda w: apply_updates(w, tx.update({"w": d}, tx.init(w), w)[0]))({"w": w})["w"]
    batch = [i for i in range(len(shape)) if i - len(shape) not in (*in_axes, *out_axes)]
    order = (*batch, *(a % len(shape) for a in (*in_axes, *out_axes)))
    want = np.asarray(w, np.float64).transpose(order).copy()
    flat = want.reshape(-1, matrix.k, matrix.d)
    for i, one in enumerate(np.asarray(d, np.float64).reshape(-1, 3, matrix.d)):
        name = f"w/{i}" if batch else "w"
        flat[i] += (twin.signs(42, 0, name, 3, matrix.k) / np.sqrt(3)).T @ one
    np.testing.assert_allclose(np.asarray(got).transpose(order), flat.reshape(want.shape), atol=3e-6)
    full = jax.jit(lambda w: lift(spec, dense=True).update({"w": d}, tx.init(w), w)[0])({"w": w})["w"]
    np.testing.assert_allclose(w + full, got, atol=3e-6)


def test_stack_is_updated_in_place() -> None:
    """The donated stack is the result's buffer, and beside it is about one matrix, not the stack."""
    layers, k, d, r = 16, 64, 128, 4
    spec = SketchSpec(rank=r, targets=("w",))
    w = {"w": jnp.zeros((layers, k, d))}
    tx = lift(spec)
    updates, _ = tx.update({"w": jnp.ones((layers, r, d))}, tx.init(w), w)
    memory = jax.jit(apply_updates, donate_argnums=0).lower(w, updates).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 4 * layers * k * d
    assert memory.temp_size_in_bytes < 4 * layers * k * d / 4


def test_wrong_shapes_and_lifted_twice(toy) -> None:
    tx = lift(toy.spec)
    state = tx.init(toy.params)
    with pytest.raises(UserError, match="put sketch"):
        tx.update(toy.params, state, toy.params)
    with pytest.raises(UserError, match="needs the parameters"):
        tx.update(factors(toy), state)
    lifted, _ = tx.update(factors(toy), state, toy.params)
    with pytest.raises(UserError, match="one lift"):
        tx.update(lifted, state, toy.params)
    with pytest.raises(UserError, match="lift comes last"):
        sketch(toy.spec).update(lifted, sketch(toy.spec).init(toy.params), toy.params)


def test_accumulating_wrappers_refuse_sketches(toy) -> None:
    """They want updates shaped like the parameters; an error, not a wrong sum."""
    steps = optax.MultiSteps(optax.chain(sketch(toy.spec), lift(toy.spec)), 2)
    with jax.numpy_dtype_promotion("standard"), pytest.raises((TypeError, ValueError)):
        steps.update(factors(toy), steps.init(toy.params), toy.params)
    finite = optax.apply_if_finite(optax.chain(sketch(toy.spec), lift(toy.spec)), 3)
    with jax.numpy_dtype_promotion("standard"), pytest.raises((TypeError, ValueError)):
        finite.update(factors(toy), finite.init(toy.params), toy.params)


def sharded_train():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    train = {
        "layers": {"up": {"kernel": put(jnp.ones((3, 16, 8)), None, "fsdp", "tensor")}},
        "norm": put(jnp.ones(8), "tensor"),
        "kernel": put(jnp.ones((6, 8)), "fsdp"),
        "frozen": None,
    }
    return mesh, SketchSpec(rank=2, refresh=0, targets=("layers/.*kernel",)), train


def test_updates_of_another_form_than_the_weights(toy) -> None:
    """The two ways to end a chain, each with the other's `apply_updates`, and a chain without an end."""
    link = sketch(toy.spec)
    sketches = link.update(factors(toy), link.init(toy.params), toy.params)[0]
    with pytest.raises(UserError, match=r"head/kernel has shape \(4, 8\).* lift\(spec\)"):
        apply_updates(toy.params, sketches)
    last = lift(toy.spec)
    updates = last.update(sketches, last.init(toy.params), toy.params)[0]
    with pytest.raises(UserError, match=r"use logra_jax\.apply_updates, or .* lift\(spec, dense=True\)"):
        optax.apply_updates(toy.params, updates)
    with pytest.raises(UserError, match="w has no update, but NoneType"):
        apply_updates({"w": jnp.ones(3)}, {"w": None})


@pytest.mark.parametrize("wrap", ["chain", "partition", "masked", "inject"])
def test_state_follows_the_parameters(wrap) -> None:
    mesh, spec, train = sharded_train()
    row_adam = scale_by_row_adam(b1=0.9, spec=spec)
    if wrap == "chain":
        tx = optax.chain(sketch(spec), row_adam, lift(spec))
    elif wrap == "partition":
        tx = optax.partition(
            {"sketched": optax.chain(sketch(spec), row_adam), "dense": optax.adam(1e-3)}, spec.labels(train)
        )
    elif wrap == "masked":
        tx = optax.masked(row_adam, jax.tree.map(lambda label: label == "sketched", spec.labels(train)))
    else:
        tx = optax.inject_hyperparams(
            lambda b2: scale_by_row_adam(b2=b2, b1=0.9, spec=spec), hyperparam_dtype=jnp.float32
        )(b2=0.9)
    shardings = state_shardings(tx, train)
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(tx.init, out_shardings=shardings)(train)
    specs = {jax.tree_util.keystr(p): x.sharding.spec for p, x in jax.tree.leaves_with_path(state)}

    def find(*parts):
        return [s for path, s in specs.items() if all(part in path for part in parts)]

    layer = "['layers']['up']['kernel']"
    assert find(".rms", layer) == [PartitionSpec(None, "tensor")]
    assert find(".momentum", layer) == [PartitionSpec(None, None, ("tensor", "fsdp"))]
    if wrap == "chain":
        assert find(".rms", "rms['kernel']") == [PartitionSpec(None)]
        assert find(".rms", "['norm']") == [PartitionSpec("tensor")]
    if wrap == "partition":
        assert find(".mu", "['kernel']") == [PartitionSpec("fsdp")]
    assert all(s == PartitionSpec() for s in find("count"))
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(state))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), train)
    assert jax.tree.leaves(state_shardings(tx, abstract)) == jax.tree.leaves(shardings)


def test_one_device() -> None:
    train = {"w": jnp.ones((6, 8))}
    tx = scale_by_row_adam()
    assert set(jax.tree.leaves(state_shardings(tx, train))) == {train["w"].sharding}


def test_sharded_apply_moves_no_weights(toy) -> None:
    """Each device draws its part of A and updates its own part of W."""
    mesh, spec, train = sharded_train()

    def put(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    train = {"layers": {"up": {"kernel": put(jnp.ones((3, 64, 8)), None, "fsdp", "tensor")}}}
    d = {"layers": {"up": {"kernel": put(jnp.ones((3, 2, 8)), None, None, "tensor")}}}
    tx = lift(spec)
    step = jax.jit(lambda w, d: apply_updates(w, tx.update(d, tx.init(w), w)[0]), donate_argnums=0)
    compiled = step.lower(train, d).compile()
    assert not any(op in compiled.as_text() for op in ("all-gather", "all-to-all", "collective-permute"))
    plain = jax.device_get(train), jax.device_get(d)
    want = apply_updates(plain[0], tx.update(plain[1], tx.init(plain[0]), plain[0])[0])
    new = step(train, d)
    assert new["layers"]["up"]["kernel"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), new, want)


def test_any_optimizer_can_follow_a_sketch(toy) -> None:
    """`sketched` gives Adam sketch-shaped moments, though chain hands it the full parameters."""
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(sketch(toy.spec), sketched(optax.adam(1e-2), toy.spec), lift(toy.spec))
        state = tx.init(toy.params)
        assert state[1][0].mu["layers"]["up"]["kernel"].shape == (3, 4, 16)
        assert state[1][0].mu["layers"]["up"]["bias"].shape == (3, 16)
        params = toy.params
        grads = jax.grad(toy.loss)(params, toy.x, toy.y)
        updates, state = tx.update(grads, state, params)
        assert updates["head"]["kernel"].factor.shape == (4, 8)
        np.testing.assert_allclose(np.abs(updates["head"]["kernel"].factor), 1e-2, rtol=1e-3)
