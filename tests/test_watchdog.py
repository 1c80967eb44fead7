"""A process that makes no progress says where it hangs, and leaves."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from logra_jax import watchdog
from logra_jax.watchdog import Watchdog

# The watchdog's clock is the test's, so that a slow machine does not look like a hang. The real sleep lets it look.
HANGS = """
import sys, time, pathlib
from types import SimpleNamespace
from logra_jax import watchdog
now = 0.0
watchdog.time = SimpleNamespace(monotonic=lambda: now)
def hang_here():
    global now
    now += 2.0
    time.sleep(60)
with watchdog.Watchdog(1.0, pathlib.Path(sys.argv[1])) as beating:
    for _ in range(3):
        now += 0.75
        beating.beat()
    time.sleep(1.5)
    print("alive", flush=True)
    hang_here()
"""


def test_a_hang_is_ended(tmp_path):
    file = tmp_path / "stacks.txt"
    done = subprocess.run([sys.executable, "-c", HANGS, str(file)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 4
    assert done.stdout == "alive\n"
    assert "no progress for 1 s (processes.hang_s)" in done.stderr
    for text in (done.stderr, file.read_text()):
        assert "in hang_here" in text


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_one_that_ends_in_time_is_left_alone(seconds, tmp_path, monkeypatch):
    ends = []  # of the whole process, if the interpreter's lock is held
    stand_in = SimpleNamespace(
        dump_traceback_later=lambda *_, **__: ends.append(1), cancel_dump_traceback_later=ends.clear
    )
    monkeypatch.setattr(watchdog, "faulthandler", stand_in)
    with Watchdog(seconds, tmp_path / "stacks.txt") as watched:
        watched.beat()
        assert watched._thread.is_alive() == bool(ends) == bool(seconds)
    assert not watched._thread.is_alive()
    assert not ends
    assert list(tmp_path.iterdir()) == []
