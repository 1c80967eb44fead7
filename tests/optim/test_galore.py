"""GaLore of stacked layers: each matrix as optax alone would update it, decompositions when due, state on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax import SketchSpec, guard_nonfinite, per_matrix, stacked_galore, state_shardings, step_ok
from logra_jax.checkpoint import Checkpoints
from logra_jax.errors import UserError

SPEC = SketchSpec(rank=4, targets=("up", "down", "head"))
SHAPES = {"down": (3, 8, 24), "head": (24, 16), "norm": (3, 24), "up": (3, 24, 16)}
RATE = optax.linear_schedule(0.1, 0.2, 4)
NUMBERS = {"b1": 0.8, "b2": 0.95, "eps": 1e-7, "weight_decay": 0.1}


def draw(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def lenient():
    """optax's Adam raises a float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def history():
    """Parameters, gradients of four updates, and all updates and states of an interval of 2."""
    with jax.numpy_dtype_promotion("standard"):
        tx = stacked_galore(SPEC, RATE, interval=2, scale=0.5, **NUMBERS)
        params, grads = draw(0), [draw(i) for i in range(1, 5)]
        step, state, states, updates = jax.jit(tx.update), tx.init(params), [], []
        for grad in grads:
            update, state = step(grad, state, params)
            updates.append(update)
            states.append(state)
    return params, grads, updates, states


@pytest.mark.parametrize("name", SHAPES)
def test_each_matrix_is_updated_as_optax_does_alone(name, history):
    params, grads, updates, _ = history
    if name == "norm":
        tx, stack = optax.adamw(RATE, **NUMBERS), [()]
    else:
        adam = optax.scale_by_adam(NUMBERS["b1"], NUMBERS["b2"], NUMBERS["eps"])
        tx = optax.contrib.galore(RATE, 4, 2, 0.5, adam, NUMBERS["weight_decay"])
        stack = [()] if name == "head" else [(i,) for i in range(3)]
    step = jax.jit(tx.update)
    for place in stack:
        state = tx.init(params[name][place])
        for grad, update in zip(grads, updates, strict=True):
            wanted, state = step(grad[name][place], state, params[name][place])
            np.testing.assert_allclose(update[name][place], wanted, rtol=2e-5, atol=1e-6)


def test_projectors_are_kept_until_they_are_due(history):
    *_, states = history
    found = [state.inner_states["sketched"].inner_state[0].projector for state in states]
    for name, shape in {"up": (3, 24, 4), "down": (3, 24, 4), "head": (24, 4)}.items():
        first, second, third, fourth = (np.asarray(projector[name]) for projector in found)
        assert first.shape == shape
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(third, fourth)
        assert np.abs(first - third).max() > 0.1


def ancestors(jaxpr, name, above=()):
    """For each equation of that primitive, the names of the equations it lies in."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            yield above
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr)):
            if isinstance(inner, ClosedJaxpr):
                yield from ancestors(inner.jaxpr, name, (*above, eqn.primitive.name))


def test_decompositions_stand_in_branches():
    """A branch by a scalar is not taken when it is not due; by a vector it would be a selection after both."""
    tx, params = stacked_galore(SPEC, 0.1), draw(0)
    jaxpr = jax.make_jaxpr(tx.update)(draw(1), tx.init(params), params)
    found = list(ancestors(jaxpr.jaxpr, "svd"))
    assert len(found) == 3
    assert all("cond" in above for above in found)
    assert sum("while" in above or "scan" in above for above in found) == 2  # layer by layer; the head is one


def test_nothing_but_targets():
    with pytest.raises(UserError, match="per_matrix: norm is no target"):
        per_matrix(optax.sgd(1.0), SPEC).init(draw(0))


def test_on_a_mesh(history, tmp_path):
    """State in eight parts, the same updates, and through a checkpoint onto another mesh."""
    params, grads, updates, _ = history
    axes = {"down": (None, "fsdp", "tensor"), "head": ("fsdp", "tensor"), "norm": (), "up": (None, "fsdp", None)}
    tx = stacked_galore(SPEC, RATE, interval=2, scale=0.5, **NUMBERS)

    def put(tree, fsdp, tensor):
        mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        return {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*axes[k]))) for k, v in tree.items()}

    sharded = put(params, 4, 2)
    places = state_shardings(tx, sharded)
    state = jax.jit(tx.init, out_shardings=places)(sharded)
    step = jax.jit(tx.update, donate_argnums=1, out_shardings=(None, places))
    for grad, update in zip(grads[:2], updates, strict=False):
        found, state = step(put(grad, 4, 2), state, sharded)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, update)
    own = state.inner_states["sketched"].inner_state[0]
    for name in ("up", "down", "head"):
        for leaf in (own.projector[name], own.base_optimizer_state.mu[name], own.base_optimizer_state.nu[name]):
            split = 4 if name == "up" else 8  # nothing of it lies on tensor
            assert leaf.addressable_shards[0].data.size * split == leaf.size, (name, leaf.shape)
    with jax.numpy_dtype_promotion("strict"):
        folder = Checkpoints(tmp_path, async_=False)
        folder.save(1, state, {})
        elsewhere = state_shardings(tx, put(params, 2, 4))
        template = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, elsewhere)
        restored = folder.restore(template).state
        folder.close()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), restored, state)
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, restored)) == jax.tree.leaves(elsewhere)


def test_a_gradient_that_is_not_finite_moves_nothing():
    tx, params = guard_nonfinite(stacked_galore(SPEC, 0.1, interval=1)), draw(0)
    before = tx.init(params)
    bad = draw(1) | {"up": draw(1)["up"].at[1, 2, 3].set(jnp.nan)}
    updates, after = jax.jit(tx.update)(bad, before, params)
    assert not step_ok(after)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), after.inner_state, before.inner_state)


def test_weights_in_bfloat16_have_a_float32_state():
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), draw(0))
    tx = stacked_galore(SPEC, 0.1)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, draw(1), state, params)
    assert {x.dtype.name for x in jax.tree.leaves((state, updates))} == {"float32", "int32"}
    assert jax.tree.structure(after) == jax.tree.structure(state)
