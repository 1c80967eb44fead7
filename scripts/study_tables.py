"""The tables of scripts/study.py: per task, over all tasks, and from AdamW to LoGRA one difference at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from study import CELLS, KEPT, PLAIN, RESULTS, RIVAL, ROW, SEEDS, TASKS, TUNING, Job, chosen, read_results

FINDINGS = RESULTS.with_name("findings.md")  # what people make of the tables

Done = Mapping[Job, Mapping[str, Any]]


def optimizer_mib(job: Job) -> float:
    """MiB of the optimizer's state and of the gradients or sketches it is given, from shapes."""
    import jax

    from logra_jax import build, footprint
    from logra_jax.config import load_config

    config = load_config(job.arguments[1], [*job.arguments[2:], "model.path=demo:model"])  # all have its shape
    shape = build.read_model_config(config)
    parts = footprint.Parts(config, shape, shape.vocab_size, jax.devices("cpu")[:1])
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(parts.state.opt_state))
    return (state + parts.gradients()) / 2**20


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and sample standard deviation."""
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def against(values: Sequence[float], rivals: Sequence[float]) -> str:
    """Difference of the means and, in brackets, how many pooled standard deviations of a run that is."""
    if len(values) < 2 or len(rivals) < 2:
        return ""
    difference = statistics.fmean(values) - statistics.fmean(rivals)
    freedom = len(values) + len(rivals) - 2
    squares = sum((len(v) - 1) * statistics.variance(v) for v in (values, rivals))
    pooled = (squares / freedom) ** 0.5
    return f"{difference:+.3f} ({difference / pooled:+.1f})" if pooled else f"{difference:+.3f}"


HEADS = (
    "update", "chosen", "seeds", "accuracy", f"minus {RIVAL} (pooled sd)", "sampled reward", "realised KL, 1e-4",
    "memory, MiB",
)  # fmt: skip


def short(choice: str) -> str:
    """The values that were chosen: a rate, or the first and last budget."""
    return " to ".join(setting.rpartition("=")[2] for setting in choice.split())


def reported(task: str, cell: str, done: Done) -> tuple[str | None, list[Mapping[str, Any]]]:
    """What was chosen for a cell, and its results on the seeds that count; runs of an earlier choice are left out."""
    choice = chosen(task, CELLS[cell], done)
    jobs = [Job(task, cell, choice, seed) for seed in SEEDS] if choice is not None else []
    return choice, [done[job] for job in jobs if job in done]


def accuracies(task: str, cell: str, done: Done) -> list[float]:
    """Held-out accuracies of the reported runs."""
    return [line["accuracy"] for line in reported(task, cell, done)[1]]


def rows(task: str, done: Done) -> Iterator[Sequence[str]]:
    """A row per cell that has a run on a reported seed."""
    rivals = accuracies(task, RIVAL, done)
    for name in CELLS:
        choice, lines = reported(task, name, done)
        if choice is None or not lines:
            continue
        column = {key: [line[key] for line in lines if key in line] for key in lines[0]}
        yield (
            name,
            short(choice),
            str(len(lines)),
            spread(column["accuracy"]),
            "" if name == RIVAL else against(column["accuracy"], rivals),
            spread(column["sampled reward"], 2),
            f"{1e4 * statistics.fmean(column['realised KL']):.2f}" if column.get("realised KL") else "",
            f"{optimizer_mib(Job(task, name, choice, SEEDS[0])):.2f}",
        )


def over_tasks(done: Done) -> Iterator[Sequence[str]]:
    """A row per cell: its distance from AdamW on every task."""
    for name in CELLS:
        found = [against(accuracies(task, name, done), accuracies(task, RIVAL, done)) for task in TASKS]
        if name != RIVAL and any(found):
            yield (name, *found)


# What changes, from what, to what: each pair has all else in common but the step size, which is its own.
STEPS = (
    ("no momentum", RIVAL, "AdamW, b1 0"),
    ("rows share a second moment", "AdamW, b1 0", ROW),
    ("gradients are sketched, rank 16", ROW, f"{PLAIN}, no KL control"),
    ("KL budget", f"{PLAIN}, no KL control", PLAIN),
    ("with momentum: rows share a second moment", RIVAL, f"{ROW}, b1 0.9"),
    ("with momentum: gradients are sketched, rank 16", f"{ROW}, b1 0.9", f"{KEPT}, no KL control"),
    ("with momentum: KL budget", f"{KEPT}, no KL control", KEPT),
    ("with momentum: KL budget, AdamW", RIVAL, "AdamW, KL control"),
)


def steps(done: Done) -> Iterator[Sequence[str]]:
    """A row per difference."""
    for name, one, other in STEPS:
        found = [against(accuracies(task, other, done), accuracies(task, one, done)) for task in TASKS]
        if any(found):
            yield (name, *found)


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *lines)]


def by_task(head: str, lines: Iterator[Sequence[str]]) -> list[str]:
    """Lines of Markdown: a column per task that has anything in it."""
    found = list(lines)
    filled = [0, *(i for i in range(1, len(TASKS) + 1) if any(line[i] for line in found))]
    return table([(head, *TASKS)[i] for i in filled], [[line[i] for i in filled] for line in found])


def tries(task: str, done: Done) -> Iterator[str]:
    """A line per cell whose step size or budget was chosen, or is being."""
    for cell in CELLS.values():
        jobs = [Job(task, cell.name, choice, TUNING) for choice in cell.tries]
        found = [f"{short(job.choice)}: {done[job]['accuracy']:.3f}" for job in jobs if job in done]
        if found:
            yield f"- {cell.name}: {', '.join(found)}"


def report() -> str:
    """Markdown from the results."""
    done = read_results()
    text = [
        INTRODUCTION,
        FINDINGS.read_text(encoding="utf-8"),
        f"## Minus {RIVAL}",
        "",
        *by_task("update", over_tasks(done)),
        "",
    ]
    text += ["## What is lost where", "", *by_task("difference", steps(done)), ""]
    for task in TASKS:
        if not (found := list(rows(task, done))):
            continue
        starts = {(line["model"], line["accuracy before"]) for job, line in done.items() if job.task == task}
        known = ", ".join(f"{before:.3f} (model {digest})" for digest, before in sorted(starts))
        text += [f"## {task}: from {known}", "", *table(HEADS, found), ""]
        if tried := list(tries(task, done)):
            text += [f"Held-out accuracy of the tries on seed {TUNING}:", "", *tried, ""]
    return "\n".join(text)


INTRODUCTION = f"""# Optimizers at equal rollouts

Written by `python scripts/study.py table` from `docs/study/results.jsonl`, to which `python scripts/study.py run`
adds a line per run, with its settings. Step sizes, or under KL control budgets, are chosen on seed {TUNING}; rows
show mean ± sample standard deviation over others, as many as stand there, from seed {SEEDS[0]} on. Accuracy is greedy,
on 460 held-out questions, after 60 updates of 16 prompts x 8 answers; the sampled reward is the mean of the last 10
updates. In brackets, a difference in standard deviations of a run, pooled over both sides. Realised KL: per token and
update, the median over the run. Memory: the optimizer's state and the gradients or sketches it is given, float32, from
shapes. LoGRA is of rank 16 where no other is named.

The models have 1.1 M parameters. `multiply` is the demo (588*6=); `add` (47+85+36=) starts like it, with two ways of
answering, and `sort` (384712559=) with one way that was not practised enough: `python scripts/make_study.py add --out
out/study/add`, and the same for `sort`. `add 2` and `sort 2` ask the same questions of a second checkpoint, made by the
same command on another CPU, with the step sizes and budgets that were chosen for the first.
"""
