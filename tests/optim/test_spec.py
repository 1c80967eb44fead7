"""Which leaves are sketched."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from logra_jax import SketchSpec, Target, UserError, merge
from logra_jax.optim.names import DEFAULT_TARGETS


def leaf(*shape: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def test_containers_and_vectors_are_not_projected() -> None:
    params = {
        "layers": {
            "0": {
                "self_attn": {"q_proj": {"kernel": leaf(896, 896), "bias": leaf(896)}},
                "mlp": {"up_proj": {"kernel": leaf(896, 4864)}},
                "input_layernorm": {"scale": leaf(896)},
            }
        },
        "embed_tokens": leaf(151936, 896),
    }
    spec = SketchSpec(rank=16, targets=("self_attn", "mlp"))
    assert set(spec.matrices(params)) == {"layers/0/self_attn/q_proj/kernel", "layers/0/mlp/up_proj/kernel"}


def test_stacked_leaves_without_names() -> None:
    params = {"a": {"kernel": leaf(2, 32, 8), "bias": leaf(64, 8), "scale": leaf(64, 8)}}
    found = SketchSpec(rank=16, targets=("a/",)).matrices(params)
    assert set(found) == {"a/kernel"}
    matrix = found["a/kernel"]
    assert matrix.names == ("a/kernel/0", "a/kernel/1")
    assert (matrix.batch, matrix.k, matrix.d, matrix.sketch_shape(16)) == ((2,), 32, 8, (2, 16, 8))


def test_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(UserError, match="no_such_name"):
        SketchSpec(rank=4, targets=("no_such_name",)).matrices({"w": {"kernel": leaf(8, 8)}})
    with pytest.raises(UserError, match="only_a_bias"):
        SketchSpec(rank=4, targets=("w", "only_a_bias")).matrices({"w": {"kernel": leaf(8, 8)}, "only_a_bias": leaf(8)})


def test_stack_of_24_matrices_and_a_convolution() -> None:
    params = {
        "layers": {"mlp": {"up_proj": {"kernel": leaf(24, 896, 4864)}}},
        "linear_attn": {"conv1d": {"kernel": leaf(8192, 1, 4)}},
    }
    for names in (None, {"linear_attn/conv1d/kernel": ("linear_attn.conv1d.weight",)}):
        found = SketchSpec(rank=16, targets=("up_proj", "linear_attn|mlp"), names=names).matrices
        with pytest.raises(UserError, match=r"linear_attn\|mlp"):  # up_proj is taken by the first pattern
            found(params)
        found = SketchSpec(rank=16, targets=("up_proj|linear_attn",), names=names).matrices(params)
        assert set(found) == {"layers/mlp/up_proj/kernel"}
        assert len(found["layers/mlp/up_proj/kernel"].names) == 24
        assert (found["layers/mlp/up_proj/kernel"].k, found["layers/mlp/up_proj/kernel"].d) == (896, 4864)


def test_number_of_names_tells_a_stack_of_vectors_from_a_matrix() -> None:
    params = {"w": leaf(3, 16), "m": leaf(16, 3), "s": leaf(3, 16, 2)}
    names = {"w": ("w.0", "w.1", "w.2"), "m": ("w.m",), "s": ("w.s0", "w.s1", "w.s2")}
    assert set(SketchSpec(rank=2, targets=("^w",), names=names).matrices(params)) == {"m", "s"}


def test_stack_of_which_a_part_matches_is_refused() -> None:
    names = {"k": ("layers.0.k", "layers.1.k")}
    with pytest.raises(UserError, match=r"layers\\\\.0.*1 of the 2 .*layers\.1\.k"):
        SketchSpec(rank=2, targets=(r"layers\.0",), names=names).matrices({"k": leaf(2, 8, 8)})


def test_rank_must_be_below_the_inputs() -> None:
    with pytest.raises(UserError, match=r"rank 8 .* 8 inputs of w"):
        SketchSpec(rank=8, targets=("w",)).matrices({"w": leaf(8, 64)})
    assert SketchSpec(rank=7, targets=("w",)).matrices({"w": leaf(8, 64)})


def test_default_targets() -> None:
    names = [
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.linear_attn.in_proj_qkv.weight",
        "model.layers.3.linear_attn.in_proj_z.weight",
        "model.layers.3.linear_attn.out_proj.weight",
        "layers/mlp/down_proj/kernel",
    ]
    others = [
        "model.layers.3.self_attn.q_proj.bias",
        "model.layers.3.linear_attn.in_proj_a.weight",
        "model.layers.3.linear_attn.conv1d.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "layers/mlp/down_proj/bias",
    ]
    params = {str(i): leaf(512, 8) for i in range(len(names + others))}
    spec = SketchSpec(names={str(i): (n,) for i, n in enumerate(names + others)})
    assert spec.targets == DEFAULT_TARGETS
    assert set(spec.matrices(params)) == {str(i) for i in range(len(names))}


def test_axes_that_are_spelled_out() -> None:
    params = {"q": leaf(2, 64, 4, 8), "o": leaf(2, 4, 8, 64)}
    spec = SketchSpec(rank=4, targets=(Target("^q", (-3,), (-2, -1)), Target("^o", in_axes=(-3, -2), out_axes=(-1,))))
    found = spec.matrices(params)
    assert (found["q"].k, found["q"].d, found["q"].batch) == (64, 32, (2,))
    assert (found["o"].k, found["o"].d, found["o"].batch) == (32, 64, (2,))


def test_split_and_merge_and_summary(toy) -> None:
    train, frozen = toy.spec.split(toy.params, dense=("bias",))
    assert frozen["layers"]["up"] == {"bias": None, "kernel": None}
    assert train["head"]["kernel"] is toy.params["head"]["kernel"]
    only_sketched, rest = toy.spec.split(toy.params)
    assert only_sketched["layers"]["up"]["bias"] is None
    assert rest["layers"]["up"]["bias"] is toy.params["layers"]["up"]["bias"]
    for pair in ((train, frozen), (only_sketched, rest)):
        assert jax.tree.leaves(merge(*pair)) == jax.tree.leaves(toy.params)
    rows = toy.spec.summary(toy.params)
    assert rows == [
        ("head/kernel", "sketched", (16, 8), 128),
        ("layers/up/bias", "frozen", (3, 16), 48),
        ("layers/up/kernel", "sketched", (3, 16, 16), 768),
    ]
    assert toy.spec.summary(toy.params, dense=(".",))[1][1] == "dense"
    with pytest.raises(UserError, match="no_leaf"):
        toy.spec.split(toy.params, dense=("no_leaf",))


def test_a_cut_tree_may_lack_the_leaves_of_a_pattern(toy) -> None:
    cut = {"head": {"kernel": toy.params["head"]["kernel"]}, "layers": optax.MaskedNode()}
    assert set(toy.spec.matrices(cut)) == {"head/kernel"}


def test_hashable_and_comparable(toy) -> None:
    again = SketchSpec(rank=4, seed=5, targets=["up", "lm_head"], names=dict(toy.spec.names))
    assert (hash(again), again) == (hash(toy.spec), toy.spec)
    assert replace(again, rank=3) != again
    assert replace(again, rank=3).matrices(toy.params).keys() == again.matrices(toy.params).keys()


@pytest.mark.parametrize(("refresh", "expected"), [(1, [0, 1, 2, 3, 4, 5]), (3, [0, 0, 0, 3, 3, 3]), (0, [0] * 6)])
def test_redraw(refresh: int, expected: list[int]) -> None:
    spec = SketchSpec(refresh=refresh)
    assert [spec.redraw(u) for u in range(6)] == expected
    assert spec.redraw(jnp.arange(6)).tolist() == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"distribution": "uniform"}, "uniform"),
        ({"refresh": -1}, "refresh is -1"),
        ({"targets": "up_proj"}, "targets is 'up_proj'"),
        ({"targets": ()}, "at least one"),
        ({"targets": ("(",)}, "not a regular expression"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SketchSpec(**settings)


@pytest.mark.parametrize("axes", [((0,), (-1,)), ((-1,), (-1,)), ((), (-1,))])
def test_bad_axes(axes: tuple) -> None:
    with pytest.raises(UserError, match="distinct negative"):
        Target("q", *axes)


def test_explicit_mesh_axes_are_refused() -> None:
    devices, place = jax.devices()[:2], jax.sharding.PartitionSpec(None, "x")
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=devices)
        params = {"kernel": jax.device_put(jnp.zeros((8, 4)), jax.sharding.NamedSharding(mesh, place))}
        spec = SketchSpec(rank=2, targets=("kernel",))
        if kind is jax.sharding.AxisType.Auto:
            assert set(spec.matrices(params)) == {"kernel"}
        else:
            with pytest.raises(UserError, match="kernel is sharded over Explicit mesh axes"):
                spec.matrices(params)
