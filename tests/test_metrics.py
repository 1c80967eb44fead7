"""What a run reports survives kills, odd numbers, odd texts and a broken Weights & Biases."""

import io
import json
import math
import re
import resource
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from logra_jax.errors import UserError
from logra_jax.metrics import METRICS, MetricsWriter, draw_curves, progress_line, read_rows

PNG = b"\x89PNG\r\n\x1a\n"


def row(step: int, **more):
    return {"step": step, "reward/mean": 0.5, "kl/predicted": 1e-3, "response/length": 12.0} | more


def writer(out, **settings):
    stream = io.StringIO()
    return MetricsWriter(out, steps=10, stream=stream, **settings), stream


def strict(text: str):
    """JSON as the standard has it, without NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_rows_are_valid_json_in_the_order_given(tmp_path):
    metrics, _ = writer(tmp_path)
    metrics.write(row(0, bad=math.nan, worse=-math.inf, array=np.float32(0.5), count=np.int64(3)))
    lines = (tmp_path / METRICS).read_text().splitlines()  # before close: every row is flushed
    metrics.close()
    found = strict(lines[0])
    assert list(found) == [
        "step",
        *[key for key in row(0) if key != "step"],
        "bad",
        "worse",
        "array",
        "count",
    ]
    assert (found["bad"], found["worse"], found["array"], found["count"]) == (None, None, 0.5, 3)


@pytest.mark.parametrize(
    "line",
    ["{", "\0", "[1]", "null", '{"reward/mean": 1}', '{"step": 0.5}', '{"step": 0, "a": "b"}', '{"step": 0, "a": NaN}'],
)
def test_what_is_no_row_is_named(tmp_path, line):
    (tmp_path / METRICS).write_text(f'{{"step": 0, "a": null}}\n\n{line}\n{{"step": 2}}')
    with pytest.raises(UserError, match=f"{METRICS}: line 3 is no row of metrics"):
        read_rows(tmp_path / METRICS)


def test_a_metric_is_one_number(tmp_path):
    metrics, _ = writer(tmp_path)
    with pytest.raises(ValueError, match="one number"):
        metrics.write(row(0, wrong=np.zeros(2)))
    metrics.close()


@pytest.mark.parametrize("torn", ['{"step": 4, "rew', '{"step": 4}', ""])
def test_resume_drops_later_rows_and_a_torn_line(tmp_path, torn):
    metrics, _ = writer(tmp_path)
    for step in range(4):
        metrics.write(row(step, run=1))
    metrics.close()
    with (tmp_path / METRICS).open("a") as file:
        file.write(torn)
    metrics, _ = writer(tmp_path, resume_step=2)
    assert [r["step"] for r in read_rows(tmp_path / METRICS)] == [0, 1]
    metrics.write(row(2, run=2))
    metrics.close()
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [(strict(line)["step"], strict(line)["run"]) for line in lines] == [(0, 1), (1, 1), (2, 2)]
    assert not list(tmp_path.glob("*.tmp"))


def test_new_run_starts_an_empty_file(tmp_path):
    for _ in range(2):
        metrics, _ = writer(tmp_path)
        metrics.write(row(0))
        metrics.close()
    assert len(read_rows(tmp_path / METRICS)) == 1


def test_curves_are_a_picture_of_the_curves_that_exist(tmp_path):
    path, picture = tmp_path / METRICS, tmp_path / "curves.png"
    widths = []
    for extra in (
        {},
        {"kl/realized": None, "kl/budget": 2e-3, "entropy": 1.0, "eval/accuracy": 0.5, "eval/updates": 0},
    ):
        path.write_text("".join(json.dumps(row(step) | extra) + "\n" for step in range(3)))
        assert draw_curves(path, picture) == picture
        data = picture.read_bytes()
        assert data[:8] == PNG
        widths.append(int.from_bytes(data[16:20], "big"))
    assert widths[1] == pytest.approx(widths[0] * 5 / 3, rel=0.01)  # reward, KL, length; then two panels more
    assert [entry.name for entry in tmp_path.glob("*.png")] == ["curves.png"]


def test_no_curve_no_picture(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 0, "other": 1.0, "reward/mean": null}\n')
    assert draw_curves(tmp_path / METRICS, tmp_path / "curves.png") is None
    assert not (tmp_path / "curves.png").exists()


def test_zero_kl_does_not_break_the_logarithmic_axis(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 0, "kl/predicted": 0.0}\n{"step": 1, "kl/predicted": 0.0}\n')
    assert draw_curves(tmp_path / METRICS, tmp_path / "curves.png") is not None


def test_interrupted_run_has_curves_as_well(tmp_path):
    metrics, _ = writer(tmp_path)
    metrics.write(row(0))
    metrics.close()
    assert (tmp_path / "curves.png").read_bytes()[:8] == PNG


def test_progress_line():
    numbers = row(11) | {"time/rollout_s": 0.25, "time/update_s": 0.5, "eval/accuracy": 0.75}
    line = progress_line(11, 80, numbers, 62.4)
    expected = "update 12/80  reward 0.500  KL 1.0e-03  length 12.0  accuracy 0.750  0.75 s  1:02 left"
    assert line == expected
    assert progress_line(0, 80, {}, 3 * 3600 + 61) == "update 1/80  3:01:01 left"


def test_plain_text_without_a_terminal(tmp_path):
    metrics, stream = writer(tmp_path)
    metrics.write(row(0))
    metrics.write(row(1))
    metrics.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["update 1/10", "update 2/10"]
    assert "\x1b" not in stream.getvalue()


def test_progress_off(tmp_path):
    metrics, stream = writer(tmp_path, progress=False)
    metrics.write(row(0))
    metrics.close()
    assert stream.getvalue() == ""


def test_samples_are_shown_as_they_are(tmp_path):
    metrics, stream = writer(tmp_path)
    metrics.show_samples(20, [("[bold]x[/]", "[red]\n\x1b[2J" + "y" * 1000 + "END", 1.0), ("[/nope]", "", math.nan)])
    metrics.close()
    text = stream.getvalue()
    assert "[bold]x[/]" in text
    assert "[red]\\n\\x1b[2J" in text
    assert "\x1b" not in text
    assert "END" in text
    assert "y" * 500 not in text
    assert "[/nope]" in text
    assert "after 20 updates, reward 1" in text


def test_tensorboard_files(tmp_path):
    """Records are length (8 bytes), its checksum (4), an event, its checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    metrics, _ = writer(tmp_path, tensorboard=True, resume_step=3)
    metrics.write(row(3, bad=math.nan))
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, events = file.read_bytes(), []  # before close: every row is flushed
    while data:
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    metrics.close()
    version, start, numbers = events
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (3, SessionLog.START)
    assert numbers.step == 3
    found = {value.tag: value.simple_value for value in numbers.summary.value}
    assert found["reward/mean"] == 0.5
    assert math.isnan(found["bad"])
    assert found.keys() == row(3, bad=0).keys() - {"step"}


