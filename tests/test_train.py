"""The training command from the command line to its files: what it writes, refuses, and survives."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import limits
import numpy as np
import pytest

from logra_jax import build, cli, train
from logra_jax.checkpoint import read_arrays, steps
from logra_jax.config import SETTINGS, load_config, to_yaml
from logra_jax.mesh import make_mesh
from logra_jax.metrics import read_rows
from logra_jax.models import load_hf

KEYS = """
step reward/mean response/length entropy grad/norm advantage/zero_share clip/share rows/dropped
kl/predicted kl/alpha kl/budget padding/share time/rollout_s time/reward_s time/update_s tokens/s
"""


@pytest.fixture
def base(command_settings):
    return command_settings


def read(argv):
    """The configuration of a command line."""
    return cli.parse(argv, "train", "").config


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(argv, capsys):
    """The message with which the command leaves with code 2."""
    with pytest.raises(SystemExit) as left:
        cli.run(lambda: train.main(argv))
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_a_run_writes_what_it_says(base, capsys):
    base = [*base, "eval.every=3"]
    assert train.main(base) == 0
    out = Path("out")
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row.keys() >= set(KEYS.split())
        assert all(value is not None for value in row.values())
        assert ("kl/realized" in row) == (row["step"] % 2 == 0)
        assert row["kl/predicted"] <= row["kl/budget"] * 1.001
        assert 1 <= row["response/length"] <= 6
    # Evaluated before training, after update 3 (row 2), and after the last update.
    assert {row["step"]: row["eval/updates"] for row in rows if "eval/accuracy" in row} == {0: 0, 2: 3, 3: 4}
    assert any(row["reward/mean"] > 0 and row["grad/norm"] > 0 for row in rows)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(out / "config.yaml") == read(base)
    assert steps(out / "checkpoints") == [2, 4]
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "config.yaml", "curves.png", "hf", "metrics.jsonl",
    ]  # fmt: skip

    model, params = load_hf(out / "hf")
    saved = read_arrays(out.resolve() / "checkpoints" / "4", "params.")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert len(leaves) == len(saved)
    for path, leaf in leaves:
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(saved[name]))
    _, before = load_hf(re.search(r"model.path=(.*)", " ".join(base))[1].split()[0])
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), params, before)
    assert moved["layers"]["mlp"]["up_proj"]["kernel"]
    assert not moved["embed_tokens"]["embedding"]
    assert model.logits(params, np.array([[3, 4]])).shape == (1, 2, 32)

    said = capsys.readouterr()
    assert said.err == ""
    assert "optimizer  logra rank 4, b1 0.5, ratio 0.03, KL budget" in said.out
    assert "update 4/4  reward" in said.out
    assert said.out.splitlines()[-1].startswith("done: 4 updates")

    kept = files(out)
    assert train.main([*base, "--resume"]) == 0  # there is nothing left to do
    assert files(out) == kept


def test_an_existing_folder_is_not_touched(base, capsys):
    out = Path("out")
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "out=out is not empty" in refused(base, capsys)
    assert "out=out holds no config.yaml, so it is no run" in refused([*base, "--overwrite"], capsys)
    assert "--resume: there is no run in out=out" in refused([*base, "--resume"], capsys)
    assert "--resume: there is no run in out=other" in refused([*base, "out=other", "--resume"], capsys)
    assert "out=out/notes.txt is a file" in refused([*base, "out=out/notes.txt"], capsys)
    assert files(out) == {Path("notes.txt"): b"mine"}
    (out / "config.yaml").write_text("steps: 1\n")
    assert "out=out is not empty" in refused(base, capsys)
    # What a run reads must not lie in what it writes, and what is wrong is found before anything is deleted.
    (out / "rows.jsonl").write_text('{"prompt": "1*1=", "answer": "7"}\n')
    assert "data.eval=out/rows.jsonl lies in out=out" in refused(
        [*base, "data.eval=out/rows.jsonl", "--overwrite"], capsys
    )
    assert "rank 999" in refused([*base, "optimizer.rank=999", "--overwrite"], capsys)
    assert len(files(out)) == 3


def test_overwrite_replaces_a_run(base, monkeypatch):
    monkeypatch.setattr(train, "train", lambda run, out, stop, resume: (0, "done"))
    Path("out").mkdir()
    Path("out/config.yaml").write_text("steps: 1\n")
    Path("out/old.txt").write_text("old")
    assert train.main([*base, "--overwrite"]) == 0
    assert [path.name for path in Path("out").iterdir()] == ["config.yaml"]
    assert load_config("out/config.yaml") == read(base)


def test_a_file_that_cannot_be_read_is_named(base, monkeypatch, capsys):
    def unreadable(run, out, stop, resume):
        raise PermissionError(13, "Permission denied", "model/model.safetensors")

    monkeypatch.setattr(train, "train", unreadable)
    assert "error: model/model.safetensors cannot be read or written: Permission denied\n" in refused(base, capsys)


def test_dry_run_writes_nothing(base, capsys, small_run):
    before = files(small_run)
    assert train.main([*base, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "7,680 sketched (7 tensors)" in said.out  # q, k, v, o of 32 inputs or outputs and three of 48
    assert "1,184 frozen" in said.out
    assert to_yaml(read(base)) in said.out
    assert said.out.endswith("dry run: nothing was trained or written\n")
    assert list(Path().iterdir()) == []
    assert files(small_run) == before
    assert "rank 999" in refused([*base, "--dry-run", "optimizer.rank=999"], capsys)
    dense = [
        "optimizer.name=adamw",
        "optimizer.update_ratio=null",
        "optimizer.learning_rate=1e-4",
    ]
    assert train.main([*base, "--dry-run", *dense]) == 0  # dense training has no rank that could be too large
    assert "7,680 dense (7 tensors)" in capsys.readouterr().out
    Path("out").mkdir()
    Path("out/x").touch()
    assert train.main([*base, "--dry-run"]) == 0
    assert "note: out=out is not empty" in capsys.readouterr().out


BAD = {
    "optimiser.rank=4": "unknown key 'optimiser.rank': did you mean optimizer.rank?",
    "optimizer.rank=32": "optimizer.rank=32, optimizer.targets: SketchSpec: rank 32 is not below the 32 inputs",
    "optimizer.targets=[q_porj]": "target 'q_porj' matches no matrix of the parameters",
    "rollout.temperature=0": "rollout.temperature: must lie in (0, inf), found 0",
    "rollout.generations=1": "rollout.generations=1 leaves advantage.estimator=grpo nothing to compare",
    "rollout.prompts=20": "18 prompts are left of 18 rows, but one batch takes 20",
    "rollout.max_new_tokens=60": "data.max_prompt_length=6 + rollout.max_new_tokens=60 = 66 tokens, but the model",
    "model.max_position_embeddings=8": "= 12 tokens, but the model takes 8",
    "data.max_prompt_length=2": "18 of 18 prompts are longer than data.max_prompt_length = 2",
    "data.prompt_column=question": "rows.jsonl has no column 'question'; it has prompt, answer",
    "data.task_column=topic": "has no column 'topic'; it has prompt, answer. Set data.task_column",
    "data.answer_column=null": "reward.kind=exact needs data.answer_column",
    "data.template=chat": "the tokenizer has no chat template; set data.template=plain",
    "data.train=absent.jsonl": "data.train=absent.jsonl: no such file",
    "data.train=empty.jsonl": "empty.jsonl holds no rows",
    "data.train=broken.jsonl": "broken.jsonl: line 2: not valid JSON",
    "model.path=absent": "model.path=absent: no folder with a config.json",
    "reward.kind=absent_module:f": "reward.kind absent_module:f cannot be used",
    "mesh.fsdp=16": "needs 16 devices, there are 8",
    "mesh.fsdp=3": "rollout.prompts=4 cannot be split over mesh.fsdp=3 devices",
    "mesh.tensor=3": "mesh tensor=3 does not divide",
}


@pytest.mark.parametrize("setting", BAD)
def test_bad_input_is_refused_before_anything_is_written(setting, base, capsys, monkeypatch):
    def too_late(*args, **kwargs):
        raise AssertionError("the weights were loaded before this was found")

    monkeypatch.setattr("logra_jax.models.hf.open_shards", too_late)
    Path("empty.jsonl").touch()
    Path("broken.jsonl").write_text('{"prompt": "1*1=", "answer": "7"}\n{"prompt": "1*1=", "ans\n')
    kept = files(Path())
    said = refused([*base, setting], capsys)
    assert said.startswith("error: ")
    assert BAD[setting] in said
    assert files(Path()) == kept


REWARDS = """
import os, time

