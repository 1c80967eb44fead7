"""Answers drawn one update ahead: whose weights they are of, and that a stop at any point changes nothing."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from interrupted import assert_same, result
from served import served
from test_train_vllm import Stand

import logra_jax.run
from logra_jax import cli, distributed, servers, train
from logra_jax.checkpoint import read_note
from logra_jax.config import load_config
from logra_jax.errors import UserError
from logra_jax.metrics import read_rows

AHEAD = """
steps=3 eval.every=2 eval.before=false eval.max_prompts=4 checkpoint.every=0 checkpoint.async=false loss.reference_kl=0
loss.importance_cap=2 rollout.engine=vllm rollout.staleness=1 vllm.drift_every=0
"""


class Watched(Stand):
    """Notes the versions at which it was asked for answers and given updates.

    hold: the version at which it hangs, until it is told to abort or a minute is over; held: whether it was told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.hold, self.held, self.aborted = [], None, [], threading.Event()

    def answer(self, path, body):
        if path == "/inference/v1/generate":
            self.asked.append(int(self.version))
            if int(self.version) == self.hold:
                self.held.append(self.aborted.wait(60))
        if path == "/pause" and self.hold is not None:
            self.aborted.set()
        return super().answer(path, body)


@pytest.fixture
def stand():
    stand = Watched()
    with served(lambda path, body: (200, stand.answer(path.partition("?")[0], body or {}))) as url:
        stand.url = url
        yield stand


@pytest.fixture
def argv(command_settings, stand, seen):
    return [*command_settings, *AHEAD.split(), f"vllm.urls=[{stand.url}]"]


def comparable(out, progress):
    """What must not depend on interruptions; a resumed run starts with all weights instead of factors."""
    arrays, rows, *others = result(out, progress)
    return arrays, [{k: v for k, v in row.items() if not k.startswith("sync/")} for row in rows], *others


def test_stopped_at_every_point(argv, stand, seen, capsys):
    assert train.main([*argv, "out=whole"]) == 0
    wanted, points = comparable("whole", seen.trainer.progress), seen.passed
    # 4 prompts for each of 3 updates. Update 1 learns from what the first weights gave, 2 from what those after it did.
    assert stand.asked == [0] * 8 + [1] * 4
    assert stand.calls == [0, (0, 1), (1, 2), (2, 3)]
    rows = read_rows("whole/metrics.jsonl")
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1]
    # At the start of each update, after the first answers, and before each update; in 2 evaluations.
    assert len(points) == 3 + 1 + 3 + 2 * 2
    start, began_at = [], 0
    for number, point in enumerate(points[:-2]):  # the last evaluation is like any other
        seen.stop_at = number - began_at + 1
        assert train.main([*argv, *start]) == 143
        progress = seen.trainer.progress
        assert (progress.step, progress.pending is not None) == point
        folder = Path("out/checkpoints") / str(progress.step)
        assert (folder / "host.npz").exists() == (0 < progress.step < 3)
        meta = read_note(folder)["meta"]
        start, began_at = ["--resume"], points.index((meta["step"], meta["pending"] is not None))
    seen.stop_at = None
    assert train.main([*argv, "--resume"]) == 0
    assert_same(comparable("out", seen.trainer.progress), wanted)
    assert "drawn again" not in capsys.readouterr().out


def test_a_checkpoint_is_read_with_other_settings(argv, stand, seen, capsys):
    seen.stop_at = 6  # at the start of the third update
    assert train.main([*argv, "eval.every=0"]) == 143
    assert seen.trainer.progress.step == 2
    seen.stop_at, asked = None, len(stand.asked)
    assert train.main([*argv, "--resume", "rollout.staleness=0", "steps=4"]) == 0
    assert "are drawn again: rollout.staleness is 0 now" in capsys.readouterr().out
    assert stand.asked[asked:] == [2] * 4 + [3] * 4
    assert [row["rollout/staleness"] for row in read_rows("out/metrics.jsonl")] == [0, 1, 0, 0]


def test_several_processes_cannot_draw_ahead(monkeypatch):
    settings = "rollout.engine=vllm vllm.urls=[http://h:1] rollout.staleness=1 loss.importance_cap=2"
    monkeypatch.setattr(distributed, "alone", lambda: False)
    with pytest.raises(UserError, match="for runs of one process"):
        servers.check(load_config(None, settings.split()), None, 8)


def test_what_fails_in_the_background_is_an_error_and_nothing_is_lost(argv, stand, monkeypatch, capsys):
    grade = logra_jax.run.Run.grade

    def fail(self, prompts, rollout):
        if threading.current_thread() is not threading.main_thread():
            raise UserError("no reward")
        return grade(self, prompts, rollout)

    with monkeypatch.context() as patch:
        patch.setattr(logra_jax.run.Run, "grade", fail)
        with pytest.raises(SystemExit, match="2"):
            cli.run(lambda: train.main(argv))
    assert "no reward" in capsys.readouterr().err
    assert read_note(Path("out/checkpoints/1"))["step"] == 1
    assert train.main([*argv, "--resume"]) == 0


def test_a_run_that_stops_itself_gives_up_what_is_being_drawn(argv, stand, monkeypatch, capsys):
    batch = logra_jax.run.Run.batch

    def spoilt(self, rollout, advantages, state):
        found = batch(self, rollout, advantages, state)
        return found._replace(advantages=found.advantages * np.float32("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(logra_jax.run.Run, "batch", spoilt)
        hang = logra_jax.run.Run.draw_ahead

        def draw(self, *args):
            stand.hold = 0
            hang(self, *args)
            while len(stand.asked) == 4:
                time.sleep(0.01)

        patch.setattr(logra_jax.run.Run, "draw_ahead", draw)
        assert train.main(argv) == train.FAILED
    assert "update 0 was not finite" in capsys.readouterr().err
    assert stand.held
    assert all(stand.held)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("answers")]


def test_servers_that_drift_are_given_all_weights(argv, stand, capsys):
    apply, hurt = stand.logra_apply, []

    def wrong(asked):
        found = apply(asked)
        if stand.calls[-1] == (1, 2):
            name = next(name for name in stand.weights if "up_proj" in name)
            stand.weights[name] = stand.weights[name] * np.float32(1.5)
            hurt.append(name)
        return found

    stand.logra_apply = wrong
    assert train.main([*argv, "vllm.drift_every=1", "eval.every=0"]) == 0
    assert hurt
    said = capsys.readouterr().err
    assert said.count("all weights are loaded again") == 1
    assert "after 2 updates" in said
    assert stand.calls == [0, (0, 1), (1, 2), 2, (2, 3)]
    drift = [row["sync/drift"] for row in read_rows("out/metrics.jsonl")]
    assert max(drift[:2]) < 1e-5 < 1e-4 < drift[2]


def test_servers_that_are_lost_meanwhile_get_no_weights_that_are_written_over(argv, stand, capsys):
    """All of them: their answers are drawn again under the next weights, and the run goes on one update ahead."""
    choice = stand.choice

    def aborted(j, sampling):
        ended = len(stand.asked) > 4 and stand.version == "0"  # not those of the first update
        return choice(j, sampling) | ({"finish_reason": "abort"} if ended else {})

    stand.choice = aborted
    assert train.main([*argv, "eval.every=0"]) == 0
    said = capsys.readouterr().err
    assert "the weights of version 0 are no longer there\nwarning: answers are drawn again" in said
    assert stand.calls == [0, 1, (1, 2), (2, 3)]
    assert stand.asked == [0] * 8 + [1] * 8
    assert [row["rollout/staleness"] for row in read_rows("out/metrics.jsonl")] == [0, 0, 1]
