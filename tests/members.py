"""Processes that are one run, one CPU device each, and what must not depend on their number."""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from logra_jax.checkpoint import read_arrays
from logra_jax.metrics import read_rows

HANGS = 900.0  # seconds after which a process is taken for one that hangs; no machine is so slow


def variables(address, count, number):
    found = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": count, "JAX_PROCESS_ID": number}
    return {name: value for name, value in found.items() if value is not None}


PORTS = itertools.count(97 * os.getpid())  # where this process looks: others begin elsewhere


def free_port():
    """One below those that are given to whoever asks for any, as nobody else may take it before it is used."""
    while True:
        port = 20_000 + next(PORTS) % 10_000
        with suppress(OSError), socket.create_server(("", port)):
            return port


@contextmanager
def starting() -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """A function that starts the processes of one run; none of them outlives the context."""
    started = []

    def start(*command, count=2):
        port = free_port()
        processes = [
            subprocess.Popen(
                [sys.executable, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ
                | variables(f"localhost:{port}", "2", str(number))
                | {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"},
            )
            for number in range(count)
        ]
        started.extend(processes)
        return processes

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(processes):
    """Exit code, output and errors of each."""
    said = [process.communicate(timeout=HANGS) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def outcome(out, step):
    """Everything that must not depend on the number of processes."""
    arrays = {k: np.asarray(v) for k, v in read_arrays(Path(out, "checkpoints", str(step)).resolve(), "").items()}
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens/s"}
        for row in read_rows(Path(out, "metrics.jsonl"))
    ]
    return arrays, rows, {path.name: path.read_bytes() for path in Path(out).glob("hf/*")}


def assert_same(got, wanted):
    assert got[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        np.testing.assert_array_equal(got[0][name], value, err_msg=name)
    assert got[1:] == wanted[1:]
