"""Several processes that are one run: how they find each other, agree, share rows, and leave.

All processes take the same decisions from the same numbers. What one of them alone knows (a signal, a full disk,
the rewards of its rows) is exchanged where all of them pass: the functions `agree`, `on_first`, `from_first`,
`largest` and `collect` have to be called by all, in the same order. In a process that is alone they cost nothing.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from logra_jax.errors import SharedError, UserError

ADDRESS, COUNT, NUMBER = VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
FAILED, USER_ERROR, LOST = 1, 2, 3  # exit codes; LOST: of a process that the others have left alone
PATIENCE = 5.0  # seconds in which processes that fail together can still leave together
# Words of the errors that collectives raise when the process at the other end is gone. The libraries' names alone say
# nothing: they also raise for wrong usage and for memory.
_GONE = re.compile(
    r"coordination service|connection (reset|closed)|socket closed|heartbeat|"
    r"(gloo|nccl).*(remote|closed|reset|broken pipe|timed? ?out|abort|unreachable|no route|refused)",
    re.IGNORECASE | re.DOTALL,
)


class Member(NamedTuple):
    """A process's place in a run: address of process 0, number of processes, own number, own GPUs (None: all)."""

    coordinator: str
    processes: int
    number: int
    devices: tuple[int, ...] | None = None


def find(environment: Mapping[str, str]) -> Member | None:
    """What the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say, or those of `srun`.

    None for a process on its own. Inside an allocation of SLURM that is every process that was not started by
    srun with several tasks; JAX_NUM_PROCESSES=1 makes it so in any case. Raises UserError.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if given.get(COUNT) == "1":
        return None
    if given:
        return _from_variables(given)
    if _whole(environment, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return _from_slurm(environment)
    return None


def _from_variables(given: Mapping[str, str]) -> Member:
    if missing := [name for name in VARIABLES if name not in given]:
        raise UserError(
            f"{', '.join(given)} is set but {', '.join(missing)} is not: set all of {', '.join(VARIABLES)} for each "
            f"process, or {COUNT}=1 for one on its own"
        )
    count, number = _whole(given, COUNT), _whole(given, NUMBER)
    host, _, port = given[ADDRESS].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{ADDRESS}={given[ADDRESS]}: expected host:port, such as node1:12345")
    if count < 1 or not 0 <= number < count:
        raise UserError(f"{NUMBER}={number} and {COUNT}={count}: processes are numbered from 0 to {COUNT} - 1")
    return Member(given[ADDRESS], count, number)


def _from_slurm(environment: Mapping[str, str]) -> Member:
    """The member that `srun` has made of this process; the port follows from the numbers of job and step."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
    if missing := [name for name in needed if not environment.get(name)]:
        raise UserError(
            f"SLURM_STEP_NUM_TASKS is set but {', '.join(missing)} is not: start the processes by srun, or set "
            f"{COUNT}=1 for one on its own"
        )
    job, step, number, local = (_whole(environment, name) for name in needed[:4])
    node = re.match(r"([^,\[]+)(?:\[(\d+))?", environment["SLURM_STEP_NODELIST"])  # node[001-003,7],other
    assert node is not None
    tasks_here = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "")) or ["1"]
    # Tasks that see the same GPUs take one each; a task that is shown one of its own, or is alone, takes all it sees.
    own = re.fullmatch(r"[^,]+", environment.get("CUDA_VISIBLE_DEVICES", "")) is not None
    devices = None if own or int(tasks_here[0]) == 1 else (local,)
    return Member(
        f"{node[1]}{node[2] or ''}:{61440 + (job + step) % 4096}",
        _whole(environment, "SLURM_STEP_NUM_TASKS"),
        number,
        devices,
    )


def _whole(values: Mapping[str, str], name: str, default: str = "") -> int:
    text = values.get(name) or default
    if not text.isdecimal():
        raise UserError(f"{name}={text}: expected a whole number")
    return int(text)


def join(member: Member | None, *, join_s: float, silent_s: float) -> None:
    """Meet the other processes; before anything touches a device. Nothing to do for None.

    join_s: seconds to wait for the others; then this process leaves with code 2. silent_s: seconds without a sign
    of life after which a process counts as dead, and the others end themselves.
    """
    if member is None:
        return
    host, _, port = member.coordinator.rpartition(":")
    if member.number == 0:
        _check_port(int(port))
    else:
        try:
            socket.getaddrinfo(host, int(port))
        except OSError as error:
            raise UserError(f"{ADDRESS}={member.coordinator}: unknown host: {error.strerror}") from None
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # its handler of SIGTERM would replace ours
    # At a deadline of its own, jax would abort the process.
    deadline = threading.Timer(join_s, _not_met, (member, join_s))
    deadline.daemon = True
    deadline.start()
    jax.distributed.initialize(
        member.coordinator,
        member.processes,
        member.number,
        None if member.devices is None else list(member.devices),
        cluster_detection_method="deactivate",  # what counts is in the arguments
        initialization_timeout=int(join_s) + 60,
        heartbeat_timeout_seconds=max(int(silent_s), 1),
    )
    with _standard_output_to_errors():  # gloo prints there when it connects
        jax.device_count()
        largest(0)
    deadline.cancel()


