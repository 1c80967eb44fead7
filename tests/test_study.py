"""The scripts of long runs and of the study: what they decide, with runs that are made up."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from logra_jax.config import load_config, to_yaml
from logra_jax.rl.tokenizer import load_tokenizer

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def study(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    import study

    a = study.Cell("a", (), study.rates(1e-3, 3e-3))
    cells = (a, study.Cell("b", ("optimizer.refresh=0",), like="a"))
    monkeypatch.setattr(study, "BLOCKS", ((("multiply",), 2, cells),))
    monkeypatch.setattr(study, "CELLS", {cell.name: cell for cell in cells})
    monkeypatch.setattr(study, "TASKS", {"multiply": study.TASKS["multiply"]})
    monkeypatch.setattr(study, "RESULTS", tmp_path / "study" / "results.jsonl")
    monkeypatch.setattr(study, "commit", lambda: "0")
    return study


@pytest.fixture
def long_run(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import long_run

    return long_run


class Trained:
    """In place of a process: what a run of three updates would leave."""

    def __init__(self, arguments, folder, lock):
        config = load_config(None, [item for item in arguments if "=" in item])
        accuracy = 0.5 + config.optimizer.learning_rate + config.seed / 1000
        folder.mkdir()
        (folder / "config.yaml").write_text(to_yaml(config))
        rows = [{"step": i, "reward/mean": 0.5, "kl/realized": 1e-4, "kl/predicted": 1e-4} for i in range(3)]
        rows = [row | {f"time/{part}_s": 1.0 for part in ("rollout", "reward", "update")} for row in rows]
        rows[0] |= {"eval/accuracy": 0.25, "eval/updates": 0}
        rows[-1] |= {"eval/accuracy": accuracy, "eval/updates": 3}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def wait(self):
        return 0


def test_every_run_once_and_step_sizes_from_another_seed(study, monkeypatch, tmp_path):
    started = []

    def start(arguments, folder, lock):
        started.append(folder.name)
        return Trained(arguments, folder, lock)

    monkeypatch.setattr(study, "start", start)
    only = study.Job("multiply", "a", "optimizer.learning_rate=0.001", study.TUNING)
    with study.mine(tmp_path / "runs" / only.folder) as lock:
        assert lock is not None
        study.run("", float("inf"), tmp_path / "runs")  # all but what another process has in hand
    assert len(started) == 1
    study.run("", float("inf"), tmp_path / "runs")
    assert len(started) == len(set(started)) == 2 + 2 * 2
    done = study.read_results()
    reported = {(job.cell, job.choice, job.seed) for job in done if job.seed != study.TUNING}
    assert reported == {(cell, "optimizer.learning_rate=0.003", seed) for cell in "ab" for seed in (1, 2)}
    assert {line["seconds"] for line in done.values()} == {9.0}
    study.run("", float("inf"), tmp_path / "runs")
    assert len(started) == 6
    monkeypatch.setattr(study, "COMMON", (*study.COMMON, "steps=3"))  # other settings are other runs
    assert not study.read_results()


def test_no_run_is_started_that_would_be_late(study, monkeypatch, tmp_path):
    monkeypatch.setattr(study, "start", Trained)
    study.run("", 0.0, tmp_path / "runs")
    assert not study.read_results()


def test_runs_of_other_weights_are_not_mixed_in(study, monkeypatch, tmp_path):
    monkeypatch.setattr(study, "start", Trained)
    study.run("seed-100", float("inf"), tmp_path / "runs")
    lines = [json.loads(line) | {"model": "0" * 12} for line in study.RESULTS.read_text().splitlines()]
    study.RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit, match=r"'multiply' in .* start from 000000000000"):
        study.run("", float("inf"), tmp_path / "runs")
    assert len(study.read_results()) == len(lines)


def test_a_run_of_other_settings_is_not_gone_on_with(study, monkeypatch, tmp_path):
    monkeypatch.setattr(study, "start", Trained)
    job = next(study.jobs({}))
    folder = tmp_path / "runs" / job.folder
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        to_yaml(load_config(study.ROOT / job.arguments[1], [*job.arguments[2:], "steps=9"]))
    )
    with pytest.raises(SystemExit, match="begun with other settings"):
        study.run("", float("inf"), tmp_path / "runs")
    assert not study.read_results()


def test_a_second_checkpoint_takes_the_choices_of_the_first(study, monkeypatch):
    monkeypatch.setattr(study, "BLOCKS", ((("again",), 1, tuple(study.CELLS.values())),))
    monkeypatch.setattr(study, "TASKS", study.TASKS | {"again": ()})
    monkeypatch.setattr(study, "FIRST", {"again": "multiply"})
    lower, higher = study.CELLS["a"].tries
    tuned = {
        study.Job("multiply", "a", choice, study.TUNING): {"accuracy": a, "sampled reward": 0}
        for choice, a in ((lower, 0.7), (higher, 0.6))
    }
    assert list(study.jobs({})) == list(tuned)
    assert list(study.jobs(tuned))[2:] == [study.Job("again", cell, lower, 1) for cell in "ab"]


def test_difference_in_pooled_deviations(study):
    import study_tables

    mine, theirs = [0.80, 0.84], [0.85, 0.87, 0.92]
    squares = 2 * 0.02**2 + 0.03**2 + 0.01**2 + 0.04**2
    assert study_tables.against(mine, theirs) == f"-0.060 ({-0.06 / (squares / 3) ** 0.5:+.1f})"
    assert study_tables.against(mine, theirs[:1]) == ""


def test_runs_of_an_earlier_choice_are_left_out(study, monkeypatch):
    import study_tables

    monkeypatch.setattr(study_tables, "CELLS", study.CELLS)
    lower, higher = study.CELLS["a"].tries

    def done(*jobs):
        return {
            study.Job("multiply", cell, choice, seed): {"accuracy": a, "sampled reward": 0}
            for cell, choice, seed, a in jobs
        }

    first = [("a", lower, study.TUNING, 0.6), ("a", lower, 1, 0.1), ("b", lower, 1, 0.2), ("b", higher, 1, 0.3)]
    assert study_tables.accuracies("multiply", "a", done(*first)) == []  # a try is missing
    both = [*first, ("a", higher, study.TUNING, 0.7), ("a", higher, 2, 0.4)]
    assert study_tables.accuracies("multiply", "a", done(*both)) == [0.4]
    assert study_tables.accuracies("multiply", "b", done(*both)) == [0.3]


def test_held_out_accuracy_is_the_mean_of_tasks_where_there_are_any(long_run):
    rows = [{"step": 0, "eval/accuracy": 0.5, "eval/updates": 0}, {"step": 1, "eval/accuracy": 0.75, "eval/updates": 2}]
    run = long_run.Finished(Path(), load_config(None), rows)
    assert long_run.held_out_accuracy(run) == {0: 0.5, 2: 0.75}
    rows[1]["eval/macro_accuracy"] = 0.625
    assert long_run.held_out_accuracy(run) == {2: 0.625}


def test_deepest_fall_is_between_windows(long_run):
    assert long_run.deepest_fall([i / 100 for i in range(100)]) == 0
    # a single bad update weighs a fiftieth; a bad window counts also where a worse start lies before it
    rewards = [0.1] * 60 + [0.8] * 80 + [0.0] + [0.8] * 60 + [0.5] * 50 + [0.7] * 50
    assert long_run.deepest_fall(rewards) == pytest.approx(0.3)


def test_the_verdict(long_run, monkeypatch, tmp_path):
    """A run of 60 updates and an unbroken one of its first 10; then with what each item of the verdict is there for."""
    arrays = {name: {"a": np.ones(2, np.float32), "b": np.zeros(3)} for name in ("long-10", "10")}
    monkeypatch.setattr("logra_jax.checkpoint.read_arrays", lambda folder, prefix: arrays[folder.name])
    kl = ("kl/realized", "kl/predicted", "kl/budget")

    def judge(change=lambda rows: None, steps=60):
        for name, count in (("long", 60), ("long-unbroken", 10)):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / "config.yaml").write_text(to_yaml(load_config(None, [f"steps={steps}"])))
            rows = [{"step": i, "reward/mean": i / 100, **dict.fromkeys(kl, 1e-4)} for i in range(count)]
            rows = [row | {f"time/{part}_s": len(name) for part in ("rollout", "reward", "update")} for row in rows]
            rows[0] |= {"eval/accuracy": 0.25, "eval/updates": 0}
            rows[-1] |= {"eval/accuracy": 0.5, "eval/updates": count} if name == "long" else {}
            if name == "long":
                change(rows)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return long_run.judge(tmp_path / "long", 10, [3])

    found, verdict = judge()
    assert all(verdict.values())
    assert found["accuracy"] == [0.25, 0.5]
    assert found["sampled reward, first and last 50"] == pytest.approx([0.245, 0.345])
    assert found["bits"] == {"updates": 10, "arrays": 2, "other metrics": [], "other arrays": []}

    def no(**arguments):
        return [name for name, yes in judge(**arguments)[1].items() if not yes]

    def later(key, value):
        return lambda rows: [row.update({key: value}) for row in rows[10:]]

    assert no(steps=61) == ["all updates"]
    assert no(change=lambda rows: rows[-1].update({"eval/accuracy": 0.25})) == ["accuracy rises"]
    assert no(change=later("reward/mean", 0.0)) == ["reward rises"]
    assert no(change=later("kl/realized", 1.3e-4)) == ["KL as predicted"]
    assert no(change=later("kl/realized", 0.7e-4)) == ["KL as predicted"]
    assert no(change=lambda rows: rows[9].update({"loss": 1.0})) == ["same bits"]
    assert no(change=lambda rows: rows[10].update({"loss": 1.0})) == []
    arrays["10"] = {"a": np.ones(2, np.float32), "b": -np.zeros(3)}  # equal, and not the same bits
    found, verdict = judge()
    assert not verdict["same bits"]
    assert found["bits"]["other arrays"] == ["b"]


def test_moments_to_kill_follow_from_the_seed(long_run):
    plan = long_run.moments(1100, 200, 5, 0)
    assert plan == long_run.moments(1100, 200, 5, 0) != long_run.moments(1100, 200, 5, 1)
    places = [place for place, _ in plan]
    assert places == sorted(places)
    assert sum(place < 200 for place in places) >= 2
    assert all(0 < place < 1100 and 0 <= wait < 1 for place, wait in plan)


def test_percentiles(long_run):
    assert long_run.percentiles(list(range(101))) == [5, statistics.median(range(101)), 95]


def test_phrases_of_questions_are_tokens(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    import make_demo
    import make_tiny

    questions = [f"Solve for x: {i} + x = {i + 3}. Give the result only." for i in range(make_tiny.COMMON)]
    tokenizer = make_tiny.make_tokenizer(questions)
    assert make_tiny.phrases(questions) == ["Give the result only.", "Solve for"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(make_demo.TOKENIZER_CONFIG))
    (tmp_path / "config.json").write_text(json.dumps(make_demo.HF_CONFIG))
    loaded = load_tokenizer(tmp_path)
    for text in (questions[7], "#4/7 Solve", *questions[-2:]):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == loaded.decode(ids) == text
        assert loaded(text)["input_ids"] == ids  # as a run reads it
    assert len(tokenizer.encode(questions[7]).ids) == len(" x: 7 + x = 10. ") + 2
