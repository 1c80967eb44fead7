"""A run that was stopped, killed or failed, and then resumed, is the run that nothing has happened to."""

import errno
import gc
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from interrupted import assert_same, result
from members import HANGS

import logra_jax.build
import logra_jax.run
from logra_jax import checkpoint, cli, distributed, train
from logra_jax.checkpoint import Checkpoints, flatten, read_arrays, read_note, steps
from logra_jax.errors import UserError
from logra_jax.metrics import MetricsWriter, read_rows

VARIANTS = {
    "logra": """
        steps=3 eval.every=2 advantage.estimator=running_baseline advantage.failure_reward=-.01""",
    "adamw": """
        optimizer.name=adamw optimizer.update_ratio=null optimizer.learning_rate=.01 optimizer.others=adamw
        loss.updates_per_batch=2 loss.clip_low=.2 loss.clip_high=.2 optimizer.max_grad_norm=1 checkpoint.every=0
        loss.token_budget=24
        optimizer.warmup=2 optimizer.schedule=cosine""",
}


@pytest.fixture
def lenient():
    """optax.adamw raises a float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def another_sampler(monkeypatch):
    """A sampler that computes otherwise than the trainer, so that there is a mismatch to take off the budget."""
    generate = logra_jax.run.Run.generate

    def off_by_a_little(self, prompts, update):
        rollout = generate(self, prompts, update)
        return rollout._replace(logprobs=rollout.logprobs + 1e-4)

    monkeypatch.setattr(logra_jax.run.Run, "generate", off_by_a_little)


@pytest.mark.parametrize("variant", VARIANTS)
def test_stopped_at_every_point(variant, command_settings, seen, another_sampler, lenient):
    argv = [*command_settings, *VARIANTS[variant].split()]
    assert train.main([*argv, "out=whole"]) == 0
    wanted, points = result("whole", seen.trainer.progress), seen.passed
    names = wanted[0].keys()
    assert any("opt_state" in name for name in names)
    assert wanted[0]["mismatch"] > 0
    assert wanted[2][1] == {"logra": 12, "adamw": 8}[variant]  # prompts of 3 and of 2 batches
    # 3 checks per batch of prompts, 3 in each evaluation: before it and after its 2 batches.
    assert len(points) == {"logra": 3 * 3 + 3 * 3, "adamw": 2 * 3 + 3 * 3}[variant]

    start, began_at = [], 0  # of a chain of resumed runs, each stopped one point further on
    for number, point in enumerate(points):
        # A run that starts from a checkpoint passes all the points again that led to the same checkpoint.
        seen.stop_at = number - began_at + 1
        assert train.main([*argv, *start]) == 143
        progress = seen.trainer.progress
        assert (progress.step, progress.pending is not None) == point
        meta = read_note(Path("out/checkpoints") / str(progress.step))["meta"]
        start, began_at = ["--resume"], points.index((meta["step"], meta["pending"] is not None))
    seen.stop_at = None
    assert train.main([*argv, "--resume"]) == 0
    assert_same(result("out", seen.trainer.progress), wanted)


def test_the_score_of_a_step_that_was_saved_before_its_evaluation(command_settings, seen):
    argv = [*command_settings, *VARIANTS["logra"].split()]
    assert train.main([*argv, "out=whole"]) == 0
    seen.stop_at = next(i for i, point in enumerate(seen.passed, 1) if point == (2, True))
    assert train.main(argv) == 143
    assert read_note(Path("out/checkpoints/2"))["score"] is None
    seen.stop_at = None
    assert train.main([*argv, "--resume"]) == 0
    (wanted,) = (row["eval/accuracy"] for row in read_rows("out/metrics.jsonl") if row.get("eval/updates") == 2)
    note = read_note(Path("out/checkpoints/2"))
    assert (note["score"], note["meta"]["pending"]) == (wanted, None)


def test_more_steps_than_before(command_settings, seen, capsys):
    argv = [*command_settings, *VARIANTS["logra"].split(), "eval.every=1"]
    assert train.main([*argv, "out=whole", "steps=3"]) == 0
    wanted = result("whole", seen.trainer.progress)
    assert train.main([*argv, "steps=2"]) == 0
    capsys.readouterr()
    assert train.main([*argv, "steps=3", "--resume", "log.samples=0"]) == 0
    said = capsys.readouterr().out
    assert "note: steps was 2 before, and is 3 now" in said
    assert "note: log.samples was 3 before, and is 0 now" in said
    assert said.count("note: ") == 2
    assert_same(result("out", seen.trainer.progress), wanted)
    kept = (Path("out/config.yaml").read_bytes(), Path("out/metrics.jsonl").read_bytes())
    for setting, message in (
        ("steps=1", "3 updates are done already, more than steps=1"),
        ("optimizer.rank=5", "does not belong to a run with these settings"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.run(lambda more=setting: train.main([*argv, "steps=3", more, "--resume"]))
        assert message in capsys.readouterr().err
        assert (Path("out/config.yaml").read_bytes(), Path("out/metrics.jsonl").read_bytes()) == kept


def test_the_first_process_says_whether_there_is_a_checkpoint(command_settings, monkeypatch, capsys):
    argv = [*command_settings, "eval.every=0", "eval.before=false", "checkpoint.every=1", "checkpoint.keep_best=false"]
    assert train.main([*argv, "steps=1"]) == 0
    ask, look, asking = distributed.on_first, checkpoint.steps, []

    def on_first(action):
        asking.append(action)
        try:
            return ask(action)
        finally:
            asking.pop()

    monkeypatch.setattr(distributed, "on_first", on_first)
    # Any other process sees the folder as it was before.
    monkeypatch.setattr(checkpoint, "steps", lambda folder: look(folder) if asking else [])
    assert train.main([*argv, "steps=2", "--resume"]) == 0
    assert "resumed after 1 updates" in capsys.readouterr().out


def test_a_damaged_checkpoint(command_settings, seen, capsys):
    argv = [*command_settings, *VARIANTS["logra"].split(), "checkpoint.every=1"]
    assert train.main(argv) == 0
    wanted = result("out", seen.trainer.progress)
    with next(Path("out/checkpoints/3/state/d").iterdir()).open("r+b") as file:
        file.truncate(10)
    capsys.readouterr()
    assert train.main([*argv, "--resume"]) == 0
    said = capsys.readouterr()
    assert "3 is damaged and set aside" in said.err
    assert "resumed after 2 updates" in said.out
    assert_same(result("out", seen.trainer.progress), wanted)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_that_is_not_finite(variant, command_settings, seen, lenient, monkeypatch, capsys):
    argv = [*command_settings, *VARIANTS[variant].split()]
    honest, good = logra_jax.run.Run.update, {}

    def poisoned(self, state, batch, step):
        if step == 1:
            good.update(jax.device_get(flatten({"params": self.params(state)})))
            batch = batch._replace(advantages=batch.advantages * np.float32(np.nan))
        return honest(self, state, batch, step)

    with monkeypatch.context() as patch:
        patch.setattr(logra_jax.run.Run, "update", poisoned)
        assert train.main(argv) == 1
    said = capsys.readouterr()
    assert "update 1 was not finite (gradient norm nan" in said.err
    assert "done" not in said.out
    assert [row["step"] for row in read_rows("out/metrics.jsonl")] == [0]
    saved = read_arrays(Path("out/checkpoints/1").resolve(), "params.")
    assert saved.keys() == good.keys()
    assert all((np.asarray(saved[name]) == good[name]).all() for name in good)
    assert not Path("out/hf").exists()
    assert train.main([*argv, "--resume"]) == 0
    progress, last = seen.trainer.progress, {"logra": 3, "adamw": 4}[variant]
    assert [row["step"] for row in read_rows("out/metrics.jsonl")] == list(range(last))
    # The bad batch is left behind; where it was to serve one more update, another one does.
    assert (progress.step, progress.consumed) == (last, {"logra": 16, "adamw": 12}[variant])


def test_metrics_that_cannot_be_written(command_settings, seen, monkeypatch, capsys):
    argv = [*command_settings, *VARIANTS["logra"].split()]
    assert train.main([*argv, "out=whole"]) == 0
    wanted, write = result("whole", seen.trainer.progress), MetricsWriter.write

    def write_in_vain(self, row):
        if row["step"] == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "write", write_in_vain)
        with pytest.raises(SystemExit, match="2"):
            cli.run(lambda: train.main(argv))
    assert "error: out=out cannot be read or written: No space left on device\n" in capsys.readouterr().err
    assert steps(Path("out/checkpoints")) == [2]
    assert train.main([*argv, "--resume"]) == 0
    assert_same(result("out", seen.trainer.progress), wanted)


@pytest.fixture
def full_disk():
    """A function after which no file can grow past 4 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()  # what is left behind is to be complained of in this test, not in a later one