def _check_port(port: int) -> None:
    """Refuse a port that is taken: jax would say no more than that its server did not start."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port}, where the processes meet, cannot be used: {error.strerror}") from None


def _not_met(member: Member, seconds: float) -> None:
    print(
        f"error: process {member.number} of {member.processes} did not meet the others at {member.coordinator} within "
        f"{seconds:g} s (processes.join_s): see whether all were started, and can reach that address",
        file=sys.stderr,
        flush=True,
    )
    os._exit(USER_ERROR)


@contextmanager
def _standard_output_to_errors() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def alone() -> bool:
    """Whether this process is the only one of its run. Needs no jax where none was imported."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized()


def number() -> int:
    """This process's number, from 0."""
    import jax

    return 0 if alone() else jax.process_index()


def first() -> bool:
    """Whether this is the process that writes."""
    return number() == 0


def _of_all(values: np.ndarray) -> np.ndarray:
    """What every process passes, stacked by process: ``[processes, ...]``; one shape and dtype for all."""
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(values, tiled=False)


def largest(value: int) -> int:
    """The largest of the processes' numbers."""
    return value if alone() else int(_of_all(np.array(value, np.int32)).max())


def agree(error: Exception | None) -> None:
    """Raise on all processes if one of them brings an error: there the error itself, elsewhere one that names it."""
    if alone():
        if error is not None:
            raise error
        return
    failed = np.flatnonzero(_of_all(np.array(error is not None, np.int32)))
    if error is not None:
        raise SharedError(str(error)) from error
    if failed.size:
        raise SharedError(f"process {failed[0]} failed; see what it has written")


def on_first(action: Callable[[], int | None]) -> int:
    """Let process 0 act while the others wait; its result on all (0 for None), or its error on all."""
    if alone():
        return action() or 0
    found, error = np.zeros(2, np.int32), None
    if first():
        try:
            found[1] = action() or 0
        except (UserError, OSError) as problem:
            found[0], error = True, problem
    failed, result = from_first(found)
    if failed:
        raise SharedError(str(error) if first() else "process 0 failed; see what it has written") from error
    return int(result)


def from_first(values: np.ndarray) -> np.ndarray:
    """What process 0 brings, on all; the others bring as much of anything."""
    return values if alone() else _of_all(values)[0]


def own_rows(count: int, process: int | None = None) -> slice:
    """The rows, of `count` that all processes hold, that one of them works on (None: this one): one equal block."""
    if alone():
        return slice(0, count)
    import jax

    mine, processes = jax.process_index() if process is None else process, jax.process_count()
    return slice(mine * count // processes, (mine + 1) * count // processes)


def collect(values: np.ndarray, count: int) -> np.ndarray:
    """All `count` rows, of which every process brings its `own_rows`."""
    if alone():
        return values
    import jax

    own = np.zeros((count, *values.shape[1:]), values.dtype)
    own[own_rows(count)] = values
    every = _of_all(own)
    return np.concatenate([every[i, own_rows(count, i)] for i in range(jax.process_count())])


def total(values: np.ndarray) -> np.ndarray:
    """The sum, over all processes, of the arrays that they bring, all of one shape."""
    return values if alone() else _of_all(values).sum(axis=0)


def leave(error: BaseException | None, code: int) -> None:
    """End a process that cannot go on, without waiting for others that may wait for it. Returns if it is alone.

    error: what it failed of, if that has not been reported yet.
    """
    if alone():
        return
    import jax

    if error is not None:
        if _GONE.search(str(error)):
            code = LOST
            text = str(error).strip().splitlines()[0]
            print(
                f"error: process {number()} has lost another one, which has ended or cannot be reached ({text}): see "
                "what that one has written. Checkpoints are untouched: start all processes again with --resume",
                file=sys.stderr,
            )
        else:
            traceback.print_exception(error)
    if code != LOST:
        # Where all fail alike they meet here once more, and leave in order; otherwise the others notice the end.
        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(PATIENCE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
