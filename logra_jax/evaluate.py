"""python -m logra_jax.evaluate: accuracy of a model on held-out prompts.

Takes the settings of a training run; model.path is the model to look at (a run's out/hf, say), data.eval the
prompts, and eval.* how to sample: greedy accuracy by default, pass@k and maj@k with eval.samples above 1.
Prints one JSON object of metrics, with 95 % confidence intervals under ci95. --out keeps it as metrics.json, beside
settings.yaml and all answers, generations.jsonl.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logra_jax import cli, distributed
from logra_jax.config import Config, to_yaml
from logra_jax.errors import UserError
from logra_jax.signals import StopFlag, Stopped
from logra_jax.watchdog import Watchdog

if TYPE_CHECKING:  # --help and wrong settings need no jax
    from logra_jax.rl.evaluate import Evaluation


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print one JSON object of metrics on standard output, and return the exit code."""
    command = cli.parse(argv, "python -m logra_jax.evaluate", __doc__ or "", trains=False)
    config, folder = command.config, command.folder
    if config.data.eval is None:
        raise UserError("data.eval is not set: give the file of prompts to evaluate on")
    with StopFlag() as stop, Watchdog(config.processes.hang_s) as watchdog:
        cli.begin(config, distributed.find(os.environ), stop, watchdog)
        from logra_jax.build import check_files, make_grader
        from logra_jax.fit import out_of_memory, ran_out
        from logra_jax.run import Evaluator

        check_files(config, trains=False)
        distributed.on_first(lambda: None if folder is None else prepare(folder))
        with make_grader(config) as grader:
            evaluator = Evaluator(config, grader, stop.check)
            writes = distributed.first()
            if writes:
                print(evaluator.summary(), file=sys.stderr, flush=True)
            try:
                found = evaluator.evaluate(evaluator.load())
            except Stopped as stopped:
                print(stopped, file=sys.stderr)
                return stopped.code
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                raise out_of_memory(config, error, trains=False) from error
    if writes:
        for record in evaluator.samples(found):
            text = f"prompt {record.prompt!r}\nanswer {record.completion!r}\nreward {record.reward}"
            print(text, file=sys.stderr)
        print(figures(found), flush=True)
    if folder is not None:
        distributed.on_first(lambda: write(folder, config, found))
    return 0


def prepare(folder: Path) -> None:
    """Make the folder, before anything that takes long. Raises UserError if it cannot be made, or holds anything."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--out {folder} is not empty, and nothing is overwritten: choose another folder")
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error}") from error


def figures(found: "Evaluation") -> str:
    """Metrics and intervals as JSON; null for what could not be computed."""
    metrics = {name: value if math.isfinite(value) else None for name, value in found.metrics.items()}
    return json.dumps({**metrics, "ci95": found.intervals}, allow_nan=False)


def write(folder: Path, config: Config, found: "Evaluation") -> None:
    """Write the files of --out. Raises UserError if they cannot be."""
    try:
        with (folder / "generations.jsonl").open("x", encoding="utf-8") as file:
            for record in found.records:
                row: dict[str, Any] = record._asdict()
                row["reward"] = record.reward if math.isfinite(record.reward) else None
                file.write(json.dumps(row) + "\n")
        for name, text in (("metrics.json", figures(found) + "\n"), ("settings.yaml", to_yaml(config))):
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error}") from error


if __name__ == "__main__":
    cli.run(main)