def test_a_full_disk_is_an_error_and_no_standstill(tmp_path):
    metrics, _ = writer(tmp_path, tensorboard=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            list(map(metrics.write, map(row, range(100))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        metrics.close()


class FakeWandb(types.ModuleType):
    """Stands in for the package; raises in the call named by `broken`."""

    def __init__(self, broken: str = "", key: str | None = None):
        super().__init__("wandb")
        self.broken, self.calls = broken, []
        self.api = types.SimpleNamespace(api_key=key)

    def _call(self, name, *args, **settings):
        if name == self.broken:
            raise ConnectionError("no network")
        self.calls.append((name, args, settings))
        return self

    def init(self, **settings):
        return self._call("init", **settings)

    def log(self, *args, **settings):
        self._call("log", *args, **settings)

    def finish(self):
        self._call("finish")


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_broken_wandb_is_one_warning(tmp_path, monkeypatch, capsys, broken):
    fake = FakeWandb(broken)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics, _ = writer(tmp_path, wandb="online")
    metrics.write(row(0))
    metrics.write(row(1))
    metrics.close()
    assert capsys.readouterr().err == "warning: Weights & Biases is off: ConnectionError: no network\n"
    assert len(read_rows(tmp_path / METRICS)) == 2


def test_missing_wandb_is_one_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    metrics, _ = writer(tmp_path, wandb="auto")
    metrics.close()
    assert capsys.readouterr().err.count("Weights & Biases is off") == 1


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("secret", "online")])
def test_wandb_gets_the_rows(tmp_path, monkeypatch, key, mode):
    fake = FakeWandb(key=key)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    metrics, _ = writer(tmp_path, wandb="auto", project="mine")
    metrics.write(row(3))
    metrics.close()
    names = [name for name, _, _ in fake.calls]
    assert names == ["init", "log", "finish"]
    assert fake.calls[0][2]["mode"] == mode
    assert fake.calls[0][2]["project"] == "mine"
    assert fake.calls[1] == ("log", ({k: v for k, v in row(3).items() if k != "step"},), {"step": 3})


def test_every_metric_is_explained():
    """docs/metrics.md has the keys that the sources write, and no others."""
    root = Path(__file__).parents[1]
    table = "".join(re.findall(r"^\|(.*?)\|", (root / "docs/metrics.md").read_text(encoding="utf-8"), re.MULTILINE))
    explained = {key for key in re.findall(r"`([^`]+)`", table) if not re.search("TASK|@K", key)}
    groups = {key.partition("/")[0] for key in explained if "/" in key}
    sources = [root / "logra_jax" / name for name in ("run.py", "train.py", "answers.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in [*sources, *(root / "logra_jax/rl").glob("*.py")])
    written = {key for key in re.findall(r'"([a-z]+/[a-z_]+)"', text) if key.partition("/")[0] in groups}
    assert explained >= written
    evaluation = {
        f"eval/{name}" for name in ("reward", "length", "cut_off", "dropped", "macro_accuracy")
    }  # of rl.evaluate.summarize
    assert explained - written - evaluation == {"step", "loss", "entropy"}
