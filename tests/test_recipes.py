"""Every recipe in configs/ passes a dry run of the command that trains, and twins differ in what they say they do."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax import train
from logra_jax.build import make_optimizer, make_spec
from logra_jax.config import SETTINGS, load_config
from logra_jax.models import CausalLM, ModelConfig, save_hf
from logra_jax.models.presets import PRESETS
from logra_jax.sync.needs import TESTED

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = sorted(str(file.relative_to(CONFIGS)) for file in CONFIGS.rglob("*.yaml") if file.parent.name != "tasks")


@pytest.fixture(scope="module")
def model(tmp_path_factory, fixtures):
    """A folder with one layer, wide enough for rank 256, with a tokenizer that has letters and a chat template."""
    folder = tmp_path_factory.mktemp("recipes") / "model"
    raw = json.loads((fixtures / "tiny-qwen3" / "config.json").read_text())
    shape = replace(ModelConfig.from_hf(raw), num_hidden_layers=1, hidden_size=264, intermediate_size=264,
                    num_attention_heads=2, num_key_value_heads=1, head_dim=264)  # fmt: skip
    weights = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, np.float32)), CausalLM(shape).abstract_params()
    )
    save_hf(CausalLM(shape), weights, folder)
    for file in (fixtures / "tiny-qwen3").iterdir():
        if not (folder / file.name).exists() and not file.name.startswith("reference"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_passes(recipe, model, tmp_path, monkeypatch, capsys):
    config = load_config(CONFIGS / recipe)
    rows = [{"prompt": str(i), "answer": str(i), "task": "t", "entry": "e"} for i in range(config.rollout.prompts)]
    changed = {"model.path": model, "model.preset": "null", "model.max_position_embeddings": 8192, "mesh.fsdp": 1}
    for key in ("train", "eval"):
        changed[f"data.{key}"] = tmp_path / Path(getattr(config.data, key)).name
        changed[f"data.{key}"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    # What would take seconds: making a mixture's questions, and workers that import sympy. No server is asked.
    monkeypatch.setattr("logra_jax.rl.prompts.make_rows", lambda path, held_out: rows)
    monkeypatch.setattr("logra_jax.rl.workers.WorkerPool.start", lambda pool, count: None)
    monkeypatch.setattr("logra_jax.servers.vllm_version", lambda python: TESTED)
    monkeypatch.chdir(tmp_path)
    given = [f"{key}={value}" for key, value in changed.items()]
    assert train.main([f"--config={CONFIGS / recipe}", *given, "--dry-run"]) == 0
    assert "dry run: nothing was trained or written" in capsys.readouterr().out
    assert not Path(config.out).exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_commands_in_a_recipe_name_it(recipe):
    text = (CONFIGS / recipe).read_text(encoding="utf-8")
    assert set(re.findall(r"--config (\S+)", text)) <= {f"configs/{recipe}"}


def differences(one, other):
    """Settings that two recipes do not share, with the value of the second one."""
    first, second = load_config(CONFIGS / one), load_config(CONFIGS / other)
    return {key: s.of(second) for key, s in SETTINGS.items() if s.of(first) != s.of(second)}


@pytest.mark.parametrize("size", ["qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen3.8-27b"])
def test_the_dense_control_differs_in_the_optimizer_alone(size):
    assert size in PRESETS
    assert differences(f"paper/{size}.yaml", f"paper/{size}-dense.yaml") == {
        "out": f"out/{size}-dense",
        "optimizer.name": "adamw",
        "optimizer.update_ratio": None,
        "optimizer.learning_rate": 1e-6,
        "optimizer.b1": 0.9,
        "optimizer.warmup": 9,
        "optimizer.schedule": "cosine",
        "kl.control": False,
    }
    optimizer = load_config(CONFIGS / f"paper/{size}-dense.yaml").optimizer
    assert (optimizer.b2, optimizer.eps, optimizer.weight_decay, optimizer.final_fraction) == (0.95, 1e-8, 0.0, 0.1)
    # All sizes share a recipe.
    others = differences("paper/qwen2.5-math-1.5b.yaml", f"paper/{size}.yaml")
    assert set(others) <= {"out", "model.preset"}


def test_recipes_for_more_gpus_differ_in_those_alone():
    found = differences("paper/qwen2.5-math-7b.yaml", "paper/qwen2.5-math-7b-vllm.yaml")
    assert set(found) - {key for key in found if key.startswith("vllm.")} == {"out", "rollout.engine"}
    found = differences("paper/qwen3.8-27b.yaml", "paper/qwen3.8-27b-slurm.yaml")
    assert found == {"out": "out/qwen3.8-27b-slurm", "loss.micro_batch": 8}
    assert set(differences("gsm8k/qwen2.5-0.5b-instruct.yaml", "gsm8k/qwen2.5-1.5b-instruct.yaml")) == {
        "out", "model.preset",
    }  # fmt: skip


def test_the_published_port():
    config = load_config(CONFIGS / "gsm8k/qwen2.5-7b-grpo.yaml")
    rollout, optimizer = config.rollout, config.optimizer
    assert (rollout.prompts, rollout.generations, config.advantage.estimator) == (16, 8, "grpo")
    assert config.data.max_prompt_length + rollout.max_new_tokens == 2048
    assert (optimizer.name, optimizer.learning_rate, optimizer.warmup, optimizer.schedule) == (
        "logra",
        5e-6,
        50,
        "constant",
    )
    assert (optimizer.weight_decay, optimizer.preserve_norm, optimizer.others) == (0.01, False, "adamw")
    assert (config.loss.reference_kl, config.kl.control) == (0.01, False)


def test_weights_that_are_no_targets_decay_as_the_settings_say():
    config = load_config(CONFIGS / "gsm8k/qwen2.5-7b-grpo.yaml", ["optimizer.rank=4", "optimizer.warmup=0"])
    model = CausalLM(replace(TINY, num_hidden_layers=1))
    spec = make_spec(config, model)
    tx = make_optimizer(config, spec)

    @jax.jit
    def updates_of_zero_gradients():
        ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, "float32"), model.abstract_params())
        train, _ = spec.split(ones, dense=(".*",))
        return tx.update(jax.tree.map(jnp.zeros_like, train), tx.init(train), train)[0]

    with jax.numpy_dtype_promotion("standard"):  # optax
        updates = updates_of_zero_gradients()
    np.testing.assert_allclose(updates["embed_tokens"]["embedding"], -5e-6 * 0.01, rtol=1e-6)
