"""Training and evaluation on a mixture of tasks, from the command line to the metrics by task."""

import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest

from logra_jax import cli, train
from logra_jax.metrics import read_rows
from logra_jax.models import CausalLM, ModelConfig, save_hf

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="extra tasks not installed")
MIXTURE = """
train: 24
held_out: 8
tasks:
  sums: {task: chain_sum, difficulty: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
  lcm: {weight: 1, difficulty: {max_value: 9}}
"""


@pytest.fixture
def settings(command_settings, small_run, fixtures, tmp_path):
    (tmp_path / "mixture.yaml").write_text(MIXTURE)
    # The demo's tokenizer has no letters: this model has another one, and rows for it. Prompts are cut and answers
    # counted so that rollout and evaluation are one program.
    raw = json.loads((small_run / "model" / "config.json").read_text()) | {"vocab_size": 320}
    model = CausalLM(ModelConfig.from_hf(raw))
    save_hf(model, model.init_params(jax.random.key(0), "float32"), tmp_path / "model")
    for file in (fixtures / "tiny-qwen3").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")
    return [
        command_settings[0], f"model.path={tmp_path / 'model'}", "data.train=mixture.yaml",
        "data.eval=mixture.yaml", "reward.kind=reasoning_gym", r"reward.pattern=(\d)", "data.max_prompt_length=24",
        "steps=2", "eval.every=0", "eval.before=false", "rollout.prompts=8", "eval.samples=2",
        "data.overlong=truncate", "kl.check_every=0", "kl.control=false", "loss.reference_kl=0", "optimizer.name=adamw",
        "optimizer.learning_rate=1e-3",
    ]  # fmt: skip


def test_two_updates_and_accuracies_by_task(settings):
    with jax.numpy_dtype_promotion("standard"):  # optax
        assert train.main(settings) == 0
    rows = read_rows("out/metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        by_task = [row[key] for key in ("reward/sums", "reward/lcm") if key in row]
        assert by_task
        assert min(by_task) - 1e-6 <= row["reward/mean"] <= max(by_task) + 1e-6
    found = {key: value for key, value in rows[1].items() if key.startswith("eval/")}
    assert found["eval/macro_accuracy"] == pytest.approx(
        np.mean([found["eval/accuracy/sums"], found["eval/accuracy/lcm"]])
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("chain_sum: chain_sun", "reasoning-gym has no task 'chain_sun': did you mean chain_sum?"),
        ("weight: wait", "mixture.yaml: tasks: lcm: unknown key 'wait'"),
    ],
)
def test_a_wrong_mixture_ends_with_code_2_before_the_model_is_read(settings, change, message, tmp_path, capsys):
    path = tmp_path / "mixture.yaml"
    path.write_text(path.read_text().replace(*change.split(": ")))
    (tmp_path / "config.json").write_text("no JSON")  # were it read
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main([*settings, "model.path=."]))
    assert message in capsys.readouterr().err


def test_verifiers_are_for_mixtures(settings, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main([*settings, "data.eval=rows.jsonl"]))
    assert "data.eval=rows.jsonl is no mixture of tasks" in capsys.readouterr().err
