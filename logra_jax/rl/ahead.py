"""The answers to learn from, drawn and graded in the background while the update before them is computed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from logra_jax._shapes import Float, Int
from logra_jax.errors import UserError
from logra_jax.mesh import fetch
from logra_jax.rl.rollout import Rollout


class Drawn(NamedTuple):
    """Answers with their rewards, float32 ``[prompts, generations]``; NaN where a row has to be dropped.

    rows: where their prompts stand in the prompt set, int32. consumed: prompts that were taken from the order of the
    run to get them, and mean_reward: of all of those. failed: how many of their answers had a grading that ran out of
    time, and one that raised, int32.
    """

    rollout: Rollout
    rewards: Float[np.ndarray, "p g"]
    rows: Int[np.ndarray, " p"]
    consumed: int
    mean_reward: float
    failed: Int[np.ndarray, " 2"]

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it on the host, by name; all processes call it."""
        own = {name: np.asarray(getattr(self, name)) for name in self._fields if name != "rollout"}
        return {**fetch(self.rollout)._asdict(), **own}

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray], place: Callable[[np.ndarray], Any]) -> "Drawn":
        """The inverse of `arrays`. place: puts rows on the trainer's devices."""
        rollout = Rollout(**{name: place(arrays[name]) for name in Rollout._fields})
        consumed, mean = int(arrays["consumed"]), float(arrays["mean_reward"])
        return cls(
            rollout, arrays["rewards"], arrays["rows"], consumed, mean, arrays.get("failed", np.zeros(2, np.int32))
        )


class Ahead:
    """Draws the answers for one update at a time, in a thread of its own.

    update: the one that learns from what is being drawn, or was and has not been asked for; None: nothing is.
    """

    def __init__(self) -> None:
        self.update: int | None = None
        self._task: Future[Drawn] | None = None
        self._threads = ThreadPoolExecutor(1, "answers")

    def start(self, update: int, draw: Callable[[], Drawn]) -> None:
        """Begin to draw, which must touch nothing that an update writes over."""
        assert self._task is None, "one at a time"
        self.update, self._task = update, self._threads.submit(draw)

    def result(self) -> Drawn:
        """Wait for what was started last, and return it, or raise what it has raised."""
        assert self._task is not None
        task, self._task, self.update = self._task, None, None
        return task.result()

    def close(self) -> None:
        """Wait for the thread to end; what it draws, or fails of, is lost. Whoever can end it sooner does so before."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._task, self.update = None, None


def staleness(versions: np.ndarray, update: int, allowed: int) -> int:
    """Updates that the oldest of these weights are behind the ones that learn.

    Args:
      versions: of the weights that each answer was drawn under.
      update: the number of updates before the one that learns, which is the version of its weights.
      allowed: as many are fine.

    Raises:
      UserError: an answer is older, or newer than the weights that learn from it.
    """
    oldest, newest = int(versions.min()), int(versions.max())
    if newest > update or update - oldest > allowed:
        raise UserError(
            f"update {update} got answers of weights {oldest} to {newest}, and rollout.staleness={allowed} allows "
            f"{update - allowed} to {update}: were the servers given weights by something else?"
        )
    return update - oldest
