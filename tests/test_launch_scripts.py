"""scripts/launch.sh and scripts/slurm.sh, with a stand-in for the interpreter and for SLURM's commands."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
MEMBER = f"""#!{sys.executable}
import os, signal, sys, time
name = os.environ["JAX_PROCESS_ID"]
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
print(os.environ["JAX_COORDINATOR_ADDRESS"], os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_LOCAL_DEVICE_IDS"],
      flush=True)
print(*sys.argv[1:], file=sys.stderr, flush=True)
if "deaf" in sys.argv:
    time.sleep(0.5)
if "fail=" + name in sys.argv:
    sys.exit(7)
if "end" not in sys.argv:
    time.sleep(60)
"""


@pytest.fixture
def launch(tmp_path):
    """Starts launch.sh with three stand-ins; none of them outlives the test."""
    (tmp_path / "member").write_text(MEMBER)
    (tmp_path / "member").chmod(0o755)
    started = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # bash cannot trap what its parent ignores

    def start(*arguments):
        more = {"PYTHON": str(tmp_path / "member"), "PORT": "1234", "END_AFTER": "1"}
        command = ["bash", str(SCRIPTS / "launch.sh"), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | more)
        started.append(process)
        return process

    yield start
    signal.signal(signal.SIGINT, before)
    for process in started:
        process.kill()
        process.communicate()


def test_every_process_is_told_its_place(launch):
    process = launch("3", "--config", "my file.yaml", "end")
    lines = process.communicate(timeout=50)[0].splitlines()
    assert process.returncode == 0
    assert sorted(lines) == sorted(
        line
        for i in range(3)
        for line in (f"[{i}] 127.0.0.1:1234 3 {i}", f"[{i}] -u -m logra_jax.train --config my file.yaml end")
    )


def test_one_that_fails_ends_all(launch):
    began = time.monotonic()
    process = launch("2", "fail=1")
    process.communicate(timeout=50)
    assert process.returncode == 7
    assert time.monotonic() - began < 30  # the other one sleeps for 60 s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(number, launch):
    process = launch("2")
    for _ in range(4):
        process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=50)
    assert process.returncode == 128 + number


def test_no_end_is_missed_among_signals(launch):
    process = launch("3", "deaf", "end", "fail=1")
    for _ in range(6):
        process.stdout.readline()
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(1e-3)  # bash itself crashes where its traps interrupt each other without end
    assert process.returncode == 7


@pytest.mark.parametrize("count", ["0", "two", ""])
def test_the_number_of_processes_comes_first(count, launch):
    process = launch(count, "steps=3")
    assert process.communicate(timeout=50)[0] == ""
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("code", "state", "restarts", "queued"),
    [
        (143, "RUNNING", "0", True),
        (143, "CANCELLED", "0", False),
        (3, "RUNNING", "1", False),
        (0, "RUNNING", "1", False),
    ],
)
def test_a_job_is_queued_again_at_its_time_limit(code, state, restarts, queued, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").touch()
    for name, text in (("srun", f'echo "$@"; exit {code}'), ("squeue", f"echo {state}"), ("scontrol", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    more = {"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": restarts, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPTS / "slurm.sh"), "--overwrite", f"out={tmp_path / 'out'}", "steps=3"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more, timeout=50)
    assert done.returncode == code
    started, *after = done.stdout.splitlines()
    wanted = f"--overwrite out={tmp_path}/out steps=3" if restarts == "0" else f"out={tmp_path}/out steps=3 --resume"
    assert started.endswith(f"-u -m logra_jax.train {wanted}")
    assert after == (["requeue 42"] if queued else [])


@pytest.mark.parametrize("more", [[], ["out="]])
def test_a_job_that_could_not_be_resumed_is_refused(more, tmp_path):
    (tmp_path / "srun").write_text("#!/bin/sh\ntouch started\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "run.yaml").write_text("out: here\n")
    command = ["bash", str(SCRIPTS / "slurm.sh"), "--config", "run.yaml", *more]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | path, timeout=50)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: give out=FOLDER on the command line" in done.stderr
    assert not (tmp_path / "started").exists()
