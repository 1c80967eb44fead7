"""Time limits of graders that no load on the machine can miss: short where a request hangs, long for all others."""

from collections.abc import Callable
from typing import Any

import pytest

from logra_jax.rl.workers import Worker


def as_needed(monkeypatch: pytest.MonkeyPatch, hangs: Callable[[dict[str, Any]], object]) -> list[float]:
    """From now on a request that hangs gets 0.2 s and any other 100 s. Fills a list with what the pool gives them."""
    given, send = [], Worker.send

    def send_(self: Worker, task: int, request: dict[str, Any], seconds: float) -> None:
        given.append(seconds)
        send(self, task, request, 0.2 if hangs(request) else 100.0)

    monkeypatch.setattr(Worker, "send", send_)
    return given
