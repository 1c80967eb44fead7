"""A long run that is killed on its way, and a verdict on it.

    python scripts/make_tiny.py --out out/tiny
    python scripts/long_run.py --out out/long [--config configs/tiny_reasoning.yaml] [--kills 5] [key=value ...]
    python scripts/long_run.py --out out/long --judge     # the verdict alone, on what is there

SIGKILL hits the run at moments drawn from --seed, the first two within the part that is compared: an unbroken run of
the first --compare updates, which must agree bit for bit in its metrics (times apart) and its checkpoint. Stopped
itself, the script goes on where it was. It writes docs/long_run.json and docs/long_run.png; exit code 1 if the verdict
is no.

The verdict: held-out accuracy (mean over tasks) and sampled reward end above their start; no mean of WINDOW updates'
sampled rewards lies more than DROP below an earlier one; the realised KL is what was predicted, within RATIO in the
median.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from study import mine, start

from logra_jax.compare import Finished, read_run

ROOT = Path(__file__).resolve().parents[1]
WINDOW, DROP, RATIO = 50, 0.2, (0.8, 1.25)
TIMES = ("time/", "tokens/s")  # of the metrics, what may differ between two runs
TASK = "eval/accuracy/"


def updates(out: Path) -> int:
    """Rows of metrics so far."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def moments(steps: int, compare: int, kills: int, seed: int) -> list[tuple[int, float]]:
    """When to kill: once so many updates are done, and so many seconds later."""
    rng = random.Random(seed)
    early = min(2, kills)
    places = [rng.randrange(1, compare) for _ in range(early)] + [rng.randrange(1, steps) for _ in range(kills - early)]
    return [(place, rng.random()) for place in sorted(places)]


def run_killed(
    arguments: Sequence[str], out: Path, lock: int, kept: Path, compare: int, plan: Sequence[tuple[int, float]]
) -> None:
    """Runs to the end through all kills; `kept` gets the checkpoint that will be compared."""
    diary = out.with_name(out.name + ".kills")
    while True:
        done = len(diary.read_text().splitlines()) if diary.is_file() else 0
        process = start(arguments, out, lock)
        while process.poll() is None:
            if not kept.exists() and (found := out / "checkpoints" / str(compare)).is_dir():
                partial = kept.with_name(kept.name + ".partial")
                shutil.copytree(found, partial, dirs_exist_ok=True)
                partial.rename(kept)
            if done < len(plan) and updates(out) >= plan[done][0]:
                time.sleep(plan[done][1])
                process.kill()
                process.wait()
                with diary.open("a") as file:
                    file.write(f"{updates(out)}\n")
                print(f"killed after {updates(out)} updates", flush=True)
                break
            time.sleep(0.1)
        else:
            if process.returncode:
                raise SystemExit(f"exit code {process.returncode}: see {out}.log")
            return


def run_unbroken(arguments: Sequence[str], out: Path, lock: int, compare: int) -> None:
    """The first updates of the same run, which nothing stops."""
    if updates(out) == compare:
        return
    if out.exists():
        shutil.rmtree(out)  # an unfinished one would have to be resumed
    if code := start([*arguments, f"steps={compare}"], out, lock).wait():
        raise SystemExit(f"exit code {code}: see {out}.log")


def without_times(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(TIMES)}


def same_bits(long: Finished, short: Finished, kept: Path, compare: int) -> dict[str, Any]:
    """How the compared part differs: updates with other metrics, and arrays of the checkpoint with other bytes."""
    import numpy as np

    from logra_jax.checkpoint import read_arrays

    pairs = zip(long.rows[:compare], short.rows, strict=True)
    rows = [a["step"] for a, b in pairs if without_times(a) != without_times(b)]
    one, other = (read_arrays(f.resolve(), "") for f in (kept, short.folder / "checkpoints" / str(compare)))
    bits = lambda array: (array.dtype, array.shape, np.asarray(array).tobytes())
    arrays = [
        name
        for name in one.keys() | other.keys()
        if not (name in one and name in other) or bits(one[name]) != bits(other[name])
    ]
    return {"updates": compare, "arrays": len(one), "other metrics": rows, "other arrays": sorted(arrays)}


def task_names(run: Finished) -> list[str]:
    """Of the mixture, from its evaluations."""
    return sorted({key.removeprefix(TASK) for row in run.rows for key in row if key.startswith(TASK)})


def held_out_accuracy(run: Finished) -> dict[float, float]:
    """By the number of updates before it: the mean over tasks, where there are any."""
    return run.curve("eval/macro_accuracy") or run.curve("eval/accuracy")


def deepest_fall(rewards: Sequence[float]) -> float:
    """How far a mean of WINDOW rewards lies below the highest earlier one, at most."""
    means = [statistics.fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]
    highest, fall = means[0], 0.0
    for mean in means:
        highest = max(highest, mean)
        fall = max(fall, highest - mean)
    return fall


def percentiles(values: Sequence[float]) -> list[float]:
    """5, 50 and 95 %."""
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return [cuts[0], statistics.median(values), cuts[-1]]


