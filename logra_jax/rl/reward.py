"""Rewards for completions, graded where hostile text can do no harm: in worker processes that can be killed.

Who pays for a failure: a completion that hangs, crashes or exhausts the maths checker was written by the
model and scores 0.0; a reward FUNCTION that raises, hangs or returns no finite number is not the model's
fault, so the row is dropped (NaN) and counted, and so is a row whose gold answer cannot be used.
"""

import contextlib
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from logra_jax.errors import UserError

TAIL = 100_000  # characters of a completion that a grader sees, from its end
START_SECONDS = 120.0  # for a worker to import what it needs
MAX_STILLBORN = 3  # workers killed one after the other before they could work
KILL_AFTER = 0.5  # seconds past the worker's own alarm
ROW_ROUNDS = 8  # a failed batch is graded row by row for at most this many time limits


@dataclass(frozen=True)
class RewardCounts:
    """Rows of one `grade` call that ran out of time, raised (or lost their worker), were not finite."""

    timeouts: int = 0
    errors: int = 0
    non_finite: int = 0


class Grader:
    """Scores completions; a context manager. `counts` describes the last `grade` call."""

    def __init__(self) -> None:
        self.counts = RewardCounts()
        self._one = threading.Lock()

    def grade(self, prompts: Sequence[str], completions: Sequence[str], columns: dict[str, list[Any]]) -> np.ndarray:
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
        return rewards

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        """Scores (NaN = dropped), counts, and the last reason for which a row was dropped."""
        raise NotImplementedError

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
    "exact": 1.0 when group 1 of the last match of the regex `pattern` (without one: the completion) equals
        the answer column's text, spaces around both removed, else 0.0. In-process: keep the pattern simple.
    "module:function": function(prompts, completions, columns) -> N numbers, importable from the current
        directory, called once per batch in a worker process; row by row where that call raises or hangs.

    timeout_s: seconds, per answer for "math", per call for a function. workers: processes, at least 1.
    Raises UserError for an unknown kind and for a function that cannot be imported or called.
    """
    if not timeout_s > 0 or workers < 1:
        raise UserError(f"reward.timeout_s must be above 0 and reward.workers at least 1: {timeout_s}, {workers}")
    if kind in ("math", "exact") and answer_column is None:
        raise UserError(f"reward.kind={kind} needs data.answer_column")
    if kind == "math":
        return _MathGrader(str(answer_column), _Pool(kind, workers, timeout_s))
    if kind == "exact":
        return _ExactGrader(str(answer_column), pattern)
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", kind):
        return _FunctionGrader(kind, _Pool(kind, workers, timeout_s), timeout_s)
    raise UserError(f"reward.kind {kind!r} is not math, exact or module:function")


class _ExactGrader(Grader):
    def __init__(self, answer_column: str, pattern: str | None):
        super().__init__()
        self._answer_column = answer_column
        try:
            self._pattern = re.compile(r"\A([\s\S]*)\Z" if pattern is None else pattern)
        except re.error as error:
            raise UserError(f"reward.pattern {pattern!r} is not a regular expression: {error}") from None
        if self._pattern.groups < 1:
            raise UserError(f"reward.pattern {pattern!r} has no group; put the answer in parentheses")

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        scores = []
        for completion, gold in zip(completions, _answers(columns, self._answer_column), strict=True):
            matches = list(self._pattern.finditer(completion))
            answer = matches[-1][1] if matches else None
            scores.append(float(answer is not None and answer.strip() == gold.strip()))
        return scores, RewardCounts(), ""


class _MathGrader(Grader):
    def __init__(self, answer_column: str, pool: "_Pool"):
        super().__init__()
        self._answer_column, self._pool = answer_column, pool
        pool.start(pool.size)

    def _grade(
        self, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
    ) -> tuple[list[float], RewardCounts, str]:
        golds = _answers(columns, self._answer_column)
        requests = [{"gold": g, "completion": c} for g, c in zip(golds, completions, strict=True)]
        scores, timeouts, errors, reason = [], 0, 0, ""
        for reply in self._pool.run(requests):
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

    def close(self) -> None:
        self._pool.close()


class _FunctionGrader(Grader):
    def __init__(self, kind: str, pool: "_Pool", timeout_s: float):
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


def _answers(columns: dict[str, list[Any]], name: str) -> list[str]:
    if name not in columns:
        raise UserError(f"no column {name!r} among {', '.join(columns) or 'none'}; set data.answer_column")
    return [str(value) for value in columns[name]]


class _Worker:
    """One process and what it is busy with: `task` is the number of its request, None when it has none."""

    def __init__(self, kind: str):
        # A fresh interpreter, not a fork: the trainer runs the threads of JAX, whose locks a fork would copy.
        # Its own session keeps Ctrl-C away from it and lets a kill reach whatever it has started itself.
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "logra_jax.rl.grading", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.getenv("PYTHONPATH"))))},
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.task: int | None = None
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self._received = b""

    def send(self, task: int, request: dict[str, Any], seconds: float) -> None:
        self.task, self.deadline = task, time.monotonic() + seconds + KILL_AFTER
        message = json.dumps({**request, "seconds": seconds}, default=str).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):  # it died; the end of its output says so
            self.input.write(message)
            self.input.flush()

    def receive(self) -> dict[str, Any] | None:
        """The reply once complete, None before, {"error": ..} from an ended process. Call when readable."""
        data = os.read(self.output.fileno(), 1 << 20)
        self._received += data
        if self._received.endswith(b"\n"):
            reply, self._received = json.loads(self._received), b""
            return reply
        return None if data else {"error": "the grading process ended", "ended": True}

    def close_input(self) -> None:
        """Asks the process to end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self.input.close()

    def end(self, patience: float = 0.0) -> None:
        """Lets the process end by itself for `patience` seconds, then kills it and its children."""
        self.close_input()
        if patience:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        if self.process.returncode is None:  # its number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()


