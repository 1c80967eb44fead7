"""python -m logra_jax.evaluate: accuracy of a model on held-out prompts.

Takes the settings of a training run; model.path is the model to look at (a run's out/hf, say), data.eval the prompts,
and eval.* how to sample: greedy accuracy by default, pass@k with eval.samples above 1.
"""

import json
import sys
from collections.abc import Sequence

from logra_jax import cli
from logra_jax.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, print one JSON object of metrics on standard output, and return the exit code."""
    config = cli.parse(argv, "python -m logra_jax.evaluate", __doc__ or "", trains=False).config
    if config.data.eval is None:
        raise UserError("data.eval is not set: give the file of prompts to evaluate on")
    cli.use_compilation_cache()

    from logra_jax.build import Run
    from logra_jax.signals import Stopped, StopFlag

    with StopFlag() as stop, Run(config, stop) as run:
        print(run.summary(), file=sys.stderr)
        try:
            found = run.evaluate(run.initial_state())
        except Stopped as stopped:
            print(stopped, file=sys.stderr)
            return stopped.code
        for record in found.records[: config.log.samples]:
            print(f"prompt {record.prompt!r}\nanswer {record.completion!r}\nreward {record.reward}", file=sys.stderr)
        print(json.dumps(found.metrics))
    return 0


if __name__ == "__main__":
    cli.run(main)
