"""Checkpoints of the training state that are either whole and verified, or not there.

    checkpoints/20/state/           arrays, written by Orbax
    checkpoints/20/meta.json        step, score, and what the trainer keeps besides arrays
    checkpoints/20/host.npz         arrays that no device holds, if there are any
    checkpoints/20/checksums.json   SHA-256 and size of every other file
    checkpoints/40.partial/         being written, or left by a run that was killed meanwhile

A step is written under the name `.partial`, summed, and renamed, so a folder named by a number has once been
complete. What a disk loses or changes afterwards is found by its checksum when the step is read.

Of several processes, which share the folder and call everything here together, each writes and reads the arrays
of its own devices, and process 0 does all the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from logra_jax import distributed
from logra_jax.errors import UserError

STATE, META, HOST, SUMS = "state", "meta.json", "host.npz", "checksums.json"
PARTIAL, DAMAGED = ".partial", ".damaged"


class Restored(NamedTuple):
    """What a checkpoint held."""

    step: int
    state: Any
    meta: dict[str, Any]
    host: dict[str, np.ndarray]


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


class Checkpoints:
    """Writes and restores the steps of one folder. Arrays only: no typed PRNG keys, no Python objects."""

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        keep_best: bool = True,
        async_: bool = True,
        report: Callable[[str], None] = _warn,
    ) -> None:
        """`keep` newest steps stay, and the one with the highest score if `keep_best`."""
        self._folder = Path(folder).absolute()
        self._keep, self._keep_best, self._async, self._report = keep, keep_best, async_, report
        self._writer: threading.Thread | None = None
        self._error: UserError | None = None
        self._unchecked = False  # whether a save may have failed in some process
        self._writes = distributed.first()
        # Folders are made before save() returns: if made in the background, a program that ends
        # right after save() could hang, since Orbax would wait for folders that nobody makes any more.
        options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
        distributed.on_first(self._make_folder)

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be created: {error.strerror}") from None
        for leftover in self._folder.glob(f"*{PARTIAL}"):
            shutil.rmtree(leftover)

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        score: float | None = None,
        host: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Copy `state` off the devices, then write it, in the background if asked; its buffers are free.

        host: arrays of any number and shape, the same in all processes, which the template of `restore` does not name.
        A step that is already there is left as it is, but for its score and meta if it had no score: a run that was
        stopped in an evaluation does that one first when it is resumed. Raises UserError if this or the previous step
        cannot be written; earlier steps are untouched then.
        """
        self.wait()
        partial, there = self._folder / f"{step}{PARTIAL}", self._folder / str(step)
        note = {"step": step, "score": score, "meta": meta}

        def begin() -> bool:
            try:
                if there.exists():
                    if score is not None and read_note(there)["score"] is None:
                        _rewrite_note(there, note)
                    return False
                partial.mkdir()
                (partial / META).write_text(json.dumps(note, indent=1), encoding="utf-8")
                if host:
                    np.savez(partial / HOST, **dict[str, Any](host))
            except OSError as error:
                raise self._write_error(step, partial, error) from error
            return True

        if not distributed.on_first(begin):
            return
        failed = None
        try:
            self._orbax.save(partial / STATE, args=ocp.args.PyTreeSave(flatten(state)))
        except (OSError, ValueError) as error:
            failed = self._write_error(step, partial, error)
            failed.__cause__ = error
        distributed.agree(failed)
        self._unchecked = True
        self._writer = threading.Thread(target=self._finish, args=(step, partial), name=f"checkpoint {step}")
        self._writer.start()
        if not self._async:
            self.wait()

    def _finish(self, step: int, partial: Path) -> None:
        try:
            self._orbax.wait_until_finished()  # for all processes
            if self._writes:
                _write_sums(partial)
                partial.rename(self._folder / str(step))
                _sync(self._folder)
                self._evict()
        except BaseException as error:  # raised again by the next call from the training loop
            self._error = self._write_error(step, partial, error)

    def _write_error(self, step: int, partial: Path, error: BaseException) -> UserError:
        """What to raise; deletes what has been written, for its space is what the next attempt may need."""
        shutil.rmtree(partial, ignore_errors=True)
        return UserError(
            f"the checkpoint of step {step} could not be written to {self._folder}: {error}. "
            "Earlier checkpoints are untouched"
        )

    def _evict(self) -> None:
        """Delete what is not kept; called only once a newer step is complete."""
        found = steps(self._folder)
        keep = set(found[-self._keep :])
        if self._keep_best:
            scores = {step: _score(self._folder / str(step)) for step in found}
            keep.add(max(found, key=lambda step: (scores[step], step)))
        for step in found:
            if step not in keep:
                _discard(self._folder / str(step), self._folder / f"{step}{PARTIAL}")
        for damaged in self._folder.glob(f"*{DAMAGED}"):
            shutil.rmtree(damaged)

    def wait(self) -> None:
        """Return once the last save is complete. Raises UserError if it failed."""
        error = self._join()
        if self._unchecked:
            self._unchecked = False
            distributed.agree(error)

    def _join(self) -> UserError | None:
        """The error of the last save, once it has ended in this process."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        return error

    def restore(self, template: Any) -> Restored | None:
        """The newest undamaged step, in structure, dtypes and shardings of `template`; None without a step.

        `template` holds arrays or `jax.ShapeDtypeStruct`s with shardings; the mesh may be another than at the
        time of saving. Damaged steps are reported, set aside as `N.damaged`, and deleted after the next save.
        Raises UserError if all are damaged, or if leaves, shapes or dtypes are not those of the template.
        """
        self.wait()
        step = distributed.on_first(self._choose)
        if step < 0:
            return None
        folder = self._folder / str(step)
        return Restored(step, _read(folder, template, self._orbax), read_note(folder)["meta"], _read_host(folder))

    def _choose(self) -> int:
        """The step to restore, -1 without one; sets damaged ones aside."""
        if not steps(self._folder):
            return -1
        step, problems = newest_good(self._folder)
        for number, problem in problems:
            self._report(f"checkpoint {self._folder / str(number)} is damaged and set aside: {problem}")
            aside = self._folder / f"{number}{DAMAGED}"
            shutil.rmtree(aside, ignore_errors=True)
            (self._folder / str(number)).rename(aside)
        if problems:
            self._report(f"going on from step {step}, the newest good checkpoint")
        return step

    def close(self) -> None:
        """Finish what is being written and end Orbax's threads."""
        try:
            # Without the others, which may not come here: a run that ends well has waited already.
            if (error := self._join()) is not None:
                raise error
        finally:
            self._orbax.close()