class _Pool:
    """Up to `size` workers of one kind; a request that hangs or kills its worker costs that request alone."""

    def __init__(self, kind: str, size: int, timeout_s: float):
        self._kind, self.size, self._timeout_s = kind, size, timeout_s
        self._workers: list[_Worker] = []
        self._stillborn = 0  # workers in a row that ended before they were ready
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def start(self, count: int) -> None:
        """Starts workers until there are `count`; does not wait for them."""
        if not self._finalizer.alive:
            raise RuntimeError("this grader is closed")
        while len(self._workers) < count:
            self._workers.append(_Worker(self._kind))

    def wait_ready(self) -> None:
        """Starts one worker and waits until it has imported what it grades with; UserError when it cannot."""
        self.start(1)
        self._serve([], [], math.inf, until_ready=True)

    def run(self, requests: list[dict[str, Any]], seconds: float = math.inf) -> list[dict[str, Any]]:
        """One reply per request, in order; {"late": True} for those not done `seconds` from now."""
        self.start(min(self.size, len(requests)))
        replies: list[dict[str, Any]] = [{"late": True}] * len(requests)
        try:
            self._serve(requests, replies, time.monotonic() + seconds)
        except BaseException:
            # An interrupted worker would answer the next call with this call's replies.
            for worker in [w for w in self._workers if w.task is not None]:
                self._drop(worker)
            raise
        return replies

    def _serve(
        self,
        requests: list[dict[str, Any]],
        replies: list[dict[str, Any]],
        deadline: float,
        until_ready: bool = False,
    ) -> None:
        waiting = list(range(len(requests)))[::-1]
        once: set[int] = set()  # requests that already lost a worker
        with selectors.DefaultSelector() as selector:
            watched: set[_Worker] = set()
            while True:
                for worker in self._workers:
                    if worker.ready and worker.task is None and waiting:
                        task = waiting.pop()
                        worker.send(task, requests[task], self._timeout_s)
                pending = [w for w in self._workers if w.task is not None or not w.ready]
                if not (waiting or any(w.task is not None for w in pending) or (until_ready and pending)):
                    return
                for worker in watched.difference(self._workers):  # first, as new pipes may reuse their numbers
                    selector.unregister(worker.output)
                for worker in set(self._workers).difference(watched):
                    selector.register(worker.output, selectors.EVENT_READ, worker)
                watched = set(self._workers)
                patience = min(deadline, *(w.deadline for w in pending), math.inf) - time.monotonic()
                for key, _ in selector.select(max(0.0, patience)):
                    self._receive(key.data, replies, waiting, once)
                now = time.monotonic()
                for worker in [w for w in self._workers if w in pending and now > min(w.deadline, deadline)]:
                    if not worker.ready and now > worker.deadline:
                        raise UserError(f"reward.kind {self._kind}: a worker took {START_SECONDS} s to start")
                    if worker.task is not None:
                        self._drop(worker)  # its reply stays {"late": True}
                if now > deadline:
                    return
                self.start(max(min(self.size, len(self._workers) + len(waiting)), int(until_ready)))

    def _receive(self, worker: _Worker, replies: list[dict[str, Any]], waiting: list[int], once: set[int]) -> None:
        reply = worker.receive()
        if reply is None:
            return
        if not worker.ready:
            if "error" not in reply:
                worker.ready, self._stillborn = True, 0
                return
            self._drop(worker)
            self._stillborn += 1
            # One that was killed while it started (the system was out of memory, say) is replaced.
            if "ended" in reply and worker.process.returncode < 0 and self._stillborn < MAX_STILLBORN:
                return
            raise UserError(f"reward.kind {self._kind} cannot be used: {reply['error']}")
        task, worker.task = worker.task, None
        if "ended" in reply:
            self._drop(worker)
            # The request may be innocent of the first death (the system was out of memory, say).
            if task is not None and task not in once:
                once.add(task)
                waiting.append(task)
                return
        if task is not None:
            replies[task] = reply

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def close(self) -> None:
        self._finalizer()


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.close_input()
    while workers:
        workers.pop().end(patience=0.5)
