"""Where the answers of a run come from: drawn when an update needs them, or one update ahead, in the background."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax.errors import UserError
from logra_jax.mesh import fetch
from logra_jax.rl.ahead import Drawn
from logra_jax.rl.dynamic_sampling import fill_groups
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

    def _draw(self, step: int, consumed: int, check: Callable[[], object], spent: list[float]) -> Drawn:
        """The answers of update `step`. Adds the seconds of sampling and grading to `spent`."""
        run, size = self._run, self._rollout.prompts

        def one(number: int) -> Drawn:
            started, rows = time.perf_counter(), run.order.rows(consumed + number * size, size)
            prompts = run.prompts.take(rows)
            rollout = run.generate(prompts, step)
            fetch(rollout.lengths)  # waits for the rollout
            sampled = time.perf_counter()
            check()
            rewards, counts = run.grade(prompts, rollout)
            failed = np.array([counts.timeouts, counts.errors], np.int32)
            spent[0] += sampled - started
            spent[1] += time.perf_counter() - sampled
            return Drawn(rollout, rewards, rows, size, float(np.nanmean(rewards)), failed)

        return fill_groups(one, self._rollout.dynamic_sampling, run.place)

    def next(self, state: "TrainState", step: int, consumed: int) -> tuple[Drawn, dict[str, Any]]:
        """Those of update `step`, whose prompts are the next after `consumed`, and metrics. Begins the ones after."""
        run, started = self._run, time.perf_counter()
        self._wait(Unreachable)
        # Servers get new weights while they draw nothing: every answer is one version's.
        found = run.follow(state, step)
        drawn, spent = self._drawn, [time.perf_counter() - started, 0.0]
        if drawn is None:
            drawn = self._draw(step, consumed, self._stop.check, spent)
        if self._ahead:
            self._drawn, then = drawn, consumed + drawn.consumed
            alive = lambda: self._stop.agree(0)  # something has got done, but a stop waits for all of it
            if step + 1 < run.config.steps:
                run.draw_ahead(step + 1, lambda: self._draw(step + 1, then, alive, [0.0, 0.0]))
        if self._rollout.dynamic_sampling:
            found |= {"rollout/prompts": drawn.consumed, "reward/drawn_mean": drawn.mean_reward}
        found |= dict(zip(("reward/timeouts", "reward/errors"), drawn.failed.tolist(), strict=True))
        return drawn, found | {"time/rollout_s": spent[0], "time/reward_s": spent[1]}

    def used(self) -> None:
        """The newest ones are about to be learnt from."""
        self._drawn = None

    def _wait(self, forgiven: type[UserError]) -> None:
        """Until what is drawn ahead is there; where it failed of such an error, there is nothing."""
        if self._run.ahead.update is None:
            return
        try:
            self._drawn = self._run.ahead.result()
        except forgiven as error:
            print(
                f"warning: {error}\nwarning: answers are drawn again, with newer weights", file=sys.stderr, flush=True
            )

    def to_save(self, step: int) -> dict[str, np.ndarray]:
        """What a checkpoint after `step` updates must hold of them, for `take_over`; waits until it is there.

        Whatever they failed of: what has been learnt can be saved, and the next update draws them again.
        """
        if self._run.ahead.update == step:
            self._wait(UserError)
        return {} if self._drawn is None else self._drawn.arrays()

    def take_over(self, saved: dict[str, np.ndarray], consumed: int) -> None:
        """Go on with saved answers, unless this run asks for others."""
        order = self._run.order.rows(consumed, int(saved["consumed"]))
        same = len(saved["rows"]) == self._rollout.prompts and bool(np.isin(saved["rows"], order).all())
        tokens, n = self._run.prompts.take(saved["rows"] if same else []).tokens, self._rollout.generations
        shape = len(tokens) * n, tokens.shape[1] + self._rollout.max_new_tokens
        if not self._ahead:
            why = "rollout.staleness is 0 now"
        elif saved["tokens"].shape != shape or (saved["tokens"][:, : tokens.shape[1]] != np.repeat(tokens, n, 0)).any():
            why = "prompts or their answers' number or length are others now"
        else:
            self._drawn = Drawn.of(saved, self._run.place)
            return
        print(f"note: answers in the checkpoint, from before its last update, are drawn again: {why}", flush=True)
