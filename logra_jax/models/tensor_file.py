"""The safetensors format: an 8-byte length, a JSON header, raw little-endian values.

Read and written here because the library's numpy side cannot hand out bfloat16, and because a file written
back with its own header is then equal to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from logra_jax.errors import UserError

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: dtype code, shape, first and last byte after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """The checked header of a safetensors file; values are read when asked for."""

    path: Path
    data_start: int
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str] | None

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype, as a read-only view of the mapped file."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.begin == entry.end:
            return np.zeros(entry.shape, dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.data_start + entry.begin, (entry.end - entry.begin,))
        return np.asarray(raw).view(dtype).reshape(entry.shape)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise UserError(f"the tensor {key!r} is listed twice")
        out[key] = value
    return out


def open_tensor_file(path: Path) -> TensorFile:
    """Read and check the header of `path` against the file's size; raises UserError naming the file."""
    advice = "the file is damaged or its download is incomplete; fetch it again"
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{path}: {size} bytes cannot hold the header it announces: {advice}")
        blob = file.read(length)
    try:
        header = json.loads(blob, object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise UserError("the header is no JSON object")
        metadata = header.pop("__metadata__", None)
        entries = {name: _entry(name, value) for name, value in header.items()}
    except UserError as error:
        raise UserError(f"{path}: {error}: {advice}") from None
    except ValueError as error:
        raise UserError(f"{path}: the header is no JSON ({error}): {advice}") from None
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise UserError(f"{path}: tensor {name!r} begins at byte {entry.begin}, expected {at}: {advice}")
        at = entry.end
    if at != size - 8 - length:
        raise UserError(f"{path}: holds {size - 8 - length} bytes of values, expected {at}: {advice}")
    return TensorFile(path, 8 + length, entries, metadata)


def _entry(name: str, value: Any) -> Entry:
    try:
        code, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        counts = [int(number) for number in (*shape, begin, end)]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"the entry of tensor {name!r} has no readable dtype, shape and data_offsets") from None
    if code not in DTYPES:
        raise UserError(f"tensor {name!r} has dtype {code!r}, readable are {', '.join(DTYPES)}")
    if min(counts) < 0 or end - begin != int(np.prod(shape, dtype=np.int64)) * DTYPES[code].itemsize:
        raise UserError(f"tensor {name!r} of shape {list(shape)} and dtype {code} spans {end - begin} bytes")
    return Entry(code, shape, begin, end)


def write_tensor_file(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    value: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None,
) -> None:
    """Write `tensors` (name -> dtype code and shape) in that order, asking `value` for one at a time."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (code, shape) in tensors.items():
        end = at + int(np.prod(shape, dtype=np.int64)) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    blob = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("wb") as file:
        file.write(len(blob).to_bytes(8, "little"))
        file.write(blob)
        for name, (code, shape) in tensors.items():
            array = np.ascontiguousarray(value(name), dtype=DTYPES[code])
            if array.shape != shape:
                raise UserError(f"tensor {name!r} has shape {list(array.shape)}, expected {list(shape)}")
            file.write(array.reshape(-1).view(np.uint8).data)
            del array  # not to be held beside the next