def flatten(state: Any) -> dict[str, Any]:
    """Leaves by their dotted path, so that named tuples, None and empty nodes need no place in the file."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(flat) != len(leaves):
        raise ValueError("two leaves of the state have the same dotted path")
    return flat


def steps(folder: Path) -> list[int]:
    """Numbers of the steps in a checkpoint folder, ascending; they may be damaged."""
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.is_dir() and entry.name.isdecimal())


def newest_good(folder: Path) -> tuple[int, list[tuple[int, str]]]:
    """The newest undamaged step, and the damaged ones after it, with what is wrong. Raises UserError."""
    problems: list[tuple[int, str]] = []
    for step in reversed(steps(folder)) if folder.is_dir() else ():
        problem = find_damage(folder / str(step))
        if problem is None:
            return step, problems
        problems.append((step, problem))
    if not problems:
        raise UserError(f"{folder}: holds no checkpoint")
    listed = "; ".join(f"step {step}: {problem}" for step, problem in problems)
    raise UserError(f"{folder}: every checkpoint is damaged: {listed}")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a step's files; None if all have the size and checksum they were written with."""
    try:
        noted = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in noted.items()}
    except OSError:
        return f"{SUMS} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{SUMS} cannot be read"
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        sums = pool.map(_sha256, (folder / name for name in expected))
        for (name, (_, expected_sum)), found in zip(expected.items(), sums, strict=True):
            if found != expected_sum:
                return f"{name} has changed since it was written"
    return None


def read_arrays(folder: Path, prefix: str) -> dict[str, jax.Array]:
    """Leaves of a step whose dotted path starts with `prefix`, on the default device, by their full path."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
        stored = {k: v for k, v in _stored(folder, orbax).items() if k.startswith(prefix)}
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=device) for k, v in stored.items()}
        return _restore_flat(folder, wanted, orbax) if wanted else {}


def _read(folder: Path, template: Any, orbax: ocp.Checkpointer) -> Any:
    wanted, stored = flatten(template), _stored(folder, orbax)
    problems = [f"{key} is not in the checkpoint" for key in wanted if key not in stored]
    problems += [f"{key} is in the checkpoint only" for key in stored if key not in wanted]
    for key in wanted.keys() & stored.keys():
        saved, asked = (f"{v.dtype}{list(v.shape)}" for v in (stored[key], wanted[key]))
        if saved != asked:
            problems.append(f"{key} is {saved} in the checkpoint, {asked} in this run")
    if problems:
        shown = "; ".join(sorted(problems)[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise UserError(f"{folder}: does not belong to a run with these settings: {shown}")
    flat = _restore_flat(folder, wanted, orbax)
    return jax.tree.unflatten(jax.tree.structure(template), [flat[key] for key in wanted])


def _read_host(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / HOST).exists():
        return {}
    with np.load(folder / HOST) as found:
        return dict(found)


def _stored(folder: Path, orbax: ocp.Checkpointer) -> dict[str, Any]:
    return dict(orbax.metadata(folder / STATE).item_metadata.tree)


def _restore_flat(folder: Path, wanted: dict[str, Any], orbax: ocp.Checkpointer) -> dict[str, jax.Array]:
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True)
    return orbax.restore(folder / STATE, args=args)


def read_note(folder: Path) -> dict[str, Any]:
    """Step, score and meta of a step folder."""
    return json.loads((folder / META).read_text(encoding="utf-8"))


def _rewrite_note(folder: Path, note: dict[str, Any]) -> None:
    """Replace a step's note. A kill on the way leaves the old one or the new one, at worst without its checksum."""
    noted = json.loads((folder / SUMS).read_text(encoding="utf-8"))
    noted.pop(META, None)
    _replace(folder / SUMS, noted)
    _replace(folder / META, note)
    _replace(folder / SUMS, noted | {META: _sum(folder / META)})


def _replace(path: Path, content: dict[str, Any]) -> None:
    fresh = path.with_suffix(".tmp")
    _write_json(fresh, content)
    fresh.replace(path)
    _sync(path.parent)


def _score(folder: Path) -> float:
    """A step's score for comparison: lower than any other where it has none, or where damage hides it."""
    try:
        score = read_note(folder)["score"]
    except (OSError, ValueError, KeyError):
        return -math.inf
    return score if score is not None and math.isfinite(score) else -math.inf


def _write_sums(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        noted = dict(zip((path.relative_to(folder).as_posix() for path in files), pool.map(_sum, files), strict=True))
    _write_json(folder / SUMS, noted)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sum(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(folder: Path, partial: Path) -> None:
    folder.rename(partial)  # a kill in the middle of deleting must not leave half a step under its number
    shutil.rmtree(partial)
