"""Save a model as a Hugging Face folder, with the names, shards and side files of the one it came from."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from logra_jax.errors import UserError
from logra_jax.mesh import fetch, fetch_parts
from logra_jax.models.config import ModelConfig
from logra_jax.models.decoder import CausalLM, Params, check_dtype
from logra_jax.models.hf import INDEX, SINGLE, hf_shapes, open_shards, read_json
from logra_jax.models.names import name_table, text_name
from logra_jax.models.tensor_file import CODES, DTYPES, write_tensor_file

SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "chat_template*",
    "*processor_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "LICENSE*",
    "NOTICE*",
)

Layout = dict[str, dict[str, tuple[str, tuple[int, ...]]]]  # file -> tensor -> dtype code and shape


def save_hf(
    model: CausalLM,
    params: Params,
    folder: str | Path,
    *,
    dtype: Any = None,
    overwrite: bool = False,
    residual: Params | None = None,
    write: bool = True,
) -> None:
    """Write `params` as a Hugging Face folder that other software can load.

    With `model.source`, the tensor names, shards, index, per-tensor dtypes, config.json, tokenizer, template
    and generation config are the source's: loading and saving unchanged gives the same bytes, and a float32
    copy of bfloat16 weights is rounded back. `dtype` ("float32" or "bfloat16") stores all tensors in that
    dtype instead. A tied head is left out. Without a source, one file and a config.json are written, in the
    dtypes of the parameters.

    residual: what bfloat16 parameters lack of the weights, in a tree like theirs with None where there is
        none. A tensor that is stored as bfloat16 is the parameter alone, any other the sum of the two.
    write: of several processes whose devices hold the parameters together all have to call this, and one writes.

    The folder appears complete or not at all: it is written beside its place and renamed. Raises UserError if
    it exists and `overwrite` is not set, if the source is gone or no longer fits, or if a value overflows
    float16.
    """
    folder = Path(folder).resolve()
    code = None if dtype is None else CODES[check_dtype("dtype", dtype)]
    if write and folder.exists() and not (overwrite and folder.is_dir()):
        raise UserError(f"{folder} exists already; choose another folder or ask for it to be overwritten")
    flat = _checked(model, params)
    layout, metadata = _layout(model, flat, code)
    config = _config_json(model, layout, None if dtype is None else check_dtype("dtype", dtype))
    fetched = _reader(model, flat, layout, {} if residual is None else flatten_dict(residual, sep="/"))
    left = [name for tensors in layout.values() for name in tensors]  # in the order of the files

    def read(name: str) -> np.ndarray:
        left.remove(name)
        return fetched(name)

    if not write:
        for name in tuple(left):
            read(name)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    partial = folder.with_name(f".{folder.name}.partial-{mark}")
    partial.mkdir()
    try:
        for name, tensors in layout.items():
            write_tensor_file(partial / name, tensors, read, metadata[name])
        (partial / "config.json").write_bytes(config)
        if model.source is not None:
            _copy_side_files(Path(model.source), partial, layout)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old-{mark}")
            os.rename(folder, old)
            try:
                os.rename(partial, folder)
            except OSError:
                os.rename(old, folder)
                raise
            shutil.rmtree(old)
        else:
            os.rename(partial, folder)
    except OSError:
        if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in flat.values()):
            for name in tuple(left):  # other processes go on, and wait for this one
                read(name)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _checked(model: CausalLM, params: Params) -> dict[str, jax.Array]:
    """The parameters by path, after comparing paths and shapes with the model's."""
    flat = flatten_dict(params, sep="/")
    expected = flatten_dict(model.abstract_params(), sep="/")
    if flat.keys() != expected.keys():
        odd = ", ".join(sorted(flat.keys() ^ expected.keys())[:6])
        raise UserError(f"these are not the parameters of this model: {odd} are in one of the two only")
    for path, leaf in expected.items():
        if flat[path].shape != leaf.shape:
            raise UserError(f"parameter {path} has shape {list(flat[path].shape)}, expected {list(leaf.shape)}")
    return flat


def _layout(
    model: CausalLM, flat: Mapping[str, jax.Array], code: str | None
) -> tuple[Layout, dict[str, dict[str, str]]]:
    """Which tensors go into which file, in which order and dtype, and each file's metadata."""
    shapes = hf_shapes(model)
    if model.source is None:
        own = {
            name: CODES[flat[path].dtype.name] if code is None else code
            for path, names in model.weight_names().items()
            for name in names
        }
        return {SINGLE: {name: (own[name], shapes[name]) for name in sorted(shapes)}}, {SINGLE: {"format": "pt"}}
    if not Path(model.source).is_dir():
        raise UserError(
            f"the folder the model was loaded from, {model.source}, is gone, and with it its tokenizer "
            f"and file layout; bring it back, or save "
            f"weights and config.json alone with model.replace(source=None)"
        )
    layout: Layout = {}
    metadata, missing = {}, set(shapes)
    for file in open_shards(Path(model.source)):
        ordered = sorted(file.entries.items(), key=lambda item: item[1].begin)
        kept = {}
        for stored, entry in ordered:
            name = text_name(stored) if model.config.hybrid else stored
            if name is None:
                kept[stored] = entry.dtype, entry.shape  # no part of the text model: as it is
            elif name in shapes:
                kept[stored] = entry.dtype if code is None else code, shapes[name]
                missing.discard(name)
        if not kept:
            continue  # a shard that held nothing but the head of a tied model
        layout[file.path.name] = kept
        metadata[file.path.name] = {"format": "pt"} | dict(file.metadata or {})
    if missing:
        odd = ", ".join(sorted(missing)[:6])
        raise UserError(f"{model.source} has changed since the model was loaded: it lacks {odd}")
    return layout, metadata


