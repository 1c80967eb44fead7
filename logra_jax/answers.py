"""Where the answers of a run come from: drawn when an update needs them, or one update ahead, in the background."""

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.mesh import fetch
from logra_jax.rl.ahead import Drawn
from logra_jax.rl.prompts import PromptSet
from logra_jax.signals import StopFlag
from logra_jax.sync.client import Unreachable

if TYPE_CHECKING:
    from logra_jax.rl.update import TrainState
    from logra_jax.run import Run


class Answers:
    """The answers of one update after the other, with their rewards.

    With rollout.staleness=1 those of update k + 1 are begun before update k is computed, under the weights that it
    writes over. They cannot be drawn again once it has done so, and are part of the checkpoint.
    """

    def __init__(self, run: "Run", stop: StopFlag):
        self._run, self._stop, self._rollout = run, stop, run.config.rollout
        self._ahead = self._rollout.staleness > 0
        self._drawn: Drawn | None = None  # for the next update, not yet learnt from

    def _prompts(self, consumed: int) -> PromptSet:
        return self._run.prompts.take(self._run.order.rows(consumed, self._rollout.prompts))

    def next(self, state: "TrainState", step: int, consumed: int) -> tuple[Drawn, dict[str, Any]]:
        """Those of update `step`, whose prompts are the next after `consumed`, and metrics. Begins the ones after."""
        run, started = self._run, time.perf_counter()
        self._wait()
        # Servers get new weights while they draw nothing: every answer is one version's.
        found = run.follow(state, step)
        drawn, sampled = self._drawn, time.perf_counter()
        if drawn is None:
            prompts = self._prompts(consumed)
            rollout = run.sample(state, prompts, update=step)
            fetch(rollout.lengths)  # waits for the rollout
            sampled = time.perf_counter()
            self._stop.check()
            drawn = Drawn(rollout, run.grade(prompts, rollout))
        graded = time.perf_counter()
        if self._ahead:
            self._drawn = drawn
            if step + 1 < run.config.steps:
                run.draw_ahead(self._prompts(consumed + self._rollout.prompts), step + 1)
        return drawn, found | {"time/rollout_s": sampled - started, "time/reward_s": graded - sampled}

    def used(self) -> None:
        """The newest ones are about to be learnt from."""
        self._drawn = None

    def _wait(self) -> None:
        """Until what is drawn ahead is there; where all servers were lost meanwhile, there is nothing."""
        if self._run.ahead.update is None:
            return
        try:
            self._drawn = self._run.ahead.result()
        except Unreachable as error:
            print(
                f"warning: {error}\nwarning: answers are drawn again, with newer weights", file=sys.stderr, flush=True
            )

    def to_save(self, step: int) -> dict[str, np.ndarray]:
        """What a checkpoint after `step` updates must hold of them, for `take_over`; waits until it is there."""
        if self._run.ahead.update == step:
            self._wait()
        return {} if self._drawn is None else self._drawn.arrays()

    def take_over(self, saved: dict[str, np.ndarray], consumed: int) -> None:
        """Go on with saved answers, unless this run asks for others."""
        tokens, n = self._prompts(consumed).tokens, self._rollout.generations
        shape = len(tokens) * n, tokens.shape[1] + self._rollout.max_new_tokens
        if not self._ahead:
            why = "rollout.staleness is 0 now"
        elif saved["tokens"].shape != shape or (saved["tokens"][:, : tokens.shape[1]] != np.repeat(tokens, n, 0)).any():
            why = "prompts or their answers' number or length are others now"
        else:
            self._drawn = Drawn.of(saved, self._run.place)
            return
        print(f"note: answers in the checkpoint, from before its last update, are drawn again: {why}", flush=True)
