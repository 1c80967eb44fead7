"""What a run reports: metrics.jsonl, TensorBoard, Weights & Biases, a progress line, curves.png, samples."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from logra_jax.errors import UserError

METRICS = "metrics.jsonl"
# One panel each; a curve is drawn if some row has its key.
PANELS: tuple[tuple[str, bool, tuple[str, ...]], ...] = (
    ("reward", False, ("reward/mean",)),
    ("evaluation accuracy", False, ("eval/accuracy", "eval/macro_accuracy")),
    ("KL per update", True, ("kl/realized", "kl/predicted", "kl/budget")),
    ("answer length (tokens)", False, ("response/length",)),
    ("entropy (nats)", False, ("entropy",)),
)


class MetricsWriter:
    """Writes one row of numbers per update to every place asked for.

    A row has `step` (the number of updates before this one) and any other keys. Where present, the
    progress line uses `reward/mean`, `kl/predicted`, `response/length`, `eval/accuracy` and `time/..._s`, the
    curves those of PANELS, and `eval/updates` (updates before the evaluation) is where `eval/...` belongs.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        steps: int,
        tensorboard: bool = False,
        wandb: str = "off",
        project: str = "logra_jax",
        progress: bool = True,
        resume_step: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        """Open the files in `out`; rows of `resume_step` and later, left by an earlier run, are dropped.

        steps: of the whole run, for the time left. stream: for progress and samples; None: standard output.
        """
        self._out, self._steps, self._resumed = Path(out), steps, resume_step
        self._out.mkdir(parents=True, exist_ok=True)
        self._path = self._out / METRICS
        drop_rows(self._path, resume_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._progress = progress
        self._began = time.monotonic()
        self._undrawn = False
        self._board = Board(self._out / "tensorboard", resume_step) if tensorboard else None
        self._wandb = _start_wandb(wandb, project, self._out)

    def write(self, row: Mapping[str, Any]) -> None:
        """Record the numbers of one update; NaN and infinite values become null in metrics.jsonl."""
        step = int(row["step"])
        numbers = {key: _plain(value) for key, value in row.items() if key != "step"}
        clean = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
        self._file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")
        self._file.flush()
        self._undrawn = True
        if self._board is not None:
            self._board.write(step, numbers)
        if self._wandb is not None:
            try:
                self._wandb.log(numbers, step=step)
            except Exception as error:
                self._wandb = None
                _warn_wandb(error)
        if self._progress:
            self._show(step, numbers)

    def _show(self, step: int, row: Mapping[str, float]) -> None:
        done = max(step + 1 - self._resumed, 1)
        left = (time.monotonic() - self._began) / done * (self._steps - step - 1)
        line = progress_line(step, self._steps, row, left)
        if not self._console.is_terminal:
            self._console.print(Text(line), soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def show_samples(self, step: int, rows: Iterable[tuple[Any, ...]], limit: int = 400) -> None:
        """Print rows that begin with (prompt, answer, reward), each text cut to `limit` characters, as it is."""
        for prompt, answer, reward, *_ in rows:
            # Text, not str: square brackets in an answer are no markup
            self._console.print(Text(f"-- after {step} updates, reward {reward:g}"), soft_wrap=True)
            self._console.print(Text(f"   prompt  {_printable(prompt, limit)}"), soft_wrap=True)
            self._console.print(Text(f"   answer  {_printable(answer, limit)}"), soft_wrap=True)

    def draw(self) -> Path | None:
        """Draw curves.png from all rows so far; returns its path, None if there is no curve."""
        self._undrawn = False
        return draw_curves(self._path, self._out / "curves.png")

    def close(self) -> None:
        """End the progress line, close everything, and draw what has not been drawn."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            try:
                self._wandb.finish()
            except Exception as error:
                _warn_wandb(error)
            self._wandb = None
        if self._undrawn:
            self.draw()


class NoMetrics:
    """Takes the place of a MetricsWriter where another process writes."""

    def write(self, row: Mapping[str, Any]) -> None: ...
    def show_samples(self, step: int, rows: Iterable[tuple[Any, ...]]) -> None: ...
    def draw(self) -> None: ...
    def close(self) -> None: ...


class Board:
    """TensorBoard events, one file per start of a run.

    Written by the calling thread: the thread of tensorboardX's own SummaryWriter dies on a full disk, and the
    next number given to it waits for ever.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open a new file in `folder`; what earlier files say of `first_step` and later is hidden."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder.mkdir(exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        self._file.write_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add the numbers of a step, NaN and infinite ones included."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._file.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(value: Any) -> float | int:
    number = np.asarray(value)
    if number.shape != ():
        raise ValueError(f"a metric is one number, found shape {number.shape}")
    return number.item()


def _printable(text: str, limit: int) -> str:
    """One line without control characters (an answer may hold terminal commands), cut in its middle."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def progress_line(step: int, steps: int, row: Mapping[str, float], left: float) -> str:
    """Such as "update 12/80  reward 0.512  KL 1.9e-03  length 24.1  0.84 s  1:02 left", of the keys present.

    left: seconds to the end of the run.
    """
    parts = [f"update {step + 1}/{steps}"]
    shown = (
        ("reward", "reward/mean", ".3f"),
        ("KL", "kl/predicted", ".1e"),
        ("length", "response/length", ".1f"),
        ("accuracy", "eval/accuracy", ".3f"),
    )
    parts += [f"{name} {row[key]:{form}}" for name, key, form in shown if key in row]
    if times := [value for key, value in row.items() if key.startswith("time/")]:
        parts.append(f"{sum(times):.2f} s")
    minutes, seconds = divmod(round(left), 60)
    clock = f"{minutes}:{seconds:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    return "  ".join([*parts, f"{clock} left"])


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a last line that a kill cut off is left out. Raises UserError for what is no row."""
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int or not all(map(_is_plain, row.values())):
            raise UserError(f"{path}: line {number} is no row of metrics (a step and numbers): take it out, or mend it")
        rows.append(row)
    return rows


def _is_plain(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def drop_rows(path: str | Path, step: int) -> None:
    """Rewrite a metrics file without the rows of `step` and later, in one rename. Absent files are fine."""
    path = Path(path)
    if not path.exists():
        return
    rows = [row for row in read_rows(path) if row["step"] < step]
    fresh = path.with_suffix(".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def place_of(row: Mapping[str, Any], key: str) -> float:
    """Updates that were done before a row's value of `key` was measured."""
    at_evaluation = key.startswith("eval/") and "eval/updates" in row
    return row["eval/updates"] if at_evaluation else row["step"]


def draw_curves(metrics: str | Path, picture: str | Path) -> Path | None:
    """Draw the known curves of a metrics file as PNG; None, and no file, if it has none."""
    rows = read_rows(metrics)
    panels = []
    for title, log, keys in PANELS:
        curves = {key: [(place_of(r, key), r[key]) for r in rows if r.get(key) is not None] for key in keys}
        if any(curves.values()):
            panels.append((title, log, {key: points for key, points in curves.items() if points}))
    if not panels:
        return None
    # Figure without pyplot: no window system, no global state, whatever backend the user has set
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    for axis, (title, log, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for key, points in curves.items():
            # What is measured now and then gets marks that show where.
            axis.plot(*zip(*points, strict=True), "o-" if len(points) < len(rows) else "-", ms=3, lw=1.2, label=key)
        if log and any(value > 0 for points in curves.values() for _, value in points):
            axis.set_yscale("log", nonpositive="mask")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("update")
        axis.grid(alpha=0.3)
        if len(curves) > 1:
            axis.legend(fontsize=8)
    save_figure(figure, picture)
    return Path(picture)


def save_figure(figure: Any, picture: str | Path) -> None:
    """Write a matplotlib Figure as PNG, in one rename."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    fresh = Path(picture).with_suffix(".tmp.png")
    FigureCanvasAgg(figure).print_figure(fresh, dpi=110)
    fresh.replace(picture)


def _start_wandb(mode: str, project: str, out: Path) -> Any:
    """A Weights & Biases run, or None; whatever goes wrong there is a warning, never the end of a run."""
    if mode == "off":
        return None
    try:
        import wandb

        if mode == "auto":
            mode = "online" if wandb.api.api_key else "offline"
        # A resumed run is another one of the same group: an offline run cannot be continued.
        return wandb.init(project=project, group=out.resolve().name, dir=str(out), mode=mode)
    except Exception as error:
        _warn_wandb(error)
        return None


def _warn_wandb(error: Exception) -> None:
    print(f"warning: Weights & Biases is off: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
