"""Stop requests: the first signal asks for a checkpoint at the next safe point, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Stopped(Exception):
    """Raised by `StopFlag.check` after a signal; `code` is the exit code, 128 + the signal's number."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.code = 128 + number


class StopFlag:
    """Set by SIGTERM or SIGINT while used as a context; `check` it in every loop that takes long.

        with StopFlag() as stop:
            for ...:
                stop.check()

    A compilation or a program on the device is not interrupted, so the delay is the longest time between two
    checks. The exit code is 143 after SIGTERM and 130 after SIGINT. Only the main thread may enter it.

    `agree` turns the number of a signal that has arrived, or 0, into the one to act on; several processes make
    it their largest.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self.agree: Callable[[int], int] = lambda number: number

    def check(self) -> None:
        """Raise Stopped if a signal has arrived."""
        if number := self.agree(self._signal or 0):
            raise Stopped(signal.Signals(number))

    def __enter__(self) -> StopFlag:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)  # atexit handlers would wait for the checkpoint that is being written
        self._signal = signal.Signals(number)
        # os.write, because the signal may have interrupted a print that holds the stream's lock
        text = f"\n{self._signal.name}: stopping at the next safe point; once more to leave without saving\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
