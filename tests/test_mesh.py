"""Meshes of fake devices: placement by logical axes, refusals with numbers, and logits that do not change."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tiny import TINY

from logra_jax.errors import UserError
from logra_jax.mesh import AxisTable, batch_sharding, fetch_parts, make_mesh, place, shardings
from logra_jax.models import CausalLM

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
MODEL = CausalLM(TINY.replace(**SIZES), scan_unroll=1)


def random_params():
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32) * np.float32(0.2), MODEL.abstract_params())


def test_each_kind_of_parameter_has_its_place():
    found = jax.tree.map(lambda s: s.spec, shardings(make_mesh(2, 4), MODEL.logical_axes()))
    layers = found["layers"]
    assert found["embed_tokens"]["embedding"] == P("tensor", "fsdp")
    assert found["lm_head"]["kernel"] == P("fsdp", "tensor")
    assert found["norm"]["scale"] == P(None)
    for block, name in (
        ("self_attn", "q_proj"),
        ("self_attn", "k_proj"),
        ("mlp", "gate_proj"),
        ("mlp", "up_proj"),
    ):
        assert layers[block][name]["kernel"] == P(None, "fsdp", "tensor")
    for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        assert layers[block][name]["kernel"] == P(None, ("tensor", "fsdp"), None)
    assert layers["self_attn"]["v_proj"]["bias"] == P(None, "tensor")
    assert layers["input_layernorm"]["scale"] == P(None, None)


@pytest.fixture(scope="module")
def unsharded():
    params = random_params()
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 48, (8, 6), dtype=np.int32)
    mask = np.tril(np.ones((8, 6), np.int32))[:, ::-1]
    return params, ids, mask, np.asarray(jax.jit(MODEL.logits)(params, ids, mask))


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1), (1, 8)])
def test_logits_do_not_depend_on_the_mesh(unsharded, fsdp, tensor):
    params, ids, mask, expected = unsharded
    mesh = make_mesh(fsdp, tensor)
    places = shardings(mesh, MODEL.logical_axes(), params)
    rows = batch_sharding(mesh, len(ids))
    params = jax.device_put(params, places)
    up = params["layers"]["mlp"]["up_proj"]["kernel"]
    assert up.sharding.shard_shape(up.shape) == (2, 32 // fsdp, 40 // tensor)
    logits = jax.jit(MODEL.logits)(params, jax.device_put(ids, rows), jax.device_put(mask, rows))
    assert len(logits.sharding.device_set) == fsdp * tensor
    real = mask == 1
    np.testing.assert_allclose(np.asarray(logits)[real], expected[real], atol=1e-5, rtol=0)


def test_two_dimensions_on_one_mesh_axis_are_a_mistake():
    with pytest.raises(ValueError, match=r"\('embed', 'mlp'\) lie on .*one mesh axis is used twice"):
        AxisTable(mlp="fsdp").spec(("embed", "mlp"))
    assert AxisTable(mlp=None).spec(("layers", "embed", "mlp")) == P(None, "fsdp", None)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    """Split over tensor are 32 and 16 (heads), 40 and 48, over fsdp 32 and 40: greatest common divisor 8."""
    mesh = make_mesh(1, 5)
    with pytest.raises(UserError, match=r"tensor=5 does not divide .* dimension is \d+; .*: 1, 2, 4, 8$"):
        shardings(mesh, MODEL.logical_axes(), MODEL.abstract_params())
    with pytest.raises(UserError, match=r"fsdp=3 does not divide .*embed dimension is 32; .*: 1, 2, 4, 8$"):
        shardings(make_mesh(3, 1), MODEL.logical_axes(), MODEL.abstract_params())
    with pytest.raises(UserError, match=r"6 rows do not split evenly over fsdp=4; .* or fsdp from 1, 2, 3, 6"):
        batch_sharding(make_mesh(4, 1), 6)


def test_a_mesh_takes_the_first_devices_and_no_more_than_there_are():
    devices = jax.devices()
    assert list(make_mesh(2, 2).devices.flat) == devices[:4]
    assert list(make_mesh(1, 2, devices[4:]).devices.flat) == devices[4:6]
    assert make_mesh(4, 2).shape == {"fsdp": 4, "tensor": 2}
    with pytest.raises(UserError, match="fsdp=3 x tensor=3 needs 9 devices, there are 8"):
        make_mesh(3, 3)
    with pytest.raises(UserError, match="fsdp=0, tensor=1: both must be at least 1"):
        make_mesh(0, 1)


def test_arrays_come_and_go_in_parts(monkeypatch):
    """Split over fsdp, the same on both devices of tensor: 4 parts to place on 8 devices, and 4 to fetch."""
    values, mesh = np.arange(96, dtype=np.float32).reshape(12, 8), make_mesh(4, 2)
    sharding, sizes = jax.sharding.NamedSharding(mesh, P(None, "fsdp")), []

    def read(part):
        sizes.append(values[part].shape)
        return values[part].copy()

    array = place(values.shape, read, sharding)
    assert sizes == [(12, 2)] * 8
    assert array.sharding == sharding
    np.testing.assert_array_equal(array, values)
    monkeypatch.setattr("logra_jax.mesh.BLOCK", 5 * 2 * 4)  # bytes of five rows
    parts, found = list(fetch_parts(array)), np.zeros_like(values)
    assert [part.shape for _, part in parts] == [(5, 2), (5, 2), (2, 2)] * 4
    for index, part in parts:
        found[index] += part
    np.testing.assert_array_equal(found, values)
