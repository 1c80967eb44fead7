"""Runs a command for as long as its standard input is open: `python keeper.py COMMAND...`. The standard library alone.

A server is started through it. However the trainer ends, by a signal that cannot be caught too, its end of the pipe is
closed then, and the command with all of its processes is ended from here. It ends as the command does.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

STOP_SECONDS = 10.0  # between asking the command to end and ending its group, this process included


def main() -> None:
    """Run the command; this process leads the group that it is in."""
    closed = threading.Event()
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())

    def watch() -> None:
        while os.read(0, 1):
            pass
        closed.set()
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    if closed.is_set():
        os.killpg(0, signal.SIGKILL)  # workers outlive their server
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
