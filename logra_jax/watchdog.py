"""Ends a process that makes no progress, so that a hang costs a deadline and not a night."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from pathlib import Path

HUNG = 4  # exit code
GRACE = 30.0  # seconds until a process that cannot even run this thread is ended by the C library, with code 1


class Watchdog:
    """Active while used as a context; `beat` it wherever something has got done.

    When `seconds` pass without a beat, the stacks of all threads go to standard error and into `file`, and the
    process leaves with code 4. 0 seconds: never.
    """

    def __init__(self, seconds: float, file: Path | None = None) -> None:
        """file: where the stacks are kept as well, if its folder is there by then."""
        self._seconds, self._file = seconds, file
        self._last = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """Begin to count from 0 again."""
        self._last = time.monotonic()
        if self._seconds:
            # The thread below needs the interpreter's lock, which whatever hangs may hold.
            faulthandler.dump_traceback_later(self._seconds + GRACE, exit=True, file=2)

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self.beat()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
            self._thread.join()

    def _watch(self) -> None:
        while (left := self._last + self._seconds - time.monotonic()) > 0:
            if self._end.wait(left):
                return
        text = (
            f"error: no progress for {self._seconds:g} s (processes.hang_s): this process is given up. Raise the "
            "setting if a rollout, an evaluation or a compilation may take longer; else see where it hangs\n"
        )
        os.write(2, text.encode())
        faulthandler.dump_traceback(2)
        if self._file is not None:
            with contextlib.suppress(OSError), self._file.open("w") as file:
                faulthandler.dump_traceback(file)
        os._exit(HUNG)
