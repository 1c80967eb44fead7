"""Mixtures of Reasoning-Gym tasks as prompts: a YAML file in, rows of training and held-out questions out.

    seed: 0
    train: 16384                # questions to make
    held_out: 512
    tasks:
      countdown: {weight: 2, difficulty: {min_numbers: 6, max_numbers: 8}}    # keys of the task's own configuration
      sums: {task: chain_sum, difficulty: {min_terms: 10, max_terms: 12}}     # a name of one's own; weight 1

Questions come from `python -m logra_jax.rl.tasks FILE`, a process of its own: some tasks draw from sets of strings,
whose order is another one in every process unless PYTHONHASHSEED says which, and a resumed run needs the same
questions. What it makes depends on the file and the version of reasoning-gym alone.
"""

import base64
import difflib
import functools
import hashlib
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from logra_jax.errors import UserError

SUFFIXES = (".yaml", ".yml")
TASK, ENTRY = "task", "entry"  # columns of the rows besides prompt and answer
HELD_OUT_SEEDS = 2**30  # a task's question i comes from its seed + i: held-out ones start so much later
MOST = 1e9  # weight of a task
TRIES = 20  # draws per question wanted, before a task is found to have too few different ones
INSTALL = "pip install 'logra-jax[tasks]' (or reasoning-gym)"
PARTS = ("held_out", "train")


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym at one difficulty, under a name; weight > 0."""

    name: str
    task: str
    weight: float
    difficulty: Mapping[str, Any]


Job = tuple[Task, int, Mapping[str, int]]  # a task, the seed of its first question, questions wanted of each part


@dataclass(frozen=True)
class Mixture:
    """What a file asks for: number of questions for training and held out, and the tasks to take them from."""

    seed: int
    train: int
    held_out: int
    tasks: tuple[Task, ...]

    def counts(self, total: int) -> list[int]:
        """`total` questions shared out by weight: whole numbers, each within one of its share."""
        whole = math.fsum(task.weight for task in self.tasks)
        shares = [total * task.weight / whole for task in self.tasks]
        counts = [int(share) for share in shares]
        by_rest = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
        for i in by_rest[: total - sum(counts)]:
            counts[i] += 1
        return counts


def is_mixture(path: str | Path) -> bool:
    """Whether a data file is a mixture of tasks, by its name."""
    return Path(path).suffix.lower() in SUFFIXES


def read_mixture(path: str | Path) -> Mixture:
    """The file, checked as far as that goes without reasoning-gym. Raises UserError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if twice := _twice(yaml.compose(text, Loader=yaml.SafeLoader)):
        raise UserError(f"{path}: {twice} is there twice: give each a name of its own; the task goes into `task`")
    found = _section(found, f"{path}", {"seed", "train", "held_out", "tasks"})
    numbers = {}
    for key, default, least in (("seed", 0, 0), ("train", None, 1), ("held_out", 0, 0)):
        value = found.get(key, default)
        if type(value) is not int or not least <= value < HELD_OUT_SEEDS // TRIES:
            raise UserError(f"{path}: {key} must be a whole number of at least {least}, found {value!r}")
        numbers[key] = value
    tasks = _section(found.get("tasks"), f"{path}: tasks", None)
    if not tasks:
        raise UserError(f"{path}: tasks is empty: name at least one task")
    mixture = Mixture(**numbers, tasks=tuple(_task(path, name, given) for name, given in tasks.items()))
    for part in PARTS:
        total = numbers[part]
        for task, count in zip(mixture.tasks, mixture.counts(total), strict=True):
            if total and not count:
                raise UserError(f"{path}: {part}={total} leaves no question for {task.name}: raise it, or its weight")
    return mixture


def _twice(node: yaml.Node | None) -> str | None:
    """The first key that its mapping, or one in it, has twice: YAML would silently take the last."""
    waiting, seen = [node], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.MappingNode) or id(node) in seen:  # an anchor's mapping is there more than once
            continue
        seen.add(id(node))
        names = [name.value for name, _ in node.value]
        if twice := [name for name in names if names.count(name) > 1]:
            return str(twice[0])
        waiting += [value for _, value in reversed(node.value)]
    return None


