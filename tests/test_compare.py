"""Tables over runs, from folders written here: every number is worked out by hand."""

import errno
import json
import math
from pathlib import Path

import pytest

from logra_jax.compare import FILES, main
from logra_jax.config import load_config, to_yaml
from logra_jax.errors import UserError


@pytest.fixture
def write(tmp_path):
    """Writes a run of 3 updates: accuracy 0.25, 0.5, then the last one; reward 0, 1, then the last one."""

    def write_(name: str, *settings: str, accuracy: float = 0.75, reward: float = 0.5, done: int = 3) -> str:
        folder = tmp_path / name
        folder.mkdir()
        config = load_config(None, ["steps=3", f"out={folder}", *settings])
        (folder / "config.yaml").write_text(to_yaml(config))
        rows = [
            {"step": 0, "reward/mean": 0, "kl/predicted": 1e-3, "eval/accuracy": 0.25, "eval/updates": 0},
            {"step": 1, "reward/mean": 1, "kl/predicted": 2e-3, "kl/realized": 1e-3, "eval/accuracy": 0.5},
            {"step": 2, "reward/mean": reward, "kl/predicted": 4e-3, "kl/realized": 6e-3, "eval/accuracy": accuracy},
        ]
        rows[1]["eval/updates"], rows[2]["eval/updates"] = 2, 3
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:done]))
        return str(folder)

    return write_


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_mean_and_deviation_over_seeds(write, tmp_path, capsys):
    runs = [write("a", "seed=0", accuracy=0.7), write("b", "seed=1", accuracy=0.9)]
    runs.append(write("c", "seed=0", "optimizer.rank=4", reward=0.2))
    out = tmp_path / "table"
    assert main([*runs, "--out", str(out), "--metric", "kl/predicted"]) == 0
    found = capsys.readouterr()
    head, _, first, second = cells(found.out)
    assert head[:3] == ["settings", "runs", "updates"]
    assert head[3:] == ["accuracy before", "accuracy", "sampled reward", "realised / predicted KL", "kl/predicted"]
    # Sample deviation of 0.7 and 0.9: sqrt(0.1^2 + 0.1^2). The last ten rewards are all three. KL: 0.5 and 1.5.
    assert math.isclose(math.sqrt(0.02), 0.141, abs_tol=5e-4)
    assert first == ["rank=16", "2", "3", "0.250 ± 0.000", "0.800 ± 0.141", "0.500 ± 0.000", "1.000 ± 0.000",
                     "0.004 ± 0"]  # fmt: skip
    assert second == ["rank=4", "1", "3", "0.250", "0.750", "0.400", "1.000", "0.004"]
    assert found.err == ""
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    numbers = json.loads((out / "compare.json").read_text())
    assert numbers["rank=16"]["figures"]["accuracy"] == [0.7, 0.9]
    assert numbers["rank=16"]["runs"] == runs[:2]
    assert (out / "compare.md").read_text() == found.out
    with pytest.raises(UserError, match=r"has compare\.md, compare\.json, compare\.png already"):
        main([*runs, "--out", str(out)])


def test_what_makes_runs_hard_to_compare_is_said(write, capsys):
    runs = [write("a", "seed=3"), write("b", "seed=3", done=2), write("c", "eval.max_prompts=7", "rollout.prompts=64")]
    main(runs)
    found = capsys.readouterr()
    for note in (
        f"{runs[1]} has done 2 of 3 updates",
        "prompts=32, max_prompts=None: runs with the same seed are no independent ones",
        "eval.max_prompts differs: accuracies cannot be compared",
        "runs have seen from 512 to 1,536 answers",  # 2 updates of 256, 3 of 512
    ):
        assert f"note: {note}\n" in found.err
    first = cells(found.out)[2]
    assert first[:5] == ["prompts=32, max_prompts=None", "2", "2-3", "0.250 ± 0.000", "0.625 ± 0.177"]


def test_answers_that_dynamic_sampling_left_out_were_seen(write, capsys):
    runs = [write("a"), write("b", "rollout.dynamic_sampling=2")]
    file = Path(runs[1], "metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | {"rollout/prompts": 32 * (1 + i)}) + "\n" for i, row in enumerate(rows)))
    main(runs)
    assert "note: runs have seen from 768 to 1,536 answers\n" in capsys.readouterr().err  # 8 to each of 96 and 192


def test_settings_of_one_name_are_named_in_full(write, capsys):
    main([write("a"), write("b", "rollout.temperature=0.9", "eval.temperature=1", "eval.top_p=0.5")])
    found = capsys.readouterr()
    assert cells(found.out)[3][0] == "rollout.temperature=0.9, eval.temperature=1.0, top_p=0.5"
    for key in ("eval.temperature", "eval.top_p"):
        assert f"note: {key} differs: accuracies cannot be compared\n" in found.err


def test_a_figure_that_some_runs_lack(write, capsys):
    runs = [write("a", "seed=0"), write("b", "seed=1", done=1)]
    main(runs)
    line = cells(capsys.readouterr().out)[2]
    assert line[4] == "0.750 (of 1)"  # one update is done, and the evaluation was before it
    assert line[5] == f"0.250 ± {math.sqrt(0.125):.3f}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}", "{tmp}"], "no folder of a run: it has no config.yaml"),
        (["{a}", "{a}/."], "is named more than once"),
        (["{a}", "{empty}"], "its metrics.jsonl has no rows"),
        (["{a}", "{damaged}"], "damaged/metrics.jsonl: line 2 is no row of metrics"),
        (["{a}", "--out", "{a}/config.yaml"], "config.yaml cannot be written: "),
        (["{a}", "--metric", "eval/acuracy"], "no run has it; there are eval/accuracy, eval/updates, kl/predicted"),
    ],
)
def test_bad_input(write, tmp_path: Path, arguments, message):
    places = {"a": write("a"), "empty": write("empty", done=0), "tmp": str(tmp_path), "damaged": write("damaged")}
    metrics = Path(places["damaged"], "metrics.jsonl")
    metrics.write_bytes(b'{"step": 0}\n{"step": 1, "rew\n{"step": 2}\n')
    with pytest.raises(UserError, match=message):
        main([argument.format(**places) for argument in arguments])


@pytest.mark.parametrize("file", FILES)
def test_a_disk_that_is_full(write, tmp_path, monkeypatch, file):
    run, out, write_text = write("a"), tmp_path / "table", Path.write_text

    def full(self, *args, **rest):
        if self.name == file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(self, *args, **rest)

    monkeypatch.setattr(Path, "write_text", full)
    out.mkdir()
    (out / "compare.tmp.png").symlink_to("/dev/full")
    with pytest.raises(UserError, match=f"--out {out} cannot be written: .*No space left on device"):
        main([run, "--out", str(out)])
