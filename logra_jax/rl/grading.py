"""The grading worker: one process, one request at a time. Imports no jax unless a reward function does.

Started by logra_jax.rl.reward as `python -m logra_jax.rl.grading KIND`, it talks JSON lines over the
pipes that were its stdin and stdout; whatever graded code prints goes nowhere. Requests and replies hold
plain values only:

    kind math: {"cpu_seconds": 5.0, "gold": text, "completion": text} -> {"score": 1.0}
        without a completion, whether the gold answer can be used -> {"score": 1.0}
    kind reasoning_gym: {"cpu_seconds": 5.0, "entry": text, "completion": text, "pattern": text} -> {"score": 1.0}
    otherwise: {"seconds": 5.0, "prompts": [..], "completions": [..], "columns": {..}} -> {"scores": [..]}

A reply is {"error": last line of the traceback and place} where the graded code raised, {"late": true} where
it took longer than allowed, {"bad_gold": reason} where the gold answer cannot be used, {"wrong_length": n}
where a function returned n numbers and not one per completion. `cpu_seconds` are those that this process has a
core for, so that a busy machine makes no answer late; `seconds` are those of a clock, as a function may wait for
others. Code that never comes back to Python is ended by the kernel, by this process's CPU time, or killed by the
other side of the pipe.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

MEMORY = 2 << 30  # bytes of address space for what checks single answers
GRACE = 0.5  # seconds past the limit for the alarm to be heard, before this process is ended


class OutOfTime(BaseException):
    """Raised by the alarm inside graded code; no Exception, so that its handlers do not swallow it."""


def main() -> None:
    """Serves requests until stdin ends."""
    kind = sys.argv[1]
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.set_int_max_str_digits(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes its workers
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.signal(signal.SIGPROF, _out_of_time)
    _sacrifice()
    try:
        grade = {"math": _math, "reasoning_gym": _task}.get(kind, lambda: _function(kind))()
    except Exception as error:
        _write(replies, {"error": _last_line(error)})
        return
    _write(replies, {"ready": True})
    for line in requests:
        request = json.loads(line)
        on_cpu = "cpu_seconds" in request
        _write(replies, _limited(grade, request, request.pop("cpu_seconds" if on_cpu else "seconds"), on_cpu))


def _math() -> Callable[[dict[str, Any]], dict[str, Any]]:
    from logra_jax.rl.math_answer import BadGold, check_gold, score

    _be_modest()

    def grade(request: dict[str, Any]) -> dict[str, Any]:
        try:
            if "completion" not in request:
                check_gold(request["gold"])
                return {"score": 1.0}
            return {"score": score(request["gold"], request["completion"])}
        except BadGold as error:
            return {"bad_gold": str(error)}

    return grade


def _task() -> Callable[[dict[str, Any]], dict[str, Any]]:
    from logra_jax.rl.verifier import make_verifier

    verify = make_verifier()
    _be_modest()
    return lambda request: {"score": verify(request["entry"], request["completion"], request["pattern"])}


def _be_modest() -> None:
    """Silence, and a limit on memory."""
    import logging
    import resource
    import warnings

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with contextlib.suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _function(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    module, _, name = kind.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # functions in the current directory
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{kind} is not callable")

    def grade(request: dict[str, Any]) -> dict[str, Any]:
        scores = function(request["prompts"], request["completions"], request["columns"])
        scores = [None if score is None else float(score) for score in scores]
        if len(scores) != len(request["completions"]):
            return {"wrong_length": len(scores)}
        return {"scores": scores}

    return grade


def _limited(
    grade: Callable[[dict[str, Any]], dict[str, Any]], request: dict[str, Any], seconds: float, on_cpu: bool
) -> Any:
    """The reply to one request; the alarm repeats, since a bare `except` may swallow the first."""
    clock = signal.ITIMER_PROF if on_cpu else signal.ITIMER_REAL
    # Nothing handles this one, so it ends the process. A function may use all cores at once.
    signal.setitimer(signal.ITIMER_VIRTUAL, (seconds + GRACE) * (1 if on_cpu else os.cpu_count() or 1))
    try:
        signal.setitimer(clock, seconds, 0.2)
        try:
            return grade(request)
        finally:
            signal.setitimer(clock, 0.0)
    except OutOfTime:
        return {"late": True}
    except (Exception, SystemExit) as error:
        return {"error": _last_line(error)}
    finally:
        signal.setitimer(clock, 0.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _out_of_time(signum: int, frame: Any) -> None:
    raise OutOfTime


def _sacrifice() -> None:
    """Out of memory, the kernel should end this process and not the trainer (Linux only)."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _last_line(error: BaseException) -> str:
    """What was raised, and the innermost line of it in a file of the current directory: the user's own."""
    text = str(error).strip().splitlines()
    line = f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return f"{line} ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else line


def _is_own(filename: str) -> bool:
    path = os.path.abspath(filename)
    installed = "site-packages" in path or path == os.path.abspath(__file__)
    return path.startswith(os.path.abspath("") + os.sep) and os.path.isfile(path) and not installed


def _write(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