def _task(path: str | Path, name: Any, given: Any) -> Task:
    place = f"{path}: tasks: {name}"
    if not isinstance(name, str) or not name:
        raise UserError(f"{place}: the name of a task is a text, found {name!r}: put it in quotes")
    given = _section({} if given is None else given, place, {"task", "weight", "difficulty"})
    weight, task = given.get("weight", 1), given.get("task", name)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MOST:
        raise UserError(
            f"{place}: weight must be a number above 0, found {str(weight)[:20]}; {MOST:g} is the most, and instead of "
            "0 leave the task out"
        )
    if not isinstance(task, str):
        raise UserError(f"{place}: task must be the name of a task, found {task!r}")
    return Task(name, task, float(weight), _section(given.get("difficulty", {}), f"{place}: difficulty", None))


def _section(found: Any, place: str, keys: set[str] | None) -> dict[Any, Any]:
    if not isinstance(found, dict):
        raise UserError(f"{place}: expected `key: value` lines")
    for key in found:
        if keys is not None and key not in keys:
            raise UserError(f"{place}: unknown key {key!r}{_nearest(key, keys)}")
    return found


def _nearest(name: Any, names: Any) -> str:
    near = difflib.get_close_matches(str(name), sorted(names), n=1)
    return f": did you mean {near[0]}?" if near else f": valid are {', '.join(sorted(names))}"


def make_rows(path: str | Path, *, held_out: bool) -> list[dict[str, Any]]:
    """The rows of one part of a mixture: `prompt`, `answer` (empty where a task has no reference), `task` and `entry`.

    No question is there twice, neither within a part nor in both; the counts of tasks follow the weights, and the
    order is a shuffled one, so that the first rows are a mixture as well. `entry`, text, is what the verifier needs
    (`rl.verifier`). Made once per process and file. Raises UserError for a file, a name or a difficulty that is wrong.
    """
    mixture = read_mixture(path)  # its mistakes need no second process
    if held_out and not mixture.held_out:
        raise UserError(f"{path}: held_out is 0: say how many questions to evaluate on")
    return _made(str(Path(path).resolve()), Path(path).read_bytes())["held_out" if held_out else "train"]


@functools.lru_cache(maxsize=4)
def _made(path: str, content: bytes) -> dict[str, list[dict[str, Any]]]:
    print(f"making the questions of {path}", file=sys.stderr, flush=True)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.getenv("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "logra_jax.rl.tasks", path],
        capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"{path}: the questions could not be made: {last}")
    found = pickle.loads(done.stdout)
    if isinstance(found, str):
        raise UserError(found)
    return found


def main() -> None:
    """Writes the pickled rows of both parts, or the text of a UserError, to what was standard output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # generators print
    try:
        found: Any = generate(read_mixture(sys.argv[1]), sys.argv[1])
    except UserError as error:
        found = str(error)
    with out:
        pickle.dump(found, out)


def generate(mixture: Mixture, place: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of both parts, by name, on all cores; needs PYTHONHASHSEED to be set. Raises UserError."""
    from concurrent.futures import ProcessPoolExecutor

    for task in mixture.tasks:
        make_dataset(task.task, task.difficulty, place=f"{place}: tasks: {task.name}")
    counts = {part: mixture.counts(getattr(mixture, part)) for part in PARTS}
    jobs: dict[str, list[Job]] = {}
    for i, task in enumerate(mixture.tasks):
        wanted = {part: counts[part][i] for part in PARTS}
        jobs.setdefault(task.task, []).append((task, base_seed(mixture.seed, task.name), wanted))
    parts: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        for found in pool.map(_draw, jobs.values(), [place] * len(jobs)):
            if isinstance(found, str):
                raise UserError(found)
            for part in PARTS:
                parts[part] += found[part]
    for part, rows in parts.items():
        random.Random(f"{mixture.seed} {part}").shuffle(rows)
    return parts


