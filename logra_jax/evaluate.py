"""python -m logra_jax.evaluate: accuracy of a model on held-out prompts.

Takes the settings of a training run; model.path is the model to look at (a run's out/hf, say), data.eval the
prompts, and eval.* how to sample: greedy accuracy by default, pass@k with eval.samples above 1.
"""

import json
import os
import sys
from collections.abc import Sequence

from logra_jax import cli, distributed
from logra_jax.errors import UserError
from logra_jax.signals import StopFlag, Stopped
from logra_jax.watchdog import Watchdog


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print one JSON object of metrics on standard output, and return the exit code."""
    config = cli.parse(argv, "python -m logra_jax.evaluate", __doc__ or "", trains=False).config
    if config.data.eval is None:
        raise UserError("data.eval is not set: give the file of prompts to evaluate on")
    with StopFlag() as stop, Watchdog(config.processes.hang_s) as watchdog:
        cli.begin(config, distributed.find(os.environ), stop, watchdog)
        from logra_jax.build import check_files, make_grader
        from logra_jax.run import Evaluator

        check_files(config, trains=False)
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
    if not writes:
        return 0
    for record in evaluator.samples(found):
        text = f"prompt {record.prompt!r}\nanswer {record.completion!r}\nreward {record.reward}"
        print(text, file=sys.stderr)
    print(json.dumps(found.metrics))
    return 0


if __name__ == "__main__":
    cli.run(main)
