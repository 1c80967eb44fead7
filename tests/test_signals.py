"""The first signal is noticed at the next check, the second ends the process."""

import os
import signal
import subprocess
import sys

import pytest

from logra_jax.signals import StopFlag, Stopped


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_first_signal_stops_at_the_next_check(number, code):
    before = signal.getsignal(number)
    with StopFlag() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        with pytest.raises(Stopped, match=signal.Signals(number).name) as stopped:
            stop.check()
    assert stopped.value.code == code
    assert signal.getsignal(number) is before


def test_second_signal_leaves_at_once():
    code = (
        "import os, signal, time; from logra_jax.signals import StopFlag\n"
        "with StopFlag() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('saving', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "    print('too late')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 143
    assert done.stdout == "saving\n"
    assert "SIGINT: stopping at the next safe point" in done.stderr