def judge(out: Path, compare: int, kills: Sequence[int]) -> tuple[dict[str, Any], dict[str, bool]]:
    """The figures, and the verdict by item."""
    long, short = read_run(out), read_run(out.with_name(out.name + "-unbroken"))
    if long.updates < WINDOW:
        raise SystemExit(f"{out} has done {long.updates} updates, and the verdict needs {WINDOW}")
    accuracy = list(held_out_accuracy(long).values())
    rewards = list(long.curve("reward/mean").values())
    predicted, budget, realized = (long.curve(f"kl/{name}") for name in ("predicted", "budget", "realized"))
    ratio = percentiles([realized[x] / predicted[x] for x in realized if predicted.get(x)])
    tasks = {name: list(long.curve(TASK + name).values()) for name in task_names(long)}
    bits = same_bits(long, short, out.with_name(out.name + f"-{compare}"), compare)
    found = {
        "updates": long.updates,
        "killed after": list(kills),
        "accuracy": [accuracy[0], accuracy[-1]],
        "accuracy by task": {name: [curve[0], curve[-1]] for name, curve in tasks.items()},
        "sampled reward, first and last 50": [statistics.fmean(part) for part in (rewards[:WINDOW], rewards[-WINDOW:])],
        "deepest fall": deepest_fall(rewards),
        "realised / predicted KL, 5 50 95 %": ratio,
        "realised KL / budget, 5 50 95 %": percentiles([realized[x] / budget[x] for x in realized if budget.get(x)]),
        "bits": bits,
        "seconds per update": statistics.median(
            row["time/rollout_s"] + row["time/reward_s"] + row["time/update_s"] for row in long.rows
        ),
    }
    first, last = found["sampled reward, first and last 50"]
    return found, {
        "all updates": long.updates == long.config.steps,
        "accuracy rises": accuracy[-1] > accuracy[0],
        "reward rises": last > first,
        "no collapse": found["deepest fall"] <= DROP,
        "KL as predicted": RATIO[0] <= ratio[1] <= RATIO[1],
        "same bits": not bits["other metrics"] and not bits["other arrays"],
    }


def draw(run: Finished, kills: Sequence[int], picture: Path) -> None:
    """Reward, accuracy by task, and KL against its budget."""
    from matplotlib.figure import Figure

    from logra_jax.metrics import save_figure

    figure = Figure(figsize=(15, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    rewards = list(run.curve("reward/mean").values())
    means = [statistics.fmean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]
    left.plot(rewards, lw=0.5, alpha=0.4, label="an update")
    left.plot(means, lw=1.5, label=f"mean of {WINDOW}")
    left.set_title("reward of the sampled answers", fontsize=10)
    for name in task_names(run):
        middle.plot(*zip(*run.curve(TASK + name).items(), strict=True), "o-", ms=2, lw=0.8, label=name)
    middle.plot(*zip(*held_out_accuracy(run).items(), strict=True), "k-", lw=2, label="mean")
    middle.set_title("held-out accuracy", fontsize=10)
    for name, style in (("realized", "."), ("predicted", "-"), ("budget", "k--")):
        curve = run.curve(f"kl/{name}")
        right.plot(list(curve), list(curve.values()), style, ms=3, lw=0.8, label=name)
    right.set_yscale("log")
    right.set_title("KL per token of an update", fontsize=10)
    for axis in (left, middle, right):
        for kill in kills:
            axis.axvline(kill, color="r", lw=0.6, ls=":", label="killed" if kill == kills[0] else None)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncols=2)
    save_figure(figure, picture)


def main() -> int:
    parser = argparse.ArgumentParser(description="A long run that is killed on its way, and a verdict on it.")
    parser.add_argument("--config", default="configs/tiny_reasoning.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; others lie beside it")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--compare", type=int, default=200, help="updates of the unbroken run, with a checkpoint there")
    parser.add_argument("--seed", type=int, default=0, help="of the moments to kill")
    parser.add_argument("--judge", action="store_true", help="run nothing")
    parser.add_argument("--report", type=Path, default=ROOT / "docs/long_run", help="where to write .json and .png")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    asked = parser.parse_args()
    from logra_jax.config import load_config

    out, config = asked.out.absolute(), load_config(asked.config, asked.settings)
    if config.steps < WINDOW:
        parser.error(f"steps={config.steps}: the verdict needs {WINDOW}")
    for key, every in (("eval.every", config.eval.every), ("checkpoint.every", config.checkpoint.every)):
        if not every or asked.compare % every:
            parser.error(f"--compare {asked.compare} must be a multiple of {key}={every}")
    if not asked.judge:
        arguments = ["--config", asked.config, *asked.settings]
        plan = moments(config.steps, asked.compare, asked.kills, asked.seed)
        with mine(out) as lock:
            if lock is None:
                parser.error(f"{out} is being run")
            run_killed(arguments, out, lock, out.with_name(out.name + f"-{asked.compare}"), asked.compare, plan)
            run_unbroken(arguments, out.with_name(out.name + "-unbroken"), lock, asked.compare)
    diary = out.with_name(out.name + ".kills")
    kills = [int(line) for line in diary.read_text().splitlines()] if diary.is_file() else []
    found, verdict = judge(out, asked.compare, kills)
    asked.report.with_suffix(".json").write_text(json.dumps({"verdict": verdict} | found, indent=1) + "\n")
    draw(read_run(out), kills, asked.report.with_suffix(".png"))
    print(json.dumps({"verdict": verdict} | found, indent=1))
    return 0 if all(verdict.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
