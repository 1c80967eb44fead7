"""Rewards for completions, graded where hostile text can do no harm: in worker processes that can be killed.

Who pays for a failure: a completion that hangs, crashes or exhausts the maths checker was written by the
model and scores 0.0; a reward FUNCTION that raises, hangs or returns no finite number is not the model's
fault, so the row is dropped (NaN) and counted, and so is a row whose gold answer cannot be used.
"""

import difflib
import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from logra_jax.errors import UserError
from logra_jax.rl.math_text import answer_text, last_group
from logra_jax.rl.tasks import ENTRY
from logra_jax.rl.workers import Pool

KINDS = ("math", "exact", "reasoning_gym")
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
TAIL = 100_000  # characters of a completion that a grader sees, from its end
VOTE_TAIL = 10_000  # of one that a pattern is tried on outside of a worker that could be killed over it
WHOLE = r"\A([\s\S]*)\Z"  # the pattern of an answer that is all of its completion
FULL_LIMITS = 2  # late answers per worker and call, after which the others get less time
INTEGER = re.compile(r"\s*-?\d{1,300}\s*", re.ASCII)  # a reference answer that needs no looking at
ROW_ROUNDS = 8  # a failed batch is graded row by row for at most this many time limits


@dataclass(frozen=True)
class RewardCounts:
    """Rows that ran out of time, raised (or lost their worker, or have no usable reference answer), were not finite."""

    timeouts: int = 0
    errors: int = 0
    non_finite: int = 0


class Grader:
    """Scores completions; a context manager. `counts` describes the last `grade` call."""

    def __init__(self) -> None:
        self.counts = RewardCounts()
        self._one = threading.Lock()

    def grade(self, prompts: Sequence[str], completions: Sequence[str], columns: dict[str, list[Any]]) -> np.ndarray:
        """`grade_counted` without the counts."""
        return self.grade_counted(prompts, completions, columns)[0]

    def grade_counted(
        self, prompts: Sequence[str], completions: Sequence[str], columns: dict[str, list[Any]]
    ) -> tuple[np.ndarray, RewardCounts]:
        """float32 [N] rewards in the order of the N completions; NaN = the row is to be dropped.

        prompts: N texts. columns: N values each. Of several threads, one at a time is served. Raises UserError when
        not one row could be graded.
        """
        if any(len(values) != len(completions) for values in (prompts, *columns.values())):
            raise ValueError("prompts, completions and columns must have one entry per row")
        with self._one:
            scores, counts, reason = self._grade(list(prompts), [text[-TAIL:] for text in completions], columns)
            self.counts = counts
        rewards = np.array(scores, dtype=np.float32)
        if len(rewards) and np.isnan(rewards).all():
            raise UserError(f"every reward failed ({len(rewards)} rows): {reason}")
        return rewards, counts

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        """Scores (NaN = dropped), counts, and the last reason for which a row was dropped."""
        raise NotImplementedError

    def answers(self, completions: Sequence[str]) -> list[str | None] | None:
        """For a majority vote: each completion's answer, as a text that equal answers share; None without one.

        None instead of a list where the reward does not say what an answer is.
        """
        return None

    def unusable(self, columns: dict[str, list[Any]]) -> dict[int, str]:
        """Rows whose reference answer no answer could be compared with, and why; to be asked before training."""
        return {}

    def close(self) -> None:
        """Ends the worker processes, if any. May be called again; also happens when the interpreter exits."""

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def make_reward(
    kind: str, *, answer_column: str | None, timeout_s: float, workers: int, pattern: str | None = None
) -> Grader:
    r"""The grader of a reward kind.

    "math": 1.0 when the last complete \boxed{...} equals the answer column mathematically, else 0.0.
    "reasoning_gym": what the verifier of the row's task gives (1.0 is right) for group 1 of the last match of
        `pattern`, without one the completion. For rows that `rl.tasks.make_rows` made: workers unpickle their column
        `entry`, so one from elsewhere could run code.
    "exact": 1.0 when group 1 of the last match of the regex `pattern` (without one: the completion) equals
        the answer column's text, spaces around both removed, else 0.0. In-process: keep the pattern simple.
    "module:function": function(prompts, completions, columns) -> N numbers, importable from the current
        directory, called once per batch in a worker process; row by row where that call raises or hangs.

    timeout_s: seconds of CPU time per answer for "math" and "reasoning_gym", of a clock per call for a function.
    workers: processes, >= 1.
    Raises UserError for an unknown kind and for a function that cannot be imported or called.
    """
    if not timeout_s > 0 or workers < 1:
        raise UserError(f"reward.timeout_s must be above 0 and reward.workers at least 1: {timeout_s}, {workers}")
    if kind in ("math", "exact") and answer_column is None:
        raise UserError(f"reward.kind={kind} needs data.answer_column")
    if kind == "math":
        return _MathGrader(Pool(kind, workers, timeout_s), str(answer_column))
    if kind == "reasoning_gym":
        if pattern is not None:
            compile_pattern(pattern)
        return _AnswerGrader(Pool(kind, workers, timeout_s), {"entry": ENTRY}, pattern=pattern)
    if kind == "exact":
        return _ExactGrader(str(answer_column), pattern)
    check_kind(kind)
    return _FunctionGrader(kind, Pool(kind, workers, timeout_s), timeout_s)