@pytest.mark.filterwarnings("ignore")  # of Orbax, which leaves coroutines behind
def test_a_disk_that_is_full(command_settings, seen, full_disk, monkeypatch, capsys):
    argv = [*command_settings, *VARIANTS["logra"].split(), "checkpoint.every=1"]
    assert train.main([*argv, "out=whole"]) == 0
    wanted = result("whole", seen.trainer.progress)
    save, limits = Checkpoints.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_in_vain(self, step, *args):
        self.wait()
        if step == 2:
            full_disk()
        save(self, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_in_vain)
        with pytest.raises(SystemExit, match="2"):
            cli.run(lambda: train.main(argv))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "the checkpoint of step 2 could not be written to" in said
    assert "Earlier checkpoints are untouched" in said
    assert steps(Path("out/checkpoints")) == [1]
    assert train.main([*argv, "--resume"]) == 0
    assert_same(result("out", seen.trainer.progress), wanted)


def start(argv, until):
    """A training process, once it has printed a line that matches `until`."""
    command = [sys.executable, "-m", "logra_jax.train", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if re.match(until, line):
            return process
    raise AssertionError(process.communicate()[1])


def test_processes_that_get_signals(command_settings, seen):
    argv = [*command_settings, *VARIANTS["logra"].split()]
    endless = [*argv, "steps=100000", "eval.every=0", "checkpoint.every=2", "eval.before=false"]
    starting = start([*endless, "out=starting"], "model ")
    starting.terminate()  # the first program is being compiled or loaded
    killed = start([*endless, "out=killed"], "update 5/")
    time.sleep(0.2 * np.random.default_rng().random())
    killed.kill()
    training = start([*endless, "out=training"], "update 2/")
    with pytest.raises(UserError, match="another run writes to out=training"):
        train.main([*argv, "out=training", "--resume"])
    training.terminate()
    for process, code in ((starting, 143), (training, 143), (killed, -9)):
        output, errors = process.communicate(timeout=HANGS)
        assert process.returncode == code
        assert "Traceback" not in errors + output
    assert "stopped by SIGTERM: saved after 0 updates; go on with --resume" in starting.communicate()[1]

    for out in ("starting", "training", "killed"):
        found = steps(Path(out, "checkpoints"))
        assert found == [0] if out == "starting" else found or out == "killed"
        # The interpreter of this process is another one, its programs are the same.
        more = ["eval.every=0", "eval.before=false", f"steps={max(found, default=0) + 2}"]
        assert train.main([*argv, *more, f"out={out}", "--resume"]) == 0
        assert train.main([*argv, *more, f"out=whole/{out}"]) == 0
        got, wanted = (result(o, seen.trainer.progress) for o in (out, f"whole/{out}"))
        assert_same(got, wanted)
