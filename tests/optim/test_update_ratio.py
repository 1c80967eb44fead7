"""The length of the lifted step, against explicit products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import SketchSpec, UserError, scale_by_update_ratio
from logra_jax.optim import projection as pj


def lifted(toy, project, updates, count):
    """Full-size updates in float64."""
    a = [project(toy.spec, f"model.layers.{i}.up.weight", 16, count) for i in range(3)]
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), updates)
    up = np.stack([a[i].T @ wide["layers"]["up"]["kernel"][i] for i in range(3)])
    head = project(toy.spec, "lm_head.weight", 16, count).T @ wide["head"]["kernel"]
    return {"head": {"kernel": head}, "layers": {"up": {"bias": wide["layers"]["up"]["bias"], "kernel": up}}}


def directions(toy, scale=1.0):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    return {"head": {"kernel": draw(4, 8)}, "layers": {"up": {"bias": draw(3, 16), "kernel": draw(3, 4, 16)}}}


def norm(tree) -> float:
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("count", [0, 5])
def test_step_is_the_fraction_of_the_weights(toy, project, scale, count) -> None:
    tx = scale_by_update_ratio(1e-2, toy.spec)
    state = tx.init(toy.params)._replace(count=jnp.int32(count))
    updates = directions(toy, scale)
    new, after = jax.jit(tx.update)(updates, state, toy.params)
    assert int(after.count) == count + 1
    np.testing.assert_allclose(norm(lifted(toy, project, new, count)), 1e-2 * norm(toy.params), rtol=1e-5)
    factor = np.asarray(new["head"]["kernel"]) / np.asarray(updates["head"]["kernel"])
    assert (factor < 0).all()
    np.testing.assert_allclose(factor, factor[0, 0], rtol=1e-5)
    bias = np.asarray(new["layers"]["up"]["bias"]) / np.asarray(updates["layers"]["up"]["bias"])
    np.testing.assert_allclose(bias, factor[0, 0], rtol=1e-5)


def test_no_direction_no_step(toy) -> None:
    tx = scale_by_update_ratio(1e-2, toy.spec)
    zero = jax.tree.map(jnp.zeros_like, directions(toy))
    new, _ = tx.update(zero, tx.init(toy.params), toy.params)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(new))


def test_schedule_of_the_update_number(toy, project) -> None:
    tx = scale_by_update_ratio(lambda count: 1e-2 * (count + 1).astype(jnp.float32), toy.spec)
    state = tx.init(toy.params)._replace(count=jnp.int32(2))
    new, _ = tx.update(directions(toy), state, toy.params)
    np.testing.assert_allclose(norm(lifted(toy, project, new, 2)), 3e-2 * norm(toy.params), rtol=1e-5)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_gaussian_and_bfloat16_parameters(distribution) -> None:
    spec = SketchSpec(rank=3, distribution=distribution, targets=("w",))
    params = {"w": jax.random.normal(jax.random.key(0), (20, 6)).astype(jnp.bfloat16)}
    d = jax.random.normal(jax.random.key(1), (3, 6))
    tx = scale_by_update_ratio(0.5, spec)
    new, _ = tx.update({"w": d}, tx.init(params), params)
    key = pj.weight_keys(spec, spec.matrices(params)["w"], 0)
    a = np.asarray(pj.signs(key, 3, 20, distribution), np.float64) / np.sqrt(3)
    np.testing.assert_allclose(norm([a.T @ np.asarray(new["w"], np.float64)]), 0.5 * norm(params), rtol=1e-5)


def test_the_product_is_never_formed() -> None:
    spec = SketchSpec(rank=3, targets=("w",))
    params = {"w": jnp.zeros((2, 40, 24))}
    tx = scale_by_update_ratio(1e-2, spec)
    program = str(jax.make_jaxpr(tx.update)({"w": jnp.ones((2, 3, 24))}, tx.init(params), params))
    lines = [line for line in program.splitlines() if "dot_general" in line]
    assert lines
    assert not any("40,24]" in line or "24,40]" in line for line in lines)


def test_errors(toy) -> None:
    tx = scale_by_update_ratio(1e-2, toy.spec)
    state = tx.init(toy.params)
    with pytest.raises(UserError, match="needs the parameters"):
        tx.update(directions(toy), state)
    bad = directions(toy) | {"head": {"kernel": jnp.zeros((3, 8))}}
    with pytest.raises(UserError, match=r"head/kernel has shape \(3, 8\)"):
        tx.update(bad, state, toy.params)
