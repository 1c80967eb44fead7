"""python -m logra_jax.compare RUN RUN ...: finished runs side by side, with mean and deviation over seeds.

RUN is the folder that a run wrote (out). Runs that differ in nothing but their seed make up one line of the table,
named after the settings in which the lines differ.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logra_jax import cli
from logra_jax.config import SETTINGS, Config, load_config
from logra_jax.errors import UserError
from logra_jax.metrics import METRICS, place_of, read_rows, save_figure

# What may differ between runs of one line: it changes no number but by chance.
APART = ("seed", "out", "log.", "checkpoint.", "processes.")
PANELS = (("evaluation accuracy", "eval/accuracy"), ("reward of the sampled answers", "reward/mean"))
# What an accuracy depends on, whatever was trained.
MEASURED = (
    *("data.eval", "eval.temperature", "eval.top_p", "eval.max_prompts"),
    *("rollout.max_new_tokens", "reward.kind", "reward.pattern"),
)
TAIL = 10  # updates whose sampled rewards are averaged at the end of a run
FILES = ("compare.md", "compare.json", "compare.png")


@dataclass(frozen=True)
class Finished:
    """A run as it was left: its folder, its settings, and the rows of its metrics, at least one."""

    folder: Path
    config: Config
    rows: Sequence[Mapping[str, Any]]

    def curve(self, key: str) -> dict[float, float]:
        """Values of a metric by the number of updates before them; null and absent ones are left out."""
        return {place_of(row, key): row[key] for row in self.rows if row.get(key) is not None}

    @property
    def updates(self) -> int:
        """Updates done."""
        return self.rows[-1]["step"] + 1

    @property
    def answers(self) -> int:
        """Answers drawn for these updates, those that dynamic sampling left out included."""
        rollout, batches = self.config.rollout, self.rows[:: self.config.loss.updates_per_batch]
        return sum(row.get("rollout/prompts", rollout.prompts) for row in batches) * rollout.generations

    def figures(self, more: Sequence[str]) -> dict[str, float]:
        """The numbers of the table by name; those that the run does not have are left out. more: last values."""
        found: dict[str, float] = {}
        if accuracy := list(self.curve("eval/accuracy").items()):
            if accuracy[0][0] == 0:
                found["accuracy before"] = accuracy[0][1]
            if accuracy[-1][0] == self.updates:
                found["accuracy"] = accuracy[-1][1]
        if rewards := list(self.curve("reward/mean").values()):
            found["sampled reward"] = statistics.fmean(rewards[-TAIL:])
        predicted, realized = self.curve("kl/predicted"), self.curve("kl/realized")
        if ratios := [realized[x] / predicted[x] for x in realized if predicted.get(x)]:
            found["realised / predicted KL"] = statistics.median(ratios)
        return found | {key: list(curve.values())[-1] for key in more if (curve := self.curve(key))}


def read_run(folder: Path) -> Finished:
    """A run's folder. Raises UserError for one that is none, or has no metrics yet."""
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder}: no folder of a run: it has no config.yaml")
    config = load_config(folder / "config.yaml")
    rows = read_rows(folder / METRICS) if (folder / METRICS).is_file() else []
    if not rows:
        raise UserError(f"{folder}: its {METRICS} has no rows: no update is done yet")
    return Finished(folder, config, rows)


