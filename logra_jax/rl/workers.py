"""Processes that grade, and can be killed: a request that hangs or kills its worker costs that request alone."""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from logra_jax.errors import UserError

START_SECONDS = 120.0  # for a worker to import what it needs
MAX_STILLBORN = 3  # workers killed one after the other before they could work
KILL_AFTER = 0.5  # seconds past the worker's own alarm
ON_CPU_TIME = ("math", "reasoning_gym")  # kinds that compute and never wait: their limit is in CPU time
BUSY = 10  # seconds of a clock in which a worker of these must have got one of CPU time
HURRY = 0.1  # of the time limit, for the rest of a batch of which much was late


class Worker:
    """One process and what it is busy with: `task` is the number of its request, None when it has none."""

    def __init__(self, kind: str):
        self._on_cpu = kind in ON_CPU_TIME
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
        self.task, self.deadline = task, time.monotonic() + seconds * (BUSY if self._on_cpu else 1) + KILL_AFTER
        limit = {"cpu_seconds" if self._on_cpu else "seconds": seconds}
        message = json.dumps({**request, **limit}, default=str).encode() + b"\n"
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


class Pool:
    """Up to `size` workers of one kind, for requests of at most `timeout_s` seconds (of CPU time: ON_CPU_TIME) each."""

    def __init__(self, kind: str, size: int, timeout_s: float):
        self._kind, self.size, self.timeout_s = kind, size, timeout_s
        self._workers: list[Worker] = []
        self._stillborn = 0  # workers in a row that ended before they were ready
        self._finalizer = weakref.finalize(self, _end_all, self._workers)

    def start(self, count: int) -> None:
        """Starts workers until there are `count`; does not wait for them."""
        if not self._finalizer.alive:
            raise RuntimeError("this grader is closed")
        while len(self._workers) < count:
            self._workers.append(Worker(self._kind))

    def wait_ready(self) -> None:
        """Starts one worker and waits until it has imported what it grades with; UserError when it cannot."""
        self.start(1)
        self._serve([], [], math.inf, until_ready=True)

    def run(
        self, requests: list[dict[str, Any]], seconds: float = math.inf, full_limits: int | None = None
    ) -> list[dict[str, Any]]:
        """One reply per request, in order; {"late": True} for those not done `seconds` from now.

        full_limits: once so many were late, each of the rest has HURRY of the time limit.
        """
        self.start(min(self.size, len(requests)))
        replies: list[dict[str, Any]] = [{"late": True}] * len(requests)
        try:
            self._serve(requests, replies, time.monotonic() + seconds, full_limits=full_limits)
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
        full_limits: int | None = None,
    ) -> None:
        waiting = list(range(len(requests)))[::-1]
        late = 0
        once: set[int] = set()  # requests that already lost a worker
        with selectors.DefaultSelector() as selector:
            watched: set[Worker] = set()
            while True:
                for worker in self._workers:
                    if worker.ready and worker.task is None and waiting:
                        task = waiting.pop()
                        hurry = full_limits is not None and late >= full_limits
                        worker.send(task, requests[task], self.timeout_s * (HURRY if hurry else 1.0))
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
                    late += self._receive(key.data, replies, waiting, once)
                now = time.monotonic()
                for worker in [w for w in self._workers if w in pending and now > min(w.deadline, deadline)]:
                    if not worker.ready and now > worker.deadline:
                        raise UserError(f"reward.kind {self._kind}: a worker took {START_SECONDS} s to start")
                    if worker.task is not None:
                        late += 1
                        self._drop(worker)  # its reply stays {"late": True}
                if now > deadline:
                    return
                self.start(max(min(self.size, len(self._workers) + len(waiting)), int(until_ready)))

    def _receive(self, worker: Worker, replies: list[dict[str, Any]], waiting: list[int], once: set[int]) -> bool:
        """Take what a worker has to say; whether that is that its request was late."""
        reply = worker.receive()
        if reply is None:
            return False
        if not worker.ready:
            if "error" not in reply:
                worker.ready, self._stillborn = True, 0
                return False
            self._drop(worker)
            self._stillborn += 1
            # One that was killed while it started (the system was out of memory, say) is replaced.
            if "ended" in reply and worker.process.returncode < 0 and self._stillborn < MAX_STILLBORN:
                return False
            raise UserError(f"reward.kind {self._kind} cannot be used: {reply['error']}")
        task, worker.task = worker.task, None
        if "ended" in reply:
            self._drop(worker)
            if worker.process.returncode == -signal.SIGVTALRM:  # by its own limit
                return True  # its reply stays {"late": True}
            # The request may be innocent of the first death (the system was out of memory, say).
            if task is not None and task not in once:
                once.add(task)
                waiting.append(task)
                return False
        if task is not None:
            replies[task] = reply
        return "late" in reply

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.end()

    def close(self) -> None:
        self._finalizer()


def _end_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.close_input()
    while workers:
        workers.pop().end(patience=0.5)
