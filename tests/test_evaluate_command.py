"""The evaluation command: the same numbers as in training, without what only training needs."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from logra_jax import cli, evaluate, train
from logra_jax.config import load_config
from logra_jax.errors import UserError
from logra_jax.metrics import read_rows
from logra_jax.rl.rollout import Sampler

ROWS = [f"{a}*{b}=" for a in (8, 12, 345) for b in range(2, 8)]  # of `small_run`


def test_same_accuracy_as_the_run_that_made_the_model(command_settings, capsys):
    assert train.main([*command_settings, "steps=2"]) == 0
    last = {k: v for k, v in read_rows("out/metrics.jsonl")[-1].items() if k.startswith("eval/")}
    assert last["eval/accuracy"] > 0
    assert last.pop("eval/updates") == 2
    capsys.readouterr()
    assert evaluate.main(["--config", "out/config.yaml", "model.path=out/hf"]) == 0
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    found = json.loads(line)
    low, high = found.pop("ci95")["accuracy"]
    assert {f"eval/{name}": value for name, value in found.items()} == last
    # One answer each: the interval of 12 independent trials, whose ends lie Z standard errors from the share.
    for end in (low, high):
        assert abs(end - found["accuracy"]) == pytest.approx(1.959964 * np.sqrt(end * (1 - end) / 12), rel=1e-5)
    assert said.err.count("prompt ") == 3  # log.samples
    assert "optimizer" not in said.err


def test_several_answers_without_training_data_kept_in_a_folder(command_settings, capsys, monkeypatch):
    def no_optimizer(*args, **kwargs):
        raise AssertionError("evaluation needs no optimizer")

    monkeypatch.setattr("logra_jax.build.make_optimizer", no_optimizer)
    argv = [*command_settings, "data.train=absent.jsonl", "rollout.prompts=1000", "eval.samples=3"]
    assert evaluate.main([*argv, "log.samples=36", "--out=new/kept"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    rewards = [float(line.split()[1]) for line in said.err.splitlines() if line.startswith("reward ")]
    right = np.reshape(rewards, (12, 3)).sum(axis=1)
    wrong = 3 - right
    assert found["accuracy"] == pytest.approx(np.mean(rewards))
    # Of three answers, two of one's choice miss if both are among the wrong ones: C(wrong, 2) of 3 choices.
    expected = (1 - wrong / 3, 1 - wrong * (wrong - 1) / 2 / 3, right > 0)
    for k, chances in enumerate(expected, start=1):
        assert found[f"pass@{k}"] == pytest.approx(np.mean(chances))
    assert 0 < found["pass@1"] < found["pass@3"]
    # Who has an answer at all, a 7, is right: one is enough for the majority.
    assert found["maj@3"] == found["pass@3"]
    assert found["ci95"].keys() == {"accuracy", "pass@1", "pass@2", "pass@3", "maj@3"}
    assert all(low < found[name] < high for name, (low, high) in found["ci95"].items())

    assert {file.name for file in Path("new/kept").iterdir()} == {"generations.jsonl", "metrics.json", "settings.yaml"}
    assert json.loads(Path("new/kept/metrics.json").read_text()) == found
    assert load_config("new/kept/settings.yaml") == cli.parse([*argv, "log.samples=36"], "", "").config
    rows = [json.loads(line) for line in Path("new/kept/generations.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == rewards
    assert [(row["id"], row["sample"]) for row in rows] == [(i, n) for i in range(12) for n in range(3)]
    for row in rows:
        assert row["prompt"] == ROWS[row["id"]]
        assert row["reward"] == ("7" in row["completion"]) == (row["answer"] == "7")
        assert row["task"] is None
    assert np.mean([row["length"] for row in rows]) == pytest.approx(found["length"])
    assert np.mean([row["stopped"] for row in rows]) == pytest.approx(1 - found["cut_off"])
    # Nothing is overwritten, and that is said before anything is sampled.
    with pytest.raises(UserError, match="--out new/kept is not empty"):
        evaluate.main([*argv, "--out=new/kept"])
    assert list(Path().iterdir()) == [Path("new")]


def test_a_folder_that_cannot_be_made(command_settings):
    Path("file").write_text("")
    with pytest.raises(UserError, match="--out file/kept cannot be written"):
        evaluate.main([*command_settings, "--out=file/kept"])


def test_running_out_of_memory_is_explained(command_settings, monkeypatch, capsys):
    def exhausted(*args, **rest):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.\n more")

    monkeypatch.setattr(Sampler, "generate", exhausted)
    dense = ["optimizer.name=adamw", "optimizer.update_ratio=null", "optimizer.learning_rate=1e-4"]
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: evaluate.main([*command_settings, "optimizer.b1=null", "optimizer.refresh=1", *dense]))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: a device ran out of memory: Out of memory allocating 12 bytes. What helps: lower ")
    assert "rollout.max_new_tokens=6" in said
    for of_training in ("--resume", "optimizer", "remat", "micro_batch"):
        assert of_training not in said


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.eval=null", "data.eval is not set"),
        ("data.eval=absent.jsonl", "data.eval=absent.jsonl: no such file"),
        ("model.path=absent", "model.path=absent: no folder with a config.json"),
        ("reward.kind=absent_module:f", "reward.kind absent_module:f cannot be used"),
        ("data.answer_column=key", "has no column 'key'"),
    ],
)
def test_bad_input(setting, message, command_settings, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: evaluate.main([*command_settings, setting]))
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
