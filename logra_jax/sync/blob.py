"""One update of the policy as bytes: factors, the seed their projections are drawn from, and whole dense tensors.

A safetensors file; its metadata hold, as JSON under "logra", what is no tensor. A target's tensor is its factor D
`[r, d]`, and its weight `[d, k]`, as in a Hugging Face file, becomes

    W <- (1 - decay) W + D^T signs(seed, drawn, name) / sqrt(r)

Updates add up, so a blob names the version it applies to and the one it makes, and a sha256 over all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from logra_jax.errors import UserError

FORMAT = 1
_CODES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float32": ("F32", np.dtype("<f4")),
    "bfloat16": ("BF16", np.dtype("<u2")),
}
_DTYPES: dict[str, Any] = dict(_CODES.values())
_NO_DIGEST = "0" * 64
_ADVICE = "send it again, or all weights"


@dataclass(frozen=True)
class Update:
    """What takes a policy from version `base` to `version`. Names are those of a text model's Hugging Face file.

    Args:
      seed, drawn: `SketchSpec.seed`, and `SketchSpec.redraw` of the update: when its projections were drawn.
      decay: learning rate times weight decay of this update, a float32 number.
      factors: D by weight name, float32 or bfloat16 `[r, d]`, downhill and scaled: the numbers the trainer applied.
      dense: new values of other tensors, in the file's layout, float32 or bfloat16.

    Read from a blob, bfloat16 arrays are uint16: numpy has no such numbers, only their bits.
    """

    base: int
    version: int
    seed: int
    drawn: int
    decay: float = 0.0
    factors: Mapping[str, Any] = field(default_factory=dict)
    dense: Mapping[str, Any] = field(default_factory=dict)


def encode(update: Update, distribution: str = "rademacher") -> bytes:
    """The blob of an update.

    Raises:
      UserError: a value is out of range or an array has an unfit shape or dtype, named; or the projections are
        not random signs, which alone are the same to the bit in other libraries.
    """
    if distribution != "rademacher":
        raise UserError(
            f"weight update: projections of distribution {distribution!r} cannot be drawn again without jax; "
            "use 'rademacher'"
        )
    _check(update)
    for name, array in (*update.factors.items(), *update.dense.items()):
        if not np.isfinite(array.astype(np.float32)).all():
            raise UserError(
                f"weight update {update.base} -> {update.version}: {name} holds numbers that are not finite"
            )
    meta: dict[str, Any] = {"format": FORMAT, "base": update.base, "version": update.version, "seed": update.seed}
    meta |= {"drawn": update.drawn, "decay": float(np.float32(update.decay)), "dense": list(update.dense)}
    arrays = {name: np.ascontiguousarray(array) for name, array in (*update.factors.items(), *update.dense.items())}
    # Large items first, so that every tensor is aligned to its own.
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))
    head: dict[str, Any] = {"__metadata__": {"logra": json.dumps(meta), "sha256": _NO_DIGEST}}
    at = 0
    for name, array in arrays.items():
        code = _CODES[array.dtype.name][0]
        head[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    header = json.dumps(head).encode()
    header += b" " * (-len(header) % 8)
    values = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]
    blob = bytearray().join([len(header).to_bytes(8, "little"), header, *values])
    place = blob.index(_NO_DIGEST.encode())
    blob[place : place + len(_NO_DIGEST)] = hashlib.sha256(blob).hexdigest().encode()
    return bytes(blob)


def decode(blob: Any) -> tuple[Update, str]:
    """(update, sha256) of a blob: bytes, or anything with a buffer. Its arrays look into that buffer.

    Raises:
      UserError: the blob is cut, changed, of another format, or holds what it should not.
    """
    view = memoryview(blob)
    try:
        start = 8 + int.from_bytes(view[:8], "little")
        header = bytes(view[8:start])
        entries = json.loads(header)
        notes = entries.pop("__metadata__")
        meta, digest = json.loads(notes["logra"]), notes["sha256"]
        found = meta["format"]
    except (ValueError, KeyError, TypeError, AttributeError, MemoryError):
        raise UserError(f"weight update: this is no update blob, or its header is damaged; {_ADVICE}") from None
    if found != FORMAT:
        raise UserError(
            f"weight update: the blob has format {found!r}, this version reads {FORMAT}; use equal versions"
        )
    hashed = hashlib.sha256(view[:8])
    hashed.update(header.replace(str(digest).encode(), _NO_DIGEST.encode(), 1))
    hashed.update(view[start:])
    if hashed.hexdigest() != digest:
        raise UserError(f"weight update: sha256 is {hashed.hexdigest()}, the blob says {digest}: damaged; {_ADVICE}")
    # What follows needs no checks: the digest is that of a header which `encode` wrote.
    factors: dict[str, np.ndarray] = {}
    dense: dict[str, np.ndarray] = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        values = np.frombuffer(view[start + begin : start + end], _DTYPES[entry["dtype"]])
        (dense if name in meta["dense"] else factors)[name] = values.reshape(entry["shape"])
    numbers = {key: meta[key] for key in ("base", "version", "seed", "drawn", "decay")}
    return Update(**numbers, factors=factors, dense=dense), digest


def digest(blob: bytes) -> str:
    """The sha256 that a blob of `encode` carries."""
    found = re.search(rb'"sha256": "([0-9a-f]{64})"', blob)
    assert found, "not from encode"
    return found[1].decode()


def write(path: str | Path, blob: bytes) -> None:
    """Put a blob where others read it: complete under its name, or not there at all.

    Raises:
      UserError: the folder cannot be written to, or is full.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(blob)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"weight update: {path} cannot be written ({error})") from None


def read(path: str | Path) -> tuple[Update, str]:
    """`decode` of a file, which is mapped, not copied.

    Raises:
      UserError: as `decode`, or the file cannot be read.
    """
    try:
        raw = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise UserError(f"weight update: {path} cannot be read here ({error}); is the folder shared?") from None
    return decode(raw)


def _check(update: Update) -> None:
    """What can be said without the weights, and without reading all numbers."""

    def refuse(text: str) -> None:
        raise UserError(f"weight update {update.base} -> {update.version}: {text}")

    if not 0 <= update.base < update.version:
        refuse("versions are numbers from 0 on, and grow")
    for key, value in (("seed", update.seed), ("drawn", update.drawn)):
        if not 0 <= value < 2**32:
            refuse(f"{key} is {value}; it must lie in [0, 2^32)")
    if not (math.isfinite(update.decay) and 0 <= update.decay < 1):
        refuse(f"decay is {update.decay}; it must lie in [0, 1)")
    if both := update.factors.keys() & update.dense.keys():
        refuse(f"{min(both)} is both a target and dense")
    for kind, arrays in (("factor", update.factors), ("dense value", update.dense)):
        for name, array in arrays.items():
            if array.dtype.name not in _CODES:
                refuse(f"the {kind} of {name} is {array.dtype.name}; use {' or '.join(_CODES)}")
            if kind == "factor" and (array.ndim != 2 or 0 in array.shape):
                refuse(f"the factor of {name} has shape {array.shape}; it is [r, d]")