def flaky(prompts, completions, columns):
    assert columns["answer"] == ["7"] * len(prompts) and columns["prompt"] == prompts
    if any("*2" in prompt for prompt in prompts):
        raise RuntimeError("two is too much")
    if any("*3" in prompt for prompt in prompts):
        time.sleep(60)
    return [float("nan") if "*4" in p else float("7" in c) for p, c in zip(prompts, completions)]

def broken_later(prompts, completions, columns):
    if os.path.exists("break"):
        raise RuntimeError("broken now")
    if os.path.exists("out/metrics.jsonl") and open("out/metrics.jsonl").read():
        open("break", "w").close()
    return [float("7" in text) for text in completions]
"""


def test_rewards_that_fail_for_some_rows(base, monkeypatch):
    limits.as_needed(monkeypatch, lambda request: all("*3" in prompt for prompt in request["prompts"]))
    Path("rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"9*{b}=", "answer": "7"} for b in (2, 3, 4, 5)]
    Path("four.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ["reward.kind=rewards:flaky", "reward.timeout_s=100", "steps=1"]
    assert train.main([*base, *more, "data.train=four.jsonl", "data.eval=null"]) == 0
    (row,) = read_rows("out/metrics.jsonl")
    assert row["rows/dropped"] == 6  # two answers each to the first three prompts
    assert (row["reward/errors"], row["reward/timeouts"]) == (2, 2)
    assert 0 <= row["reward/mean"] <= 1


def test_rewards_that_all_fail_lose_nothing(base, capsys):
    Path("rewards.py").write_text(REWARDS)
    argv = [*base, "reward.kind=rewards:broken_later", "data.eval=null", "checkpoint.every=0", "steps=3"]
    said = refused(argv, capsys)
    assert "every reward failed (8 rows)" in said
    assert "broken now" in said
    assert steps(Path("out/checkpoints")) == [2]
    assert [row["step"] for row in read_rows("out/metrics.jsonl")] == [0, 1]
    Path("break").unlink()
    assert train.main([*argv, "reward.kind=exact", "--resume"]) == 0
    assert [row["step"] for row in read_rows("out/metrics.jsonl")] == [0, 1, 2]


def test_batches_that_teach_nothing_are_remarked_on(base, capsys):
    argv = [*base, "steps=4", "data.eval=null", "checkpoint.every=0", "reward.pattern=(nowhere)"]
    assert train.main(argv) == 0
    said = capsys.readouterr().err
    assert said.count("in 3 batches no answer was better than the others to its prompt (mean reward 0)") == 1
    assert {row["advantage/zero_share"] for row in read_rows("out/metrics.jsonl")} == {1}


SMOKE = {
    "dense_others": """
        loss.micro_batch=4 loss.aggregation=constant loss.importance_cap=2 advantage.estimator=leave_one_out
        loss.skip_cut_off=true reward.overlong_tokens=3
        model.remat=full model.compute_dtype=bfloat16 optimizer.others=adamw optimizer.weight_decay=.01
        optimizer.others_learning_rate=1e-3 optimizer.max_grad_norm=1 rollout.top_k=9 rollout.top_p=.9""",
    "two_by_two": """
        mesh.fsdp=2 mesh.tensor=2 optimizer.update_ratio=null optimizer.learning_rate=.01 kl.control=false
        kl.check_every=0 optimizer.distribution=gaussian optimizer.b1=null loss.token_budget=24
        loss.reference_kl=0 advantage.normalize_std=false log.tensorboard=true""",
}


@pytest.mark.parametrize("name", SMOKE)
def test_other_settings_work_together(name, base, capsys):
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw raises a float to an int32 power
        assert train.main([*base, *SMOKE[name].split(), "steps=2", "data.eval=null"]) == 0
    rows = read_rows("out/metrics.jsonl")
    assert len(rows) == 2
    assert all(value is not None for row in rows for value in row.values())
    assert ("kl/predicted" in rows[0]) == (name == "dense_others")
    _, params = load_hf("out/hf")
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(params))
    assert capsys.readouterr().err == ""


def test_answers_that_share_rows_teach_the_same(base):
    rows = {}
    for budget in (0, 24):
        argv = [*base, "steps=2", "data.eval=null", f"loss.token_budget={budget}", f"out=out{budget}"]
        assert train.main(argv) == 0
        rows[budget] = read_rows(f"out{budget}/metrics.jsonl")
    for separate, shared in zip(*rows.values(), strict=True):
        assert separate.keys() == shared.keys()
        assert 0 <= shared["padding/share"] <= separate["padding/share"]
        for name in separate.keys() - {"padding/share", "tokens/s"}:
            if not name.startswith("time/"):
                # These are what is left of two log-probabilities of 2 to 4, each rounded to 2^-22.
                atol = 2**-21 if name in ("kl/mismatch", "importance/deviation", "importance/max_deviation") else 1e-7
                np.testing.assert_allclose(shared[name], separate[name], rtol=1e-3, atol=atol, err_msg=name)


def test_a_token_budget_beyond_all_answers_makes_no_larger_rows():
    config = load_config(None, ["loss.token_budget=9999999999999", "rollout.prompts=4", "rollout.max_new_tokens=10"])
    layout = build.abstract_packing(config, make_mesh(2, 1), 6)
    assert layout.source.shape == (16, 2, 16 * (6 + 10))


def run(*command):
    """A command in a process of its own: code, output, errors."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def test_hybrid_models_learn_the_same_in_packed_rows_on_four_devices(base, fixtures):
    """Gated delta layers through rollout, sketches, KL probe and check, and the folder that comes out."""
    model = fixtures / "tiny-qwen3_5-text"
    argv = [
        *base, f"model.path={model}", "model.compute_dtype=float32", "data.eval=null", "data.template=plain",
        "data.max_prompt_length=16", "loss.reference_kl=0", "steps=2", "kl.check_every=1",
        "loss.importance_cap=2", "checkpoint.every=0",
        "advantage.estimator=running_baseline", "advantage.failure_reward=-1",
    ]  # fmt: skip
    assert train.main([*argv, "out=plain", "loss.micro_batch=4"]) == 0
    assert train.main([*argv, "out=packed", "loss.token_budget=44", "mesh.fsdp=2", "mesh.tensor=2"]) == 0
    for plain, packed in zip(*(read_rows(f"{out}/metrics.jsonl") for out in ("plain", "packed")), strict=True):
        assert plain["grad/norm"] > 0
        for row in (plain, packed):  # the sampler's log-probabilities are the trainer's, but for rounding
            assert 0 < row["importance/deviation"] < row["importance/max_deviation"] < 1e-4
        assert abs(plain["kl/predicted"] / plain["kl/budget"] - 1) < 1e-3
        for name in ("grad/norm", "kl/alpha", "kl/predicted", "kl/realized", "loss", "entropy", "response/length"):
            np.testing.assert_allclose(packed[name], plain[name], rtol=1e-3, atol=1e-6, err_msg=name)
    _, before = load_hf(model)
    _, after = load_hf("packed/hf")
    for block, name in (("linear_attn", "in_proj_qkv"), ("self_attn", "q_proj"), ("mlp", "up_proj")):
        old, new = (params["layers"][block][name]["kernel"] for params in (before, after))
        assert (np.abs(np.asarray(new - old)).reshape(-1, *old.shape[-2:]).max((1, 2)) > 0).all()


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_help_lists_every_setting_without_jax(command):
    watched = (
        "import runpy, sys\n"
        f"sys.argv[1:] = ['--help']\n"
        f"try:\n    runpy.run_module('logra_jax.{command}', run_name='__main__')\n"
        "finally:\n    print('loaded', 'jax' in sys.modules)\n"
    )
    code, said, errors = run("-c", watched)
    assert (code, errors) == (0, "")
    assert said.endswith("loaded False\n")
    assert all(f"  {key} " in said for key in SETTINGS)
    assert ("--resume" in said) == (command == "train")
