"""Update blobs: round trip, readable by the safetensors library, and every kind of damage refused."""

import hashlib
import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load

from logra_jax.errors import UserError
from logra_jax.sync import blob as blobs
from logra_jax.sync.blob import Update


def make(**changes) -> Update:
    rng = np.random.default_rng(0)
    update = Update(
        base=3,
        version=4,
        seed=2**32 - 1,
        drawn=2,
        decay=1e-3,
        factors={
            "model.layers.0.mlp.up_proj.weight": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
            "model.layers.1.mlp.up_proj.weight": rng.normal(size=(2, 7)).astype(np.float32),
        },
        dense={"model.norm.weight": rng.normal(size=9).astype(ml_dtypes.bfloat16)},
    )
    return replace(update, **changes)


def test_round_trip(tmp_path) -> None:
    update = make()
    blob = blobs.encode(update)
    assert blob == blobs.encode(update)
    blobs.write(tmp_path / "u.safetensors", blob)
    for found, digest in (blobs.decode(blob), blobs.read(tmp_path / "u.safetensors")):
        assert digest == blobs.digest(blob)
        for key in ("base", "version", "seed", "drawn"):
            assert getattr(found, key) == getattr(update, key)
        assert np.float32(found.decay) == np.float32(1e-3)
        for kind in ("factors", "dense"):
            expected, got = getattr(update, kind), getattr(found, kind)
            assert set(got) == set(expected)
            for name in expected:
                assert got[name].dtype == (np.uint16 if expected[name].itemsize == 2 else np.float32)
                assert got[name].shape == expected[name].shape
                assert got[name].tobytes() == expected[name].tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["u.safetensors"]


def test_it_is_a_safetensors_file_with_the_digest_of_all_its_bytes() -> None:
    update = make(dense={}, factors={"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3)})
    blob = blobs.encode(update)
    np.testing.assert_array_equal(load(blob)["a.weight"], update.factors["a.weight"])
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    digest = header["__metadata__"]["sha256"]
    assert digest == hashlib.sha256(blob.replace(digest.encode(), b"0" * 64)).hexdigest()


def test_no_byte_can_change_unseen() -> None:
    blob = blobs.encode(make())
    for place in range(0, len(blob), 7):
        damaged = bytearray(blob)
        damaged[place] ^= 0x11
        with pytest.raises(UserError, match=r"damaged|no update blob|format"):
            blobs.decode(bytes(damaged))


@pytest.mark.parametrize("end", [0, 4, 8, 100, -1])
def test_a_cut_blob_is_refused(end: int) -> None:
    with pytest.raises(UserError, match="damaged"):
        blobs.decode(blobs.encode(make())[:end])


def test_another_format_is_named() -> None:
    with pytest.raises(UserError, match="format 9, this version reads 1"):
        blobs.decode(blobs.encode(make()).replace(b'\\"format\\": 1', b'\\"format\\": 9'))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 3}, "versions"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"drawn": -1}, "drawn is -1"),
        ({"decay": float("nan")}, "decay"),
        ({"factors": {"a": np.zeros((2, 2), np.float64)}}, "factor of a is float64"),
        ({"factors": {"a": np.zeros(2, np.float32)}}, r"shape \(2,\)"),
        ({"factors": {"a": np.full((2, 2), np.inf, np.float32)}}, "not finite"),
        ({"dense": {"a": np.full(2, np.nan, np.float32)}}, "a holds numbers that are not finite"),
        ({"factors": {"a": np.ones((1, 1), np.float32)}, "dense": {"a": np.ones(1, np.float32)}}, "both"),
    ],
)
def test_unfit_updates_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        blobs.encode(make(**changes))


def test_gaussian_projections_cannot_be_drawn_again() -> None:
    with pytest.raises(UserError, match="use 'rademacher'"):
        blobs.encode(make(), "gaussian")


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        blobs.read(tmp_path / "gone.safetensors")
