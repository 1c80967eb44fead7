"""What the trainer makes of settings: the sizes of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import optim
from logra_jax.build import learning_rate, make_optimizer, read_prompts
from logra_jax.config import PACKAGED, load_config
from logra_jax.rl.tokenizer import load_tokenizer

COURSE = ["steps=12", "optimizer.warmup=4", "optimizer.schedule=cosine", "kl.control=false", "eval.every=0"]
# Four updates up, then half a cosine from 1 to 0.1 over eight.
SHARES = [n / 4 for n in (1, 2, 3, 4)] + [0.1 + 0.9 * (1 + np.cos(np.pi * n / 8)) / 2 for n in range(8)]


def test_step_sizes_rise_and_fall():
    rate = learning_rate(load_config(None, [*COURSE, "optimizer.update_ratio=1e-3"]))
    np.testing.assert_allclose([rate(n) for n in range(12)], 1e-3 * np.array(SHARES), rtol=1e-5)


@pytest.mark.parametrize("name", ["logra", "galore"])
def test_weights_beside_the_targets_are_on_the_same_schedule(name):
    """Adam's step for a gradient that stays the same is its rate, whatever it is."""
    size = "update_ratio=1e-3" if name == "logra" else "learning_rate=1e-3"
    own = [
        f"optimizer.name={name}",
        f"optimizer.{size}",
        "optimizer.others=adamw",
        "optimizer.others_learning_rate=.01",
    ]
    spec = optim.SketchSpec(rank=2, targets=("kernel",))
    tx = make_optimizer(load_config(None, [*COURSE, *own]), spec)
    params = {"kernel": jnp.ones((4, 8)), "scale": jnp.ones(3)}
    kernel = jnp.ones((2, 8)) if name == "logra" else jnp.ones((4, 8))
    grads, state, steps = {"kernel": kernel, "scale": jnp.ones(3)}, tx.init(params), []
    for _ in range(12):
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an int32 power
            updates, state = tx.update(grads, state, params)
        steps.append(-float(updates["scale"][0]))
    np.testing.assert_allclose(steps, 0.01 * np.array(SHARES), rtol=1e-4)


def test_what_the_tokenizer_cannot_read_is_said(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    tokenizer = load_tokenizer(PACKAGED / "model")
    for prompt, note in (("12*3=", ""), ("So 4", "demo:model has no tokens for the characters So\n")):
        path.write_text(f'{{"prompt": "{prompt}", "answer": "1"}}\n')
        read_prompts(load_config(None, [f"data.train={path}"]), "train", tokenizer, 32)
        said = capsys.readouterr().err
        assert said.endswith(note) if note else not said
