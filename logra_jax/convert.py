"""python -m logra_jax.convert SRC DST: between Hugging Face folders and Orbax checkpoints.

    a run (out/, out/checkpoints or one step in it)  ->  a Hugging Face folder of its weights
    a Hugging Face folder                            ->  a checkpoint folder of its weights alone

Tokenizer, config.json, tensor names and shards are not in a checkpoint: they are taken from the Hugging Face
folder that the weights came from, which the run's config.yaml or the checkpoint names (`--model` names
another one). There and back gives the same bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from logra_jax import cli, distributed
from logra_jax.config import load_config, resolve_path
from logra_jax.errors import UserError

# Names, in a checkpoint's state, of the weights, and of what bfloat16 weights lack of them.
PARAMS, RESIDUAL = "params", "residual"


class Origin(NamedTuple):
    """Where a checkpoint's config.json, tokenizer and tensor layout are, and what the run changed in it."""

    folder: Path
    rope_theta: float | None = None
    max_position_embeddings: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Convert SRC to DST; the direction follows from what SRC is. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="python -m logra_jax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("src", metavar="SRC", type=Path, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("dst", metavar="DST", type=Path, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace DST, if it is of the kind to be written")
    parser.add_argument("--model", type=Path, help="Hugging Face folder that the checkpoint's model came from")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="number format to write (default: float32 in checkpoints, the source's in Hugging Face folders)",
    )
    found = parser.parse_args(argv)
    if distributed.find(os.environ) is not None:
        raise UserError(f"convert is the work of one process: start it once, or with {distributed.COUNT}=1")
    src, dst = found.src.absolute(), found.dst.absolute()
    if not src.is_dir():
        raise UserError(f"SRC={found.src}: no such folder")
    if dst.resolve() == src.resolve() or dst.resolve() in src.resolve().parents:
        raise UserError(f"DST={found.dst} contains SRC={found.src}: choose another folder")
    to_hf = not (src / "config.json").is_file()
    _check_target(dst, found.overwrite, to_hf)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # weights are only copied: keep them off the accelerator
    if to_hf:
        _checkpoint_to_hf(src, dst, found.model, found.dtype)
    else:
        if found.model is not None:
            raise UserError("--model is for checkpoints: SRC is a Hugging Face folder itself")
        _hf_to_checkpoint(src, dst, found.dtype or "float32")
    print(f"wrote {found.dst}")
    return 0


def _check_target(dst: Path, overwrite: bool, to_hf: bool) -> None:
    """Refuse an existing DST, and even with --overwrite one that holds something else."""
    if not dst.exists():
        return
    if not overwrite:
        raise UserError(f"DST={dst} exists: choose another folder, or --overwrite it")
    same_kind = dst.is_dir() and ((dst / "config.json").is_file() if to_hf else _has_steps(dst))
    if not same_kind:
        kind = "Hugging Face" if to_hf else "checkpoint"
        raise UserError(f"DST={dst} is not a {kind} folder: --overwrite does not delete it")


def _has_steps(folder: Path) -> bool:
    return any((entry / "meta.json").is_file() for entry in folder.iterdir() if entry.name.isdecimal())


def _hf_to_checkpoint(src: Path, dst: Path, dtype: str) -> None:
    from logra_jax.checkpoint import Checkpoints
    from logra_jax.models import load_hf

    _, params = load_hf(src, dtype)
    partial = dst.with_name(f".{dst.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    checkpoints = Checkpoints(partial, async_=False)
    try:
        checkpoints.save(0, {PARAMS: params}, {"source": str(src)})
        checkpoints.close()
        if dst.exists():
            shutil.rmtree(dst)
        partial.rename(dst)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _checkpoint_to_hf(src: Path, dst: Path, model_folder: Path | None, dtype: str | None) -> None:
    from logra_jax.checkpoint import read_arrays
    from logra_jax.models import save_hf
    from logra_jax.optim import merge_adapters

    step = _find_step(src)
    origin = _find_origin(step, model_folder)
    model = _load_model(origin)
    flat = read_arrays(step, f"{PARAMS}.")
    if not flat:
        raise UserError(f"{step}: holds no {PARAMS}: it is not a checkpoint of this software")
    rest = _nested(read_arrays(step, f"{RESIDUAL}."))
    params = merge_adapters(_with_kernels(_nested(flat)), dtype)
    save_hf(model, params, dst, dtype=dtype, overwrite=True, residual=rest)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Arrays by dotted path as a tree, without the first part of the paths."""
    tree: dict[str, Any] = {}
    for path, array in flat.items():
        *outer, leaf = path.split(".")[1:]
        node = tree
        for name in outer:
            node = node.setdefault(name, {})
        node[leaf] = array
    return tree


def _with_kernels(node: Any) -> Any:
    """The tree with adapted kernels, whose parts a checkpoint holds under their names, as nodes again."""
    from logra_jax.optim import LoraKernel

    if not isinstance(node, dict):
        return node
    if node.keys() == {field.name for field in fields(LoraKernel)}:
        return LoraKernel(**node)
    return {key: _with_kernels(inner) for key, inner in node.items()}


def _find_step(src: Path) -> Path:
    """The step to convert: SRC itself, or the newest undamaged one in it."""
    from logra_jax.checkpoint import find_damage, newest_good

    if (src / "meta.json").is_file():
        if (problem := find_damage(src)) is not None:
            raise UserError(f"{src}: the checkpoint is damaged: {problem}")
        return src
    folder = src / "checkpoints" if (src / "checkpoints").is_dir() else src
    if not _has_steps(folder):
        raise UserError(
            f"SRC={src} is neither a Hugging Face folder (it has no config.json) nor a run or checkpoint "
            "folder (it has no steps)"
        )
    step, problems = newest_good(folder)
    for number, problem in problems:
        print(f"passing over {folder / str(number)}: {problem}")
    print(f"converting step {step} of {folder}")
    return folder / str(step)


def _find_origin(step: Path, given: Path | None) -> Origin:
    from logra_jax.checkpoint import read_note

    settings = step.parent.parent / "config.yaml"
    origin = Origin(Path())
    if settings.is_file():
        model = load_config(settings).model
        origin = Origin(resolve_path(model.path), model.rope_theta, model.max_position_embeddings)
    elif "source" in (meta := read_note(step)["meta"]):
        origin = Origin(Path(meta["source"]))
    elif given is None:
        raise UserError(f"{settings} is missing, so the model is unknown: name its Hugging Face folder by --model")
    origin = origin._replace(folder=given or origin.folder)
    if not (origin.folder / "config.json").is_file():
        raise UserError(f"{origin.folder}, the model's Hugging Face folder, is missing: name its place by --model")
    return origin


def _load_model(origin: Origin) -> Any:
    """The model without its weights, which come from the checkpoint."""
    from logra_jax.models import CausalLM, ModelConfig
    from logra_jax.models.hf import read_json
    from logra_jax.models.tokens import end_and_pad_ids

    raw = read_json(origin.folder, "config.json")
    config = ModelConfig.from_hf(
        raw,
        where=str(origin.folder / "config.json"),
        rope_theta=origin.rope_theta,
        max_position_embeddings=origin.max_position_embeddings,
    )
    end_ids, pad_id = end_and_pad_ids(origin.folder, raw)
    source = str(origin.folder.resolve())
    return CausalLM(config, compute_dtype="float32", source=source, end_ids=end_ids, pad_id=pad_id)


if __name__ == "__main__":
    cli.run(main)