class _ExactGrader(Grader):
    def __init__(self, answer_column: str, pattern: str | None):
        super().__init__()
        self._answer_column = answer_column
        self._pattern = compile_pattern(WHOLE if pattern is None else pattern)

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        golds = _texts(columns, self._answer_column)
        found = [last_group(self._pattern, completion) for completion in completions]
        return [float(a == gold.strip()) for a, gold in zip(found, golds, strict=True)], RewardCounts(), ""

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        return [last_group(self._pattern, completion[-TAIL:]) or None for completion in completions]


class _AnswerGrader(Grader):
    """Grades each answer on its own: one that cannot be graded is worth 0."""

    def __init__(self, pool: Pool, columns: dict[str, str], **fixed: Any):
        """columns: key of a request -> name of the column that it comes from; fixed: the same in every request."""
        super().__init__()
        self._pool, self._columns, self._fixed = pool, columns, fixed
        pool.start(pool.size)

    def _requests(self, columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
        given = [_texts(columns, name) for name in self._columns.values()]
        return [{**dict(zip(self._columns, values, strict=True)), **self._fixed} for values in zip(*given, strict=True)]

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        requests = [{**r, "completion": c} for r, c in zip(self._requests(columns), completions, strict=True)]
        scores, timeouts, errors, reason = [], 0, 0, ""
        for reply in self._pool.run(requests, full_limits=FULL_LIMITS * self._pool.size):
            if "score" in reply:
                scores.append(reply["score"])
            elif "bad_gold" in reply:
                scores.append(math.nan)
                errors, reason = errors + 1, reply["bad_gold"]
            else:
                scores.append(0.0)
                timeouts += "late" in reply
                errors += "late" not in reply
        return scores, RewardCounts(timeouts=timeouts, errors=errors), reason

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        pattern = compile_pattern(self._fixed.get("pattern") or WHOLE)
        return [last_group(pattern, completion[-VOTE_TAIL:]) or None for completion in completions]

    def close(self) -> None:
        self._pool.close()


class _MathGrader(_AnswerGrader):
    def __init__(self, pool: Pool, answer_column: str):
        super().__init__(pool, {"gold": answer_column})

    def answers(self, completions: Sequence[str]) -> list[str | None]:
        return [answer_text(completion[-TAIL:]) for completion in completions]

    def unusable(self, columns: dict[str, list[Any]]) -> dict[int, str]:
        requests = self._requests(columns)
        golds = [r["gold"] for r in requests]
        odd = sorted({gold for gold in golds if not INTEGER.fullmatch(gold)})
        reasons = {}
        for gold, reply in zip(odd, self._pool.run([{"gold": gold} for gold in odd]), strict=True):
            if "score" not in reply:
                late = f"it takes more than {self._pool.timeout_s:g} s to read"
                reasons[gold] = str(reply.get("bad_gold") or reply.get("error") or late)
        return {i: reasons[gold] for i, gold in enumerate(golds) if gold in reasons}


class _FunctionGrader(Grader):
    def __init__(self, kind: str, pool: Pool, timeout_s: float):
        super().__init__()
        self._kind, self._pool, self._timeout_s = kind, pool, timeout_s
        try:
            pool.wait_ready()
        except UserError:
            pool.close()
            raise

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        if not completions:
            return [], RewardCounts(), ""
        request = {"prompts": prompts, "completions": completions, "columns": columns}
        replies = self._pool.run([request])
        # Not tried row by row: a function that returns one number for a whole batch would look right there.
        self._refuse_wrong_length(replies, len(completions))
        if "scores" not in replies[0]:
            rows = [
                {"prompts": [p], "completions": [c], "columns": {k: [v[i]] for k, v in columns.items()}}
                for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
            ]
            replies = self._pool.run(rows, seconds=ROW_ROUNDS * self._timeout_s)
            self._refuse_wrong_length(replies, 1)
        scores: list[float] = []
        timeouts = errors = 0
        reason = f"{self._kind} returned no finite number"
        for reply in replies:
            if "scores" in reply:
                scores += [math.nan if s is None or not math.isfinite(s) else s for s in reply["scores"]]
                continue
            scores.append(math.nan)
            late = "late" in reply
            timeouts, errors = timeouts + late, errors + (not late)
            reason = f"{self._kind} took more than {self._timeout_s} s" if late else reply["error"]
        dropped = sum(math.isnan(score) for score in scores)
        return scores, RewardCounts(timeouts, errors, dropped - timeouts - errors), reason

    def _refuse_wrong_length(self, replies: list[dict[str, Any]], wanted: int) -> None:
        for reply in replies:
            if "wrong_length" in reply:
                raise UserError(
                    f"reward.kind {self._kind} returned {reply['wrong_length']} numbers for {wanted} "
                    "completions; it must return one per completion"
                )

    def close(self) -> None:
        self._pool.close()


def _texts(columns: dict[str, list[Any]], name: str) -> list[str]:
    if name not in columns:
        raise UserError(f"no column {name!r} among {', '.join(columns) or 'none'}; set data.answer_column")
    return [str(value) for value in columns[name]]


def check_kind(kind: str) -> None:
    """Raises UserError for what is no `kind` of `make_reward`."""
    if kind in KINDS or FUNCTION.fullmatch(kind):
        return
    near = difflib.get_close_matches(kind, KINDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"reward.kind={kind!r} is none of {', '.join(KINDS)} and module:function{hint}")


def compile_pattern(pattern: str, key: str = "reward.pattern", groups: int = 1) -> re.Pattern[str]:
    """Raises UserError, naming the setting, for what is no regular expression or has fewer groups."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{key}: {pattern!r} is not a regular expression: {error}") from None
    if found.groups < groups:
        raise UserError(f"{key}={pattern!r} needs a group, such as '#(.*)$', that holds the answer")
    return found
