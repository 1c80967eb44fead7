"""The study: which optimizer gets furthest with the same rollouts, over tasks, settings and seeds.

    python scripts/study.py list                        what there is to run, what is done, and how long the rest takes
    python scripts/study.py run --until 23:00           goes on with it; --only REGEX for a part
    python scripts/study.py table                       docs/study.md from the results

A cell is a way to update. Where it has a step size or a KL budget to choose, all of its tries run on seed TUNING, and
the one that ends best (held-out accuracy, then sampled reward) runs on SEEDS, which are others; a cell that is `like`
another takes the choice made there. Every run is `python -m logra_jax.train` in a folder of its own, and goes on where
it was stopped or killed; a finished one is a line of docs/study/results.jsonl and does not run again. Two `run`s share
the work.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, REPORT = ROOT / "docs/study/results.jsonl", ROOT / "docs/study.md"
TUNING, SEEDS = 100, (1, 2, 3, 4, 5)
START_S = 30  # seconds of a run outside of its updates, an estimate

# What all runs have in common, and what those under KL control have.
COMMON: tuple[str, ...] = ("--config", "configs/demo.yaml", "rollout.prompts=16", "steps=60")
COMMON += ("eval.every=0", "checkpoint.every=20", "checkpoint.keep=1", "checkpoint.keep_best=false")
COMMON += ("log.samples=0", "log.tensorboard=false", "log.progress=false")
CONTROLLED, FREE = ("kl.budget_steps=60",), "kl.control=false"


def made(task: str, prompt: int, answer: int) -> tuple[str, ...]:
    """Settings of a task of scripts/make_study.py, with the most tokens of its prompts and answers."""
    here = f"out/study/{task}"
    files = (f"model.path={here}/model", f"data.train={here}/train.jsonl", f"data.eval={here}/heldout.jsonl")
    return (*files, f"data.max_prompt_length={prompt}", f"rollout.max_new_tokens={answer}")


TASKS: Mapping[str, tuple[str, ...]] = {
    "multiply": (),
    "add": made("add", 9, 24),
    "sort": made("sort", 10, 11),
    "add 2": made("add-2", 9, 24),
    "sort 2": made("sort-2", 10, 11),
}
# The same questions and recipe with another checkpoint, for weights depend on the CPU that trains them: choices are
# those of the first.
FIRST = {"add 2": "add", "sort 2": "sort"}


@dataclass(frozen=True)
class Cell:
    """A way to update: its settings, and tries for its step size or KL budget, or the cell whose choice it takes."""

    name: str
    settings: tuple[str, ...]
    tries: tuple[str, ...] = ()
    like: str | None = None


def rates(*values: float) -> tuple[str, ...]:
    return tuple(f"optimizer.learning_rate={value:g}" for value in values)


def budgets(*factors: float) -> tuple[str, ...]:
    """The demo's KL budget, times these: under KL control it decides how far a step goes, not its size before that."""
    return tuple(f"kl.budget_start={2e-3 * factor:g} kl.budget_end={2e-4 * factor:g}" for factor in factors)


