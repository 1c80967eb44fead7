"""The safetensors format: agreement with the library, and damage is found before a value is read."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.flax import load_file as flax_load
from safetensors.numpy import load_file, save_file

from logra_jax.errors import UserError
from logra_jax.models.tensor_file import open_tensor_file, write_tensor_file

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def path(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path / "x.safetensors"


def with_header(path, change):
    blob = path.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = change(json.loads(blob[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob[8 + length :])


def set_entry(name, **fields):
    def change(header):
        header[name] |= fields
        return header

    return change


def twice(header):
    text = json.dumps(header)
    return ('{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, ' + text[1:]).encode()


def test_reads_what_the_library_writes(path):
    file = open_tensor_file(path)
    assert file.metadata == {"format": "pt"}
    assert file.entries.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(file.read(name), value)
        assert file.read(name).dtype == value.dtype


def test_writes_the_same_bytes_as_the_library(path, tmp_path):
    file = open_tensor_file(path)
    ordered = sorted(file.entries, key=lambda name: file.entries[name].begin)
    layout = {name: (file.entries[name].dtype, file.entries[name].shape) for name in ordered}
    write_tensor_file(tmp_path / "y", layout, TENSORS.__getitem__, {"format": "pt"})
    same = load_file(tmp_path / "y")
    assert same.keys() == TENSORS.keys()
    assert all(np.array_equal(same[name], value) for name, value in TENSORS.items())


def test_bfloat16_survives_both_ways(tmp_path):
    value = np.asarray([[1.5, -2.0, 3e38]], ml_dtypes.bfloat16)
    write_tensor_file(tmp_path / "y", {"w": ("BF16", (1, 3))}, {"w": value}.__getitem__, None)
    np.testing.assert_array_equal(np.asarray(flax_load(tmp_path / "y")["w"]), value)
    np.testing.assert_array_equal(open_tensor_file(tmp_path / "y").read("w"), value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "holds 31 bytes of values, expected 32"),
        (lambda p: p.write_bytes(p.read_bytes() + b"0"), "holds 33 bytes of values, expected 32"),
        (lambda p: p.write_bytes(p.read_bytes()[:20]), "20 bytes cannot hold the header"),
        (lambda p: p.write_bytes(b""), "0 bytes cannot hold the header"),
        (lambda p: p.write_bytes(b"<!DOCTYPE html><html></html>"), "cannot hold the header"),
        (lambda p: with_header(p, lambda h: b"{nonsense"), "the header is no JSON"),
        (lambda p: with_header(p, lambda h: b"[1]"), "the header is no JSON object"),
        (lambda p: with_header(p, twice), "the tensor 'a' is listed twice"),
        (lambda p: with_header(p, set_entry("a", dtype="I64")), "tensor 'a' has dtype 'I64'"),
        (
            lambda p: with_header(p, set_entry("a", shape=[2, 4])),
            r"tensor 'a' of shape \[2, 4\].* spans 24 bytes",
        ),
        (lambda p: with_header(p, set_entry("a", shape=3)), "entry of tensor 'a' has no readable"),
        (lambda p: with_header(p, set_entry("b", data_offsets=[0, 8])), "begins at byte 0, expected"),
    ],
)
def test_damage_is_found_and_the_file_named(path, spoil, message):
    spoil(path)
    with pytest.raises(UserError, match=f"x.safetensors: .*{message}.*(fetch it again)"):
        open_tensor_file(path)
