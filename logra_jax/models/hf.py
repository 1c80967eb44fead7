"""Load a Hugging Face folder: everything is checked against the name table before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from logra_jax.errors import UserError
from logra_jax.mesh import place
from logra_jax.models.config import ModelConfig
from logra_jax.models.decoder import CausalLM, Params, check_dtype
from logra_jax.models.names import HfName, name_table, text_name
from logra_jax.models.tensor_file import CODES, DTYPES, TensorFile, open_tensor_file
from logra_jax.models.tokens import end_and_pad_ids

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"


def load_hf(
    folder: str | Path,
    dtype: Any = "float32",
    *,
    compute_dtype: Any = None,
    shardings: Params | None = None,
    rope_theta: float | None = None,
    max_position_embeddings: int | None = None,
) -> tuple[CausalLM, Params]:
    """Load a Qwen2, Qwen2.5, Qwen3, Qwen3.5 (text alone) or Llama folder as `(model, params)`.

    dtype: of the parameters, "float32" or "bfloat16", whatever the file stores; or a mapping from parameter
        paths to those, where a parameter that is not in it stays as stored (float16 and mixed stacks become
        float32). compute_dtype: of the activations, by default the same; to be given with a mapping.
    shardings: tree like the parameters, of the NamedSharding of each leaf (default: all on one device).
    rope_theta, max_position_embeddings: override config.json, and are saved by `save_hf`.

    Tensors go from the mapped files to their places on the devices one after the other: the host holds no more than
    what one device gets of one tensor, and of several processes each reads what its own devices get. Raises UserError
    for a folder that is incomplete, damaged, or of a model that this decoder does not compute exactly. No tensor of the
    text model is skipped or made up, but for a stored head beside `tie_word_embeddings`, which decides.
    """
    folder = Path(folder)
    asked = dict(dtype) if isinstance(dtype, Mapping) else None
    if asked is None:
        dtype = check_dtype("dtype", dtype)
    elif compute_dtype is None:
        raise UserError("load_hf: with a mapping of dtypes, compute_dtype has to be given")
    compute_dtype = dtype if compute_dtype is None else check_dtype("compute_dtype", compute_dtype)
    raw = read_json(folder, "config.json")
    config = ModelConfig.from_hf(
        raw,
        where=str(folder / "config.json"),
        rope_theta=rope_theta,
        max_position_embeddings=max_position_embeddings,
    )
    end_ids, pad_id = end_and_pad_ids(folder, raw)
    model = CausalLM(config, compute_dtype=compute_dtype, source=str(folder.resolve()), end_ids=end_ids, pad_id=pad_id)
    files = open_shards(folder)
    home = check_tensors(folder, model, files)
    shapes = flatten_dict(model.abstract_params(), sep="/")
    if unknown := set(asked or ()) - set(shapes):
        raise UserError(f"load_hf: dtype names {listing(unknown)}, which are no parameters of this model")
    places = {} if shardings is None else flatten_dict(shardings, sep="/")
    table, leaf_of, forms = name_table(config), dict[str, tuple[str, tuple[int, ...]]](), []
    for path, form in table.items():
        kind = dtype if asked is None else asked.get(path) or _stored_dtype(home[name].dtype for name in form.names)
        forms.append((shapes[path].shape, DTYPES[CODES[check_dtype("dtype", kind)]].name, places.get(path)))
        leaf_of |= {name: (path, at) for name, at in zip(form.names, np.ndindex(form.stack), strict=True)}
    loaded = dict(zip(table, _allocate(tuple(forms))(), strict=True))
    for name, tensor in home.items():
        path, at = leaf_of[name]
        loaded[path] = _written(loaded[path], tensor, table[path], at, places.get(path))
    return model, unflatten_dict(loaded, sep="/")


@cache
def _allocate(forms: tuple[tuple[tuple[int, ...], str, Sharding | None], ...]) -> Callable[[], list[jax.Array]]:
    """A program for zeros of these shapes, dtypes and shardings."""
    return jax.jit(
        lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in forms], out_shardings=[there for *_, there in forms]
    )


@cache
def _put(transpose: bool, unit_axis: bool, sharding: Sharding | None) -> Callable[..., jax.Array]:
    """A program that puts a file's tensor into a leaf in place. The index is traced, so all layers share it."""
    form = HfName("", transpose=transpose, unit_axis=unit_axis)

    def put(leaf: jax.Array, tensor: jax.Array, at: jax.Array) -> jax.Array:
        layer = form.from_file(tensor)
        start = [*at, *[0] * layer.ndim]
        return jax.lax.dynamic_update_slice(leaf, layer.reshape((1,) * len(at) + layer.shape), start)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _written(
    leaf: jax.Array, tensor: Stored, form: HfName, at: tuple[int, ...], sharding: Sharding | None
) -> jax.Array:
    """The leaf, which is donated, with a tensor at its place in the stack."""
    there = sharding
    if isinstance(sharding, NamedSharding):  # the tensor comes to lie as its layer does
        axes = (*sharding.spec, *[None] * (leaf.ndim - len(sharding.spec)))
        there = sharding.update(spec=PartitionSpec(*form.file_shape(axes, unit=None)))
    stored = tensor.read()
    value = place(stored.shape, lambda part: np.array(stored[part], leaf.dtype), there)
    # Waits, or tensors pile up on the host.
    return _put(form.transpose, form.unit_axis, sharding)(leaf, value, np.asarray(at, np.int32)).block_until_ready()