def group(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    """Runs by what their settings differ in, in order of appearance."""
    keys = [key for key in SETTINGS if not any(key == a or (a[-1] == "." and key.startswith(a)) for a in APART)]
    settings = [tuple(SETTINGS[key].of(run.config) for key in keys) for run in runs]
    differ = [i for i in range(len(keys)) if len({values[i] for values in settings}) > 1]
    last = [keys[i].rpartition(".")[2] for i in differ]
    short = {keys[i]: end if last.count(end) == 1 else keys[i] for i, end in zip(differ, last, strict=True)}
    found: dict[str, list[Finished]] = {}
    for run, values in zip(runs, settings, strict=True):
        name = ", ".join(f"{short[keys[i]]}={values[i]}" for i in differ)
        found.setdefault(name or "all runs", []).append(run)
    return found


def summarize(groups: Mapping[str, Sequence[Finished]], more: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """For every line and figure the values of its runs."""
    found = {}
    for name, runs in groups.items():
        figures = [run.figures(more) for run in runs]
        keys = dict.fromkeys(key for values in figures for key in values)
        found[name] = {key: [values[key] for values in figures if key in values] for key in keys}
    return found


def table(groups: Mapping[str, Sequence[Finished]], found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Markdown: a line per group, mean +- sample standard deviation over its runs."""
    keys = list(dict.fromkeys(key for values in found.values() for key in values))
    lines = [["settings", "runs", "updates", *keys]]
    for name, runs in groups.items():
        done = sorted({run.updates for run in runs})
        cells = [name, str(len(runs)), "-".join(str(n) for n in dict.fromkeys((done[0], done[-1])))]
        lines.append([*cells, *(spread(found[name].get(key, ()), len(runs)) for key in keys)])
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], runs: int) -> str:
    """Mean and sample standard deviation; how many of the runs have the figure, where not all do."""
    if not values:
        return ""
    mean = statistics.fmean(values)
    form = ".3g" if 0 < abs(mean) < 0.01 else ".3f"
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{mean:{form}}{deviation}{f' (of {len(values)})' if len(values) < runs else ''}"


def doubts(groups: Mapping[str, Sequence[Finished]]) -> list[str]:
    """What a reader of the table should know."""
    found = []
    everything = [run for runs in groups.values() for run in runs]
    for run in everything:
        if run.updates < run.config.steps:
            found.append(f"{run.folder} has done {run.updates} of {run.config.steps} updates")
    for name, runs in groups.items():
        if len({run.config.seed for run in runs}) < len(runs):
            found.append(f"{name}: runs with the same seed are no independent ones")
    for key in MEASURED:
        if len({SETTINGS[key].of(run.config) for run in everything}) > 1:
            found.append(f"{key} differs: accuracies cannot be compared")
    answers = {run.answers for run in everything}
    if len(answers) > 1:
        found.append(f"runs have seen from {min(answers):,} to {max(answers):,} answers")
    return found


def draw(groups: Mapping[str, Sequence[Finished]], picture: Path) -> None:
    """Curves of all lines: the mean of the runs, and one standard deviation around it, where all have a value."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(PANELS), 3.8), layout="constrained")
    for axis, (title, key) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for name, runs in groups.items():
            curves = [run.curve(key) for run in runs]
            places = sorted(set.intersection(*(set(curve) for curve in curves)))
            columns = [[curve[x] for curve in curves] for x in places]
            means = [statistics.fmean(column) for column in columns]
            (line,) = axis.plot(places, means, "o-" if len(places) < runs[0].updates else "-", ms=3, lw=1.2, label=name)
            if len(runs) > 1:
                sides = [statistics.stdev(column) for column in columns]
                low, high = ([m + sign * s for m, s in zip(means, sides, strict=True)] for sign in (-1, 1))
                axis.fill_between(places, low, high, color=line.get_color(), alpha=0.2, lw=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center")
    save_figure(figure, picture)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; with --out, write it, its numbers and a picture. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m logra_jax.compare", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run (its out)")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help=f"write {', '.join(FILES)} to it")
    parser.add_argument(
        "--metric", metavar="KEY", action="append", default=[], help="last value of a metric as one more column"
    )
    asked = parser.parse_args(argv)
    if asked.out and (there := [name for name in FILES if (asked.out / name).exists()]):
        raise UserError(f"--out {asked.out} has {', '.join(there)} already: choose another folder, or delete them")
    twice = [str(run) for run in asked.runs if sum(other.resolve() == run.resolve() for other in asked.runs) > 1]
    if twice:
        raise UserError(f"{twice[0]} is named more than once")
    runs = [read_run(folder) for folder in asked.runs]
    for key in asked.metric:
        if not any(run.curve(key) for run in runs):
            known = sorted({name for run in runs for row in run.rows for name in row} - {"step"})
            raise UserError(f"--metric {key}: no run has it; there are {', '.join(known)}")
    groups = group(runs)
    found = summarize(groups, asked.metric)
    text, notes = table(groups, found), doubts(groups)
    print(text)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if asked.out:
        foot = "".join(f"\n- {note}" for note in notes)
        numbers = {
            name: {"runs": [str(run.folder) for run in groups[name]], "figures": figures}
            for name, figures in found.items()
        }
        try:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "compare.md").write_text(f"{text}\n{foot}\n" if notes else f"{text}\n", encoding="utf-8")
            (asked.out / "compare.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
            draw(groups, asked.out / "compare.png")
        except OSError as error:  # a full disk, say
            raise UserError(f"--out {asked.out} cannot be written: {error}") from error
    return 0


if __name__ == "__main__":
    cli.run(main)
