"""Grading shared by the processes of a run: each grades its block of the rows, and all get all rewards."""

import math
from dataclasses import astuple
from typing import Any

import numpy as np

from logra_jax import distributed
from logra_jax.errors import SharedError, UserError
from logra_jax.rl.reward import Grader, RewardCounts


class SharedGrader(Grader):
    """Calls `grader`, which every process has, on this process's rows. All processes call it with the same rows.

    What makes one process raise makes all raise.
    """

    def __init__(self, grader: Grader):
        super().__init__()
        self._grader = grader

    def grade_counted(
        self, prompts: Any, completions: Any, columns: dict[str, list[Any]]
    ) -> tuple[np.ndarray, RewardCounts]:
        """See `Grader.grade_counted`."""
        try:
            return super().grade_counted(prompts, completions, columns)
        except SharedError:
            raise
        except UserError as error:  # not one row of all could be graded, which all processes know
            raise SharedError(str(error)) from error

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        own, error = distributed.own_rows(len(completions)), None
        scores, counts, reason = [math.nan] * (own.stop - own.start), RewardCounts(), "see the other processes"
        try:
            if scores:
                mine = {name: values[own] for name, values in columns.items()}
                scores, counts, reason = self._grader._grade(prompts[own], completions[own], mine)
        except (UserError, OSError) as problem:
            error = problem
        distributed.agree(error)
        every = distributed.collect(np.asarray(scores, np.float32), len(completions))
        counts = RewardCounts(*distributed.total(np.asarray(astuple(counts), np.int32)).tolist())
        return every.tolist(), counts, reason

    def answers(self, completions: Any) -> list[str | None] | None:
        """See `Grader.answers`. Each process looks at all of them, which takes little."""
        return self._grader.answers(completions)

    def unusable(self, columns: dict[str, list[Any]]) -> dict[int, str]:
        """See `Grader.unusable`. Each process looks at its rows, and all leave out the same."""
        count = len(next(iter(columns.values()), []))
        own, error, found = distributed.own_rows(count), None, dict[int, str]()
        try:
            found = self._grader.unusable({name: values[own] for name, values in columns.items()})
        except (UserError, OSError) as problem:
            error = problem
        distributed.agree(error)
        bad = np.zeros(own.stop - own.start, np.float32)
        bad[list(found)] = 1.0
        rows = np.flatnonzero(distributed.collect(bad, count)).tolist()
        return {i: found.get(i - own.start, "see the other processes") for i in rows}

    def close(self) -> None:
        """See `Grader.close`."""
        self._grader.close()