class Stored(NamedTuple):
    """A tensor of a file, under the name it has there."""

    file: TensorFile
    name: str

    @property
    def dtype(self) -> str:
        """Its dtype code."""
        return self.file.entries[self.name].dtype

    def read(self) -> np.ndarray:
        """Its value."""
        return self.file.read(self.name)


def _stored_dtype(codes: Iterable[str]) -> str:
    """The dtype that holds tensors of these file codes as they are."""
    return "bfloat16" if set(codes) == {"BF16"} else "float32"


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object from a file of the folder; raises UserError if there is none."""
    path = folder / name
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give the path of a model in Hugging Face format")
    if not path.is_file():
        raise UserError(f"{path} is missing; a model folder has it beside its weights")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; fetch it again")
    return content


def open_shards(folder: Path) -> list[TensorFile]:
    """The folder's weight files with checked headers: those of the index, or the single file.

    Raises UserError for missing shards (all of them named), weights files beside those of the index, and
    tensors that are not where the index says, or in two files.
    """
    present = {path.name for path in folder.glob("model*.safetensors")}
    if not (folder / INDEX).is_file():
        if SINGLE not in present:
            other = sorted(path.name for path in folder.glob("*.bin"))
            hint = f" (found {', '.join(other)}: convert to safetensors first)" if other else ""
            raise UserError(f"{folder} holds neither {SINGLE} nor {INDEX}{hint}")
        if present != {SINGLE}:
            raise UserError(f"{folder} holds {listing(present - {SINGLE})} beside {SINGLE} but no {INDEX}")
        return [open_tensor_file(folder / SINGLE)]
    weight_map = read_json(folder, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UserError(f"{folder / INDEX} has no weight_map of tensor names to file names; fetch it again")
    wanted = set(weight_map.values())
    if missing := {name for name in wanted if not (folder / name).is_file()}:
        raise UserError(
            f"{folder} lacks {listing(missing)}, named in {INDEX}: the download is incomplete, run it again"
        )
    if extra := present - wanted:
        raise UserError(f"{folder} holds {listing(extra)}, which {INDEX} does not name; remove what is stale")
    files = [open_tensor_file(folder / name) for name in sorted(wanted)]
    for file in files:
        listed = {name for name, place in weight_map.items() if place == file.path.name}
        if lost := listed - set(file.entries):
            raise UserError(f"{file.path} lacks {listing(lost)}, which {INDEX} places there; fetch both again")
        for name in sorted(set(file.entries) - listed):
            place = f"places in {weight_map[name]}" if name in weight_map else "does not name"
            raise UserError(f"{file.path} holds the tensor {name!r}, which {INDEX} {place}; fetch both again")
    return files


def check_tensors(folder: Path, model: CausalLM, files: Iterable[TensorFile]) -> dict[str, Stored]:
    """Where each tensor of the model is, by its text-only name: all are there in their shapes and nothing else is.

    In the order of the files.
    Beside the text of a multimodal file may lie what `names.BESIDE_TEXT` says. Raises UserError.
    """
    expected = hf_shapes(model)
    found: dict[str, Stored] = {}
    for file in files:
        for stored in file.entries:
            name = text_name(stored) if model.config.hybrid else stored
            if name in found:
                raise UserError(f"{file.path} holds {stored!r}, which is the same tensor as {found[name].name!r}")
            if name is not None:
                found[name] = Stored(file, stored)
    allowed = set(expected)
    if model.config.tie_word_embeddings:
        allowed.add(TIED_HEAD)  # a head stored beside the flag is ignored: the flag decides
    if missing := set(expected) - set(found):
        hint = "the folder is incomplete or config.json belongs to another model"
        if missing == {TIED_HEAD}:
            hint = "tie_word_embeddings is false, so the output head must be stored"
        raise UserError(f"{folder} lacks {listing(missing)}: {hint}")
    if extra := set(found) - allowed:
        where = found[min(extra)].file.path.name
        raise UserError(
            f"{folder / where} holds {listing(extra)}, which a {model.config.model_type} model of this "
            f"config.json does not have; loading would drop it, so check that config.json fits the weights"
        )
    for name, shape in expected.items():
        file, label = found[name]
        entry = file.entries[label]
        if entry.shape != shape:
            raise UserError(
                f"{file.path}: tensor {label!r} has shape {list(entry.shape)}, expected {list(shape)} "
                f"from config.json; check that the two belong together"
            )
    return {name: tensor for name, tensor in found.items() if name in expected}


def hf_shapes(model: CausalLM) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model's files -> its shape there (linear weights are `[out, in]`)."""
    out: dict[str, tuple[int, ...]] = {}
    shapes: Mapping[str, Any] = flatten_dict(model.abstract_params(), sep="/")
    for path, name in name_table(model.config).items():
        out |= dict.fromkeys(name.names, name.file_shape(shapes[path].shape))
    return out


def listing(names: Iterable[str]) -> str:
    """Names for a message: the first few, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 6} more" if len(ordered) > 6 else ""
    return ", ".join(ordered[:6]) + more