RIVAL, PLAIN, KEPT = "AdamW", "LoGRA plain", "LoGRA plain, momentum, never redrawn"
NORM, ROW = "LoGRA norm-preserving", "RowAdam, dense"
ADAMW, ROW_ADAM, LONG = ("optimizer.name=adamw",), ("optimizer.name=row_adam",), rates(3e-4)
MOMENTUM, NEVER = "optimizer.b1=0.9", "optimizer.refresh=0"
RIVAL_CELL = Cell(RIVAL, (*ADAMW, FREE), rates(5e-5, 1e-4, 2e-4))
PLAIN_CELL = Cell(PLAIN, LONG, budgets(0.25, 1, 4, 16, 64))
KEPT_CELL = Cell(KEPT, (*LONG, MOMENTUM, NEVER), budgets(0.25, 1, 4, 16))
EVERY_20 = Cell("LoGRA plain, momentum, redrawn every 20", (*LONG, MOMENTUM, "optimizer.refresh=20"), like=KEPT)
OTHERS = (
    Cell("LoRA", ("optimizer.name=lora", FREE), rates(1e-4, 3e-4, 1e-3, 3e-3)),
    Cell("GaLore", ("optimizer.name=galore", FREE), rates(4e-4, 1.2e-3, 4e-3)),
)
# The tasks, how many of SEEDS, and the cells that run there. Blocks are run one after the other, and within a block all
# tuning, then seed by seed.
BLOCKS: tuple[tuple[tuple[str, ...], int, tuple[Cell, ...]], ...] = (
    (
        ("multiply", "add", "sort"),
        5,
        (RIVAL_CELL, PLAIN_CELL, KEPT_CELL, Cell(NORM, (), budgets(0.25, 1, 4, 16, 64))),
    ),
    (("multiply", "add"), 5, (EVERY_20, *OTHERS)),
    (("sort",), 3, (EVERY_20,)),
    # From AdamW to LoGRA, one difference at a time.
    (
        ("multiply", "add", "sort"),
        3,
        (
            Cell("AdamW, b1 0", (*ADAMW, FREE, "optimizer.b1=0"), rates(2.5e-5, 5e-5, 1e-4, 2e-4)),
            Cell(ROW, (*ROW_ADAM, FREE), rates(2.5e-5, 5e-5, 1e-4, 2e-4)),
            Cell(f"{ROW}, b1 0.9", (*ROW_ADAM, FREE, MOMENTUM), rates(5e-5, 1e-4, 2e-4)),
            Cell(f"{PLAIN}, no KL control", (FREE,), rates(5e-5, 1e-4, 2e-4, 4e-4, 8e-4)),
            Cell(f"{KEPT}, no KL control", (FREE, MOMENTUM, NEVER), rates(5e-5, 1e-4, 2e-4, 4e-4, 8e-4)),
            Cell("AdamW, KL control", (*ADAMW, *LONG), budgets(0.0625, 0.25, 1)),
        ),
    ),
    (("add 2", "sort 2"), 5, (RIVAL_CELL, PLAIN_CELL, KEPT_CELL)),
    (("sort 2",), 3, (EVERY_20, *OTHERS)),
    (
        ("multiply", "add 2", "sort 2"),
        3,
        (
            Cell("LoGRA plain, momentum, redrawn every 5", (*LONG, MOMENTUM, "optimizer.refresh=5"), like=KEPT),
            Cell(f"{KEPT}, rank 4", (*LONG, "optimizer.rank=4", MOMENTUM, NEVER), like=KEPT),
            Cell(f"{KEPT}, rank 64", (*LONG, "optimizer.rank=64", MOMENTUM, NEVER), like=KEPT),
            Cell("LoGRA plain, redrawn every 5", (*LONG, "optimizer.refresh=5"), like=PLAIN),
            Cell("LoGRA plain, redrawn every 20", (*LONG, "optimizer.refresh=20"), like=PLAIN),
            Cell("LoGRA plain, never redrawn", (*LONG, NEVER), like=PLAIN),
            Cell("LoGRA plain, gaussian", (*LONG, "optimizer.distribution=gaussian"), like=PLAIN),
            Cell("LoGRA plain, rank 4", (*LONG, "optimizer.rank=4"), like=PLAIN),
            Cell("LoGRA plain, rank 64", (*LONG, "optimizer.rank=64"), like=PLAIN),
        ),
    ),
    (("multiply",), 3, (Cell(f"{NORM}, momentum, never redrawn", (MOMENTUM, NEVER), budgets(1, 4, 16)),)),
)
CELLS = {cell.name: cell for _, _, cells in BLOCKS for cell in cells}


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    cell: str
    choice: str
    seed: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """Settings on the command line, without its folder."""
        settings = CELLS[self.cell].settings
        control = () if FREE in settings else CONTROLLED
        return (*COMMON, *TASKS[self.task], *control, *settings, *self.choice.split(), f"seed={self.seed}")

    @property
    def folder(self) -> Path:
        chosen = re.sub(r"[a-z]+\.", "", self.choice)
        words = "-".join((self.task, self.cell, chosen, f"seed {self.seed}"))
        return Path(re.sub(r"[^\w.=]+", "-", words))


def read_results() -> dict[Job, dict[str, Any]]:
    """Finished runs whose settings are those of today."""
    if not RESULTS.is_file():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    found = {}
    for line in lines:
        job = Job(line["task"], line["cell"], line["choice"], line["seed"])
        if job.task in TASKS and job.cell in CELLS and list(job.arguments) == line["arguments"]:
            found[job] = line
    return found


def chosen(task: str, cell: Cell, done: Mapping[Job, Mapping[str, Any]]) -> str | None:
    """The try that ended best on the tuning seed; None as long as one is missing."""
    source = CELLS[cell.like] if cell.like else cell
    jobs = [Job(FIRST.get(task, task), source.name, choice, TUNING) for choice in source.tries]
    if not all(job in done for job in jobs):
        return None
    best = max(jobs, key=lambda job: (done[job]["accuracy"], done[job]["sampled reward"]))
    return best.choice


def jobs(done: Mapping[Job, Mapping[str, Any]]) -> Iterator[Job]:
    """Runs in their order, as far as choices are made."""
    for tasks, seeds, cells in BLOCKS:
        for task in tasks:
            for cell in cells:
                yield from (Job(FIRST.get(task, task), cell.name, choice, TUNING) for choice in cell.tries)
        for task in tasks:
            for seed in SEEDS[:seeds]:
                for cell in cells:
                    if (choice := chosen(task, cell, done)) is not None:
                        yield Job(task, cell.name, choice, seed)