def base_seed(seed: int, name: str) -> int:
    """The seed of a task's first training question; that of its first held-out one is HELD_OUT_SEEDS more."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (HELD_OUT_SEEDS // 2)


def make_dataset(task: str, difficulty: Mapping[str, Any], seed: int = 0, size: int = 1, place: str = "") -> Any:
    """The reasoning-gym data set of a task. Raises UserError for an unknown name or key, and for values it refuses."""
    import dataclasses

    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError(f"{place}: reasoning-gym is not installed: {INSTALL}") from None
    names = set(DATASETS) - {"composite"}
    if task not in names:
        raise UserError(f"{place}: reasoning-gym has no task {task!r}{_nearest(task, names)}")
    keys = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    for key in difficulty:
        if key not in keys:
            raise UserError(f"{place}: {task} has no difficulty setting {key!r}{_nearest(key, keys)}")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **difficulty)
    except Exception as error:  # each task checks its settings in its own way
        raise UserError(f"{place}: {task} refuses its difficulty: {str(error) or type(error).__name__}") from None


def _draw(jobs: Sequence[Job], place: str) -> dict[str, list[dict[str, Any]]] | str:
    """Rows of names that share a task, by part, none twice; or the text of an error, as exceptions may not pickle."""
    seen: set[str] = set()
    parts: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for part in PARTS:
        for task, seed, wanted in jobs:
            where, first = f"{place}: tasks: {task.name}", seed + (HELD_OUT_SEEDS if part == "held_out" else 0)
            try:
                rows = _questions(task, first, wanted[part], seen, where)
            except UserError as error:
                return str(error)
            except Exception as error:
                return f"{where}: {task.task} failed to make a question: {type(error).__name__}: {error}"
            if len(rows) < wanted[part]:
                return (
                    f"{where}: only {len(rows)} of {wanted[part]} different {part} questions with an answer that its "
                    f"verifier accepts, and not any other, after {_tries(wanted[part])} draws: lower its weight, or "
                    "change its difficulty"
                )
            parts[part] += rows
    return parts


def _tries(count: int) -> int:
    return TRIES * count + 100


def _questions(task: Task, first: int, count: int, seen: set[str], place: str) -> list[dict[str, Any]]:
    """Up to `count` rows of a task from the seed `first` on, none of them `seen`, to which they are added."""
    from logra_jax.rl.verifier import make_verifier

    rows: list[dict[str, Any]] = []
    random.seed(first)  # should a task draw from the interpreter's own generator
    dataset, verify = make_dataset(task.task, task.difficulty, first, _tries(count), place), make_verifier()
    for i in range(_tries(count)):
        if len(rows) == count:
            break
        entry = dataset[i]
        question, row = " ".join(entry["question"].split()), _row(task, entry)
        if question not in seen and _verifiable(verify, entry["answer"], row[ENTRY]):
            seen.add(question)
            rows.append(row)
    return rows


def _verifiable(verify: Any, answer: Any, entry: str) -> bool:
    """Whether the task's own answer, if it gives one, earns full marks, and a text that answers nothing does not."""
    marks = []
    for text in (answer, "?"):
        try:
            marks.append(1.0 if text is None else verify(entry, str(text), None))
        except Exception:  # a text that it cannot read is not accepted either
            marks.append(0.0)
    return marks[0] >= 1 > marks[1]


def _row(task: Task, entry: dict[str, Any]) -> dict[str, Any]:
    # Pickled, because tuples and the like do not survive JSON, and some verifiers need them. It is only ever read by
    # grading processes of the run that made it.
    packed = pickle.dumps((task.task, dict(task.difficulty), entry))
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return {
        "prompt": entry["question"], "answer": answer, TASK: task.name, ENTRY: base64.b64encode(packed).decode(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
