"""Projections in jax against the numpy twin and float64 products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax import SketchSpec, Target
from logra_jax.optim import projection as pj
from logra_jax.optim import twin
from logra_jax.optim.spec import Matrix


def one(name: str, k: int, d: int) -> Matrix:
    return Matrix("w", (name,), (k, d), (-2,), (-1,))


@pytest.mark.parametrize(("r", "k"), [(1, 2), (4, 19), (33, 70), (8, 64)])
@pytest.mark.parametrize("update", [0, 7])
def test_signs_are_those_of_the_twin(r: int, k: int, update: int) -> None:
    spec = SketchSpec(rank=r, seed=2**32 - 1)
    key = pj.weight_keys(spec, one("a.weight", k, 3), update)
    for dtype in (jnp.float32, jnp.bfloat16):
        got = jax.jit(pj.signs, static_argnums=(1, 2, 3, 4))(key, r, k, "rademacher", dtype)
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got).astype(np.int8), twin.signs(spec.seed, update, "a.weight", r, k))


@pytest.mark.parametrize("refresh", [0, 1, 4])
def test_keys_of_a_stack_follow_names_and_redraws(refresh: int) -> None:
    spec = SketchSpec(rank=2, refresh=refresh)
    names = tuple(f"layer.{i}.{j}" for i in range(2) for j in range(3))
    matrix = Matrix("w", names, (2, 3, 8, 4), (-2,), (-1,))
    got = jax.jit(lambda u: pj.weight_keys(spec, matrix, u))(jnp.int32(6))
    assert got.shape == (2, 3, 2)
    drawn = {0: 0, 1: 6, 4: 4}[refresh]
    expected = [twin.weight_key(spec.seed, drawn, name) for name in names]
    np.testing.assert_array_equal(got.reshape(-1, 2), expected)


def test_gaussian_has_the_deviation_of_signs() -> None:
    key = pj.weight_keys(SketchSpec(rank=64), one("a", 512, 1), 0)
    a = np.asarray(pj.signs(key, 64, 512, "gaussian"))
    # 32,768 standard normal numbers: mean within 4 / sqrt(n), deviation within 4 / sqrt(2 n).
    assert abs(a.mean()) < 4 / 181
    assert abs(a.std() - 1) < 4 / 256
    assert np.abs(a).max() > 3
    np.testing.assert_array_equal(a, pj.signs(key, 64, 512, "gaussian"))


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_products(distribution: str) -> None:
    r, k, d = 5, 40, 7
    key = pj.weight_keys(SketchSpec(rank=r), one("a", k, d), 3)
    a = np.asarray(pj.signs(key, r, k, distribution), np.float64) / np.sqrt(r)
    rng = np.random.default_rng(0)
    g, f = rng.normal(size=(k, d)), rng.normal(size=(r, d))

    def close(got, want):
        return np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())

    close(pj.sketch_matrix(jnp.asarray(g, jnp.float32), key, r, distribution), a @ g)
    close(pj.expand_matrix(jnp.asarray(f, jnp.float32), key, k, distribution), a.T @ f)
    close(pj.gram(key, r, k, distribution), a @ a.T)


def test_expansion_is_unbiased() -> None:
    """E[A^T A] = I: the mean of A^T A over 400 draws is within 5 deviations of it everywhere."""
    r, k, n = 4, 6, 400
    spec = SketchSpec(rank=r)
    keys = jnp.stack([pj.weight_keys(spec, one("a", k, 1), u) for u in range(n)])
    a = np.asarray(jax.vmap(lambda key: pj.signs(key, r, k))(keys), np.float64)
    mean = np.einsum("nri,nrj->ij", a, a) / (r * n)
    np.testing.assert_allclose(np.diag(mean), 1, rtol=1e-12)
    assert np.abs(mean - np.eye(k)).max() < 5 / np.sqrt(r * n)


def test_stack_layouts_round_trip() -> None:
    spec = SketchSpec(rank=2, targets=(Target("w", in_axes=(-4, -2), out_axes=(-1,)),))
    leaf = jnp.arange(2.0 * 3 * 5 * 4 * 6).reshape(2, 3, 5, 4, 6)
    matrix = spec.matrices({"w": leaf})["w"]
    stack = pj.to_stack(leaf, matrix)
    assert stack.shape == (10, 12, 6)
    np.testing.assert_array_equal(stack[1 * 5 + 3, 2 * 4 + 1], leaf[1, 2, 3, 1])
    np.testing.assert_array_equal(pj.from_stack(stack, matrix), leaf)


def test_each_device_draws_its_own_columns() -> None:
    """A sharded draw needs no communication and equals the unsharded one."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    key = pj.weight_keys(SketchSpec(rank=4), one("a", 256, 1), 0)
    draw = jax.jit(lambda key: pj.signs(key, 4, 256), out_shardings=NamedSharding(mesh, PartitionSpec(None, "x")))
    compiled = draw.lower(key).compile()
    assert not any(op in compiled.as_text() for op in ("all-gather", "all-reduce", "all-to-all", "permute"))
    np.testing.assert_array_equal(draw(key), pj.signs(key, 4, 256))