@contextlib.contextmanager
def mine(folder: Path) -> Iterator[int | None]:
    """A file descriptor that keeps others off this folder, None if another has it.

    A run inherits it: where the script alone is killed, the run goes on, and holds its folder until it ends.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file.fileno()


def start(arguments: Sequence[str], folder: Path, lock: int) -> subprocess.Popen[bytes]:
    """The run, or its continuation, in the background, with its output in a file beside its folder."""
    resume = ["--resume"] if (folder / "config.yaml").is_file() else []
    command = [sys.executable, "-m", "logra_jax.train", *arguments, f"out={folder}", *resume]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with folder.with_name(folder.name + ".log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock]
        )


def figures(folder: Path) -> dict[str, float]:
    """What the table is made of."""
    from logra_jax.compare import read_run

    run = read_run(folder)
    found = run.figures(())
    if realized := list(run.curve("kl/realized").values()):
        found["realised KL"] = statistics.median(realized)
    found["seconds"] = sum(sum(run.curve(f"time/{name}_s").values()) for name in ("rollout", "reward", "update"))
    return {key: float(f"{value:.6g}") for key, value in found.items()}


def model_digest(job: Job, done: Mapping[Job, Mapping[str, Any]]) -> str:
    """Of the weights that a run starts from; those of the task's other runs, or SystemExit."""
    from logra_jax.config import load_config, resolve_path

    path = ROOT / resolve_path(load_config(ROOT / job.arguments[1], job.arguments[2:]).model.path)
    if not path.is_dir():
        raise SystemExit(f"{path}: no such folder; scripts/make_study.py makes it")
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()[:12]
    if other := {line["model"] for known, line in done.items() if known.task == job.task} - {digest}:
        raise SystemExit(
            f"{path}: model {digest}, but runs of {job.task!r} in {RESULTS} start from {', '.join(sorted(other))}. "
            "Weights depend on the CPU that trains them: move that file away for a study of your own"
        )
    return digest


def refuse_other(job: Job, folder: Path) -> None:
    """Raises SystemExit where a run of other settings has begun in this folder, for this one would go on with it."""
    from logra_jax.config import load_config

    if not (folder / "config.yaml").is_file():
        return
    kept, wanted = load_config(folder / "config.yaml"), load_config(ROOT / job.arguments[1], job.arguments[2:])
    if replace(kept, out=wanted.out) != wanted:
        raise SystemExit(f"{folder}: begun with other settings: delete it, or give another --folder")


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], capture_output=True, check=False)
    return done.stdout.decode().strip()


def run(only: str, until: float, folder: Path) -> None:
    """Runs that are left, one after the other, until none is or it is late."""
    longest = 0.0
    while True:
        for job in jobs(done := read_results()):
            if job in done or not re.search(only, str(job.folder)):
                continue
            with mine(folder / job.folder) as lock:
                if lock is None or job in read_results():
                    continue
                digest = model_digest(job, done)
                began = time.time()
                if began + longest > until:
                    print("no time for another run")
                    return
                refuse_other(job, folder / job.folder)
                if code := start(job.arguments, folder / job.folder, lock).wait():
                    raise SystemExit(f"{job.folder}: exit code {code}; see its .log in {folder}")
                longest = max(longest, time.time() - began)
                line = {"task": job.task, "cell": job.cell, "choice": job.choice, "seed": job.seed}
                line |= figures(folder / job.folder)
                line |= {"model": digest, "commit": commit(), "arguments": job.arguments}
                RESULTS.parent.mkdir(parents=True, exist_ok=True)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{job.folder}: accuracy {line['accuracy']:.3f}, {line['seconds']:.0f} s", flush=True)
            break
        else:
            return


def show() -> None:
    """Prints all runs and the hours that are left, at the median of those that are done."""
    done = read_results()
    wanted = list(dict.fromkeys(jobs(done)))  # tuning may be for several tasks
    for job in wanted:
        print(f"{job.folder}: " + (f"accuracy {done[job]['accuracy']:.3f}" if job in done else "to do"))
    undecided = [seeds for tasks, seeds, cells in BLOCKS for c in cells for t in tasks if chosen(t, c, done) is None]
    left = len([job for job in wanted if job not in done]) + sum(undecided)
    print(f"{len(done)} done, {left} left")
    if seconds := [line["seconds"] for line in done.values()]:
        median = statistics.median(seconds)
        print(f"{median:.0f} s of updates per run (median), {START_S} s around them: ", end="")
        print(f"{left * (median + START_S) / 3600:.1f} hours")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which optimizer gets furthest with the same rollouts.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="what there is to run, what is done, and how long the rest takes")
    commands.add_parser("table", help=f"write {REPORT.relative_to(ROOT)}")
    going = commands.add_parser("run", help="go on with the runs that are left")
    going.add_argument("--only", default="", metavar="REGEX", help="of the names that list shows")
    going.add_argument("--until", metavar="HH:MM", help="start no run that would not be done by then, UTC")
    going.add_argument("--folder", type=Path, default=ROOT / "out/study", help="where runs are kept")
    asked = parser.parse_args()
    if asked.command == "list":
        show()
    elif asked.command == "table":
        from study_tables import report

        REPORT.write_text(report(), encoding="utf-8")
    else:
        run(asked.only, moment(asked.until) if asked.until else float("inf"), asked.folder)


def moment(clock: str) -> float:
    """The next time that the clock, UTC, shows HH:MM."""
    now = datetime.datetime.now(datetime.UTC)
    hour, minute = map(int, clock.split(":"))
    then = now.replace(hour=hour, minute=minute, second=0)
    return (then if then > now else then + datetime.timedelta(days=1)).timestamp()


if __name__ == "__main__":
    main()
