"""GaLore and LoRA in the trainer: through a checkpoint, to a Hugging Face folder, and what is refused."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax.build
from logra_jax import cli, convert, train
from logra_jax.checkpoint import read_arrays
from logra_jax.config import load_config
from logra_jax.metrics import MetricsWriter, read_rows
from logra_jax.models import load_hf

RATE = "optimizer.update_ratio=null optimizer.learning_rate=.01"
MODES = {
    "galore": f"""optimizer.name=galore {RATE} optimizer.projection_interval=2 optimizer.others=adamw
        optimizer.others_learning_rate=1e-3 model.param_dtype=bfloat16 loss.reference_kl=0""",
    "lora": f"optimizer.name=lora {RATE} optimizer.lora_alpha=8 optimizer.max_grad_norm=1",
}
FAST = ("data.eval=null", "checkpoint.every=0", "kl.check_responses=4")  # the KL check sees the whole probe
KERNELS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
# One layer of width 32 with 4 query and 2 key heads of 8, MLP 48, 32 tokens; rank 4.
MATRICES = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
TARGETS, ADAPTERS = sum(k * d for k, d in MATRICES), sum(4 * (k + d) for k, d in MATRICES)
REST = 32 * 32 + 3 * 32 + (32 + 16 + 16)


@pytest.fixture(autouse=True)
def lenient():
    """optax's Adam raises a float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def built_once(monkeypatch):
    """The jitted update of the first run of a test serves all of them; no curves are drawn."""
    build, programs = logra_jax.build.make_update, []

    def make_update(*args, **kwargs):
        programs.append(build(*args, **kwargs)) if not programs else None
        return programs[0]

    monkeypatch.setattr(logra_jax.build, "make_update", make_update)
    monkeypatch.setattr(MetricsWriter, "draw", lambda self: None)


def saved(out, step):
    return {k: np.asarray(v) for k, v in read_arrays(Path(out, "checkpoints", str(step)).absolute(), "").items()}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_through_a_checkpoint(mode, command_settings, built_once, capsys):
    """Bit by bit the run that was not stopped, with KL control, and the model that comes out of it."""
    argv = [*command_settings, *FAST, *MODES[mode].split()]
    assert train.main([*argv, "steps=3", "out=whole"]) == 0
    said = capsys.readouterr().out
    counts = {
        "galore": f"{REST:,} dense (7 tensors), {TARGETS:,} projected (7 tensors)",
        "lora": f"{ADAPTERS:,} in adapters (14 tensors), {TARGETS + REST:,} frozen (14 tensors)",
    }
    weights = next(line for line in said.splitlines() if line.startswith("weights"))
    assert sorted(weights.removeprefix("weights").strip().split("), ")) == sorted(counts[mode].split("), "))
    assert f"optimizer  {mode} rank 4, learning rate 0.01, KL budget" in said
    assert train.main([*argv, "steps=2"]) == 0
    assert train.main([*argv, "steps=3", "--resume"]) == 0
    whole, resumed, earlier = saved("whole", 3), saved("out", 3), saved("out", 2)
    assert whole.keys() == resumed.keys()
    for path, leaf in whole.items():
        np.testing.assert_array_equal(resumed[path], leaf, err_msg=path)
        assert resumed[path].dtype == leaf.dtype
    rows = read_rows("out/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 < row["kl/predicted"] <= row["kl/budget"] * 1.00001 for row in rows)
    if mode == "lora":
        np.testing.assert_allclose(rows[0]["kl/realized"], rows[0]["kl/predicted"], rtol=0.2)
    assert (rows[2]["kl/reference"] > 0) == (mode == "lora")

    moved = {path for path in whole if path.startswith("params.") and np.any(whole[path] != earlier[path])}
    if mode == "lora":
        assert moved == {f"params.layers.{kernel}.kernel.{part}" for kernel in KERNELS for part in "ab"}
    else:
        assert moved >= {f"params.layers.{kernel}.kernel" for kernel in KERNELS} | {"params.norm.scale"}
        projectors = [path for path in whole if "projector" in path]
        assert len(projectors) == 7
        assert all(np.any(whole[path] != earlier[path]) for path in projectors)  # the third update made new ones
    assert convert.main(["out", "converted"]) == 0
    for file in Path("out/hf").iterdir():
        assert Path("converted", file.name).read_bytes() == file.read_bytes()
    _, exported = load_hf(Path("out/hf"))
    _, before = load_hf(Path(next(a for a in argv if a.startswith("model.path=")).split("=")[1]))
    found = np.asarray(exported["layers"]["mlp"]["up_proj"]["kernel"], np.float64)
    assert np.any(found != np.asarray(before["layers"]["mlp"]["up_proj"]["kernel"]))
    if mode == "lora":
        at = "params.layers.mlp.up_proj.kernel"
        w, a, b = (whole[f"{at}.{part}"].astype(np.float64) for part in ("kernel", "a", "b"))
        np.testing.assert_allclose(found, w + 8 / 4 * a @ b, atol=1e-6, rtol=0)
        said = refused(capsys, [*argv, "steps=4", "--resume", "optimizer.lora_alpha=2"])
        assert "those of the checkpoint were trained to count 2.0: set optimizer.lora_alpha=8" in said


@pytest.mark.parametrize("b1", [0.0, 0.8])
def test_row_adam_is_the_formula_on_dense_gradients(b1):
    """Two updates of a stack of two matrices, as README and the paper write it, with decay and without KL control."""
    settings = f"""optimizer.name=row_adam {RATE.partition(" ")[2]} optimizer.b1={b1} optimizer.b2=.9 optimizer.eps=1e-6
        optimizer.weight_decay=.5 kl.control=false"""
    tx = logra_jax.build.make_optimizer(load_config(None, settings.split()), None)
    rng = np.random.default_rng(0)
    w, *gradients = (rng.normal(size=(2, 5, 3)) for _ in range(3))
    params, v, m = {"w": jnp.asarray(w, jnp.float32)}, 0.0, 0.0
    state = tx.init(params)
    for t, g in enumerate(gradients, start=1):
        updates, state = tx.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
        v, m = 0.9 * v + 0.1 * (g**2).mean(axis=1, keepdims=True), b1 * m + (1 - b1) * g
        w = w - 0.01 * (m / (1 - b1**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6) + 0.5 * w)
        np.testing.assert_allclose(params["w"], w, rtol=1e-5, atol=1e-6)


def refused(capsys, argv):
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main(argv))
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.targets=[up_proj,embed_tokens]", "model.embed_tokens.weight is no projection of a layer"),
        ("optimizer.rank=32", "rank 32 is not below the 32 inputs"),
        ("model.param_dtype=bfloat16", "cannot go with optimizer.name=lora: adapters are float32"),
    ],
)
def test_lora_refuses(setting, message, command_settings, capsys):
    assert message in refused(capsys, [*command_settings, *MODES["lora"].split(), setting])