def _reader(
    model: CausalLM, flat: Mapping[str, jax.Array], layout: Layout, residual: Mapping[str, Any]
) -> Callable[[str], np.ndarray]:
    """A function that fetches one tensor from the devices, in file orientation and dtype.

    The host holds the tensor, and what one device has of it: of arrays of several processes, all of it.
    """
    table = name_table(model.config)
    tensors = {name: entry for file in layout.values() for name, entry in file.items()}
    place = {
        name: (path, np.asarray(at, np.int32))
        for path, form in table.items()
        for name, at in zip(form.names, np.ndindex(form.stack), strict=True)
    }

    # What is no part of the text model comes from the file it is in.
    beside = {}
    if model.source is not None and model.config.hybrid:
        beside = {name: file for file in open_shards(Path(model.source)) for name in file.entries}

    def read(stored: str) -> np.ndarray:
        name = text_name(stored) if model.config.hybrid else stored
        if name is None:
            return beside[stored].read(stored)
        path, at = place[name]
        code, shape = tensors[stored]
        out = np.empty(shape, DTYPES[code])
        layer = table[path].from_file(out)  # a view
        rest = residual.get(path)
        added = None if rest is None or code == "BF16" else fetch(_cut(rest, at))
        for part, value in fetch_parts(_cut(flat[path], at)):
            if added is not None:
                value = value.astype(np.float32) + added[part].astype(np.float32)
            with np.errstate(over="ignore"):
                layer[part] = value
            if code == "F16" and np.isfinite(value).all() and not np.isfinite(layer[part]).all():
                raise UserError(
                    f"{stored} has values up to {np.abs(value.astype(np.float32)).max():.4g}, too large for the "
                    f"source's float16; save with dtype='bfloat16' or 'float32'"
                )
        return out

    return read


@jax.jit
def _cut(leaf: jax.Array, at: jax.Array) -> jax.Array:
    """One layer of a stack, or a leaf that is none; the index is traced, so all layers share a program."""
    return leaf[tuple(at)]


def _config_json(model: CausalLM, layout: Layout, dtype: str | None) -> bytes:
    """The source's config.json, to the byte where nothing in it has changed, or a new one."""
    if model.source is None:
        codes = {code for tensors in layout.values() for code, _ in tensors.values()}
        stored = DTYPES["F32" if len(codes) > 1 else codes.pop()].name
        ends = {"eos_token_id": list(model.end_ids), "pad_token_id": model.pad_id} if model.end_ids else {}
        return _dump(model.config.to_hf(stored) | ends)
    source = Path(model.source)
    raw = read_json(source, "config.json")
    before = json.dumps(raw)
    theta, positions = model.config.rope_theta, model.config.max_position_embeddings
    where = str(source / "config.json")
    own = ModelConfig.from_hf(raw, where=where, rope_theta=theta, max_position_embeddings=positions)
    if own != model.config:
        raise UserError(
            f"the model's configuration is no longer that of {where}; save weights and "
            f"config.json alone with model.replace(source=None)"
        )
    text = raw["text_config"] if model.config.hybrid and "text_config" in raw else raw
    if text.get("max_position_embeddings") != positions:
        text["max_position_embeddings"] = positions
    ropes = [text[key] for key in ("rope_parameters", "rope_scaling") if isinstance(text.get(key), dict)]
    homes = [home for home in (text, *ropes) if "rope_theta" in home] or [text]
    for home in homes:
        if home.get("rope_theta") != theta:
            home["rope_theta"] = theta
    if dtype is not None:
        for part in (raw, text) if text is not raw else (raw,):
            for key in [key for key in ("dtype", "torch_dtype") if key in part] or ["dtype"]:
                part[key] = dtype
    return (source / "config.json").read_bytes() if json.dumps(raw) == before else _dump(raw)


def _copy_side_files(source: Path, target: Path, layout: Layout) -> None:
    """Tokenizer, template, licence and generation config as they are; the index where the source has one."""
    for pattern in SIDE_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)
    if (source / INDEX).is_file():
        index = read_json(source, INDEX)
        before = json.dumps(index)
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name in layout.get(file, {})}
        counts = [
            (int(np.prod(shape, dtype=np.int64)), DTYPES[code].itemsize)
            for tensors in layout.values()
            for code, shape in tensors.values()
        ]
        meta = index.get("metadata")
        if isinstance(meta, dict):
            meta |= {"total_size": sum(count * size for count, size in counts)} if "total_size" in meta else {}
            meta |= {"total_parameters": sum(count for count, _ in counts)} if "total_parameters" in meta else {}
        same = json.dumps(index) == before
        (target / INDEX).write_bytes((source / INDEX).read_bytes() if same else _dump(index))


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
