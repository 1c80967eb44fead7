"""Adapters: where they start, how they are split over devices and from the rest, and what they add up to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from logra_jax import LoraKernel, SketchSpec, adapter_shapes, add_adapters, merge, merge_adapters, split_adapters
from logra_jax.errors import UserError
from logra_jax.optim.spec import Target

SPEC = SketchSpec(rank=4, seed=7, targets=("up", "head"), names={"up": ("a.up", "b.up"), "norm": ("a.n", "b.n")})


@pytest.fixture(scope="module")
def base():
    rng = np.random.default_rng(0)
    shapes = {"head": (32, 16), "norm": (2, 64), "up": (2, 64, 24)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def tree(base):
    return add_adapters(base, SPEC, alpha=12.0)


def test_first_values(base, tree):
    assert tree["norm"] is base["norm"]
    for name, k, d, stack in (("up", 64, 24, (2,)), ("head", 32, 16, ())):
        node = tree[name]
        assert (node.a.shape, node.b.shape) == ((*stack, k, 4), (*stack, 4, d))
        assert node.kernel is base[name]
        assert not np.any(node.b)
        np.testing.assert_array_equal(node.scale, np.full(stack, 3.0, np.float32))
        a = np.asarray(node.a)
        assert np.abs(a).max() <= k**-0.5
        # Uniform: the deviation is the bound over root 3, to 5 standard errors of its estimate.
        assert a.std() == pytest.approx((3 * k) ** -0.5, rel=5 * np.sqrt(0.2 / a.size))
    first, second = np.asarray(tree["up"].a)
    assert np.abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.25
    # Name and seed alone decide, not what else is there.
    for seed, same in ((7, True), (8, False)):
        alone = add_adapters({"up": base["up"][1:]}, SketchSpec(4, seed, targets=("up",), names={"up": ("b.up",)}))
        np.testing.assert_array_equal(alone["up"].scale, 1.0)
        assert np.all((np.asarray(alone["up"].a[0]) == second) == same)


def test_split_and_merged_again(tree):
    train, frozen = split_adapters(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(train)]
    assert paths == ["head/a", "head/b", "up/a", "up/b"]
    assert len(jax.tree.leaves(frozen)) == 5
    again = merge(train, frozen)
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_sum_is_taken_in_float32(dtype, base, tree):
    rng, filled = np.random.default_rng(1), {}
    for name in ("up", "head"):
        b = jnp.asarray(rng.normal(size=tree[name].b.shape), jnp.float32)
        filled[name] = LoraKernel(tree[name].kernel.astype(jnp.bfloat16), tree[name].a, b, tree[name].scale)
    found = merge_adapters(tree | filled, dtype)
    assert found["norm"] is base["norm"]
    for name, node in filled.items():
        kernel, a, b = (np.asarray(x, np.float64) for x in (node.kernel, node.a, node.b))
        wanted = kernel + 3.0 * a @ b
        assert found[name].dtype == (dtype or "bfloat16")
        # Half a unit in the last place of the result, after a float32 sum of five terms below 8.
        step = 2.0**-8 if dtype is None else 2.0**-24
        np.testing.assert_allclose(np.asarray(found[name], np.float64), wanted, rtol=step, atol=5 * 8 * 2.0**-24)


def test_on_a_mesh(base, tree):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {"head": ("tensor", "fsdp"), "norm": (), "up": (None, "fsdp", "tensor")}
    put = {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec(*specs[k]))) for k, v in base.items()}
    sharded = add_adapters(put, SPEC, alpha=12.0)
    placed = {name: tuple(x.sharding.spec for x in (sharded[name].a, sharded[name].b)) for name in ("up", "head")}
    assert placed == {
        "up": (PartitionSpec(None, "fsdp", None), PartitionSpec(None, "fsdp", "tensor")),
        "head": (PartitionSpec("tensor", None), PartitionSpec("tensor", "fsdp")),
    }
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), sharded, tree)
    abstract = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for k, v in put.items()}
    shapes = adapter_shapes(abstract, SPEC)
    assert jax.tree.structure(shapes) == jax.tree.structure(tree)
    for shape, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(sharded), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (leaf.shape, leaf.dtype, leaf.sharding)
    odd = adapter_shapes(abstract, SketchSpec(6, targets=("up",)))  # 4 devices cannot share 6 rows
    assert odd["up"].b.sharding.spec == PartitionSpec(None, None, "tensor")


def test_misuse(base, tree):
    with pytest.raises(TypeError, match="take one matrix of the stack"):
        jnp.ones((2, 64)) @ tree["up"]
    with pytest.raises(UserError, match=r"LoRA: the matrix of up .* is not its last two axes"):
        add_adapters(base, SketchSpec(2, targets=(Target("up", (-1,), (-2,)),)))
