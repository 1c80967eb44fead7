"""Runs that are stopped at any of their stop checks, and what must not depend on it."""

import signal
from pathlib import Path

import numpy as np

import logra_jax.build
from logra_jax import train
from logra_jax.checkpoint import read_arrays
from logra_jax.metrics import MetricsWriter, read_rows
from logra_jax.signals import StopFlag, Stopped


class Interrupted:
    """What the tests look at: the trainer at work, and where it asks whether to stop."""

    trainer: train.Trainer
    stop_at: int | None = None  # number of the check that is answered with yes
    passed: list


def watch(monkeypatch):
    """Records trainers and stop checks; builds each jitted update once for all runs of a test."""
    seen = Interrupted()
    seen.passed = []
    build, programs, init, check = logra_jax.build.make_update, [], train.Trainer.__init__, StopFlag.check

    def make_update(*args, **kwargs):
        programs.append(build(*args, **kwargs)) if not programs else None
        return programs[0]

    def remember(self, *args):
        init(self, *args)
        seen.trainer, seen.passed = self, []

    def answer(self):
        check(self)
        progress = seen.trainer.progress
        seen.passed.append((progress.step, progress.pending is not None))
        if seen.stop_at == len(seen.passed):
            raise Stopped(signal.SIGTERM)

    monkeypatch.setattr(logra_jax.build, "make_update", make_update)
    monkeypatch.setattr(train.Trainer, "__init__", remember)
    monkeypatch.setattr(StopFlag, "check", answer)
    monkeypatch.setattr(MetricsWriter, "draw", lambda self: None)  # takes longer than all the rest
    return seen


def result(out, progress):
    """Everything that must not depend on interruptions, as comparable values."""
    out = Path(out).resolve()
    arrays = {k: np.asarray(v) for k, v in read_arrays(out / "checkpoints" / str(progress.step), "").items()}
    rows = [
        {k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens/s"}
        for row in read_rows(out / "metrics.jsonl")
    ]
    model = {path.name: path.read_bytes() for path in (out / "hf").iterdir()}
    return arrays, rows, (progress.step, progress.consumed, progress.baseline), model


def assert_same(got, wanted):
    assert got[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        np.testing.assert_array_equal(got[0][name], value, err_msg=name)
        assert got[0][name].dtype == value.dtype
    assert got[1:] == wanted[1:]
