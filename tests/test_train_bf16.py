"""Training with bfloat16 weights: through a checkpoint, to a Hugging Face folder, and in the settings' bounds."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import convert, train
from logra_jax.checkpoint import read_arrays
from logra_jax.metrics import read_rows
from logra_jax.models import load_hf

KERNEL = "layers.mlp.up_proj.kernel"
ADAMW = "optimizer.name=adamw optimizer.update_ratio=null optimizer.learning_rate=1e-3 optimizer.b1=null"
MODES = {
    "residual": "model.rounding=residual loss.micro_batch=4",
    "stochastic adamw": f"optimizer.others=adamw {ADAMW}",
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_through_a_checkpoint(mode, command_settings):
    """Bit by bit the run that was not stopped; frozen weights are float32, as in the folder they came from."""
    argv = [
        *command_settings,
        "model.param_dtype=bfloat16",
        "data.eval=null",
        "checkpoint.every=0",
        *MODES[mode].split(),
    ]
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw raises a float to an int32 power
        assert train.main([*argv, "steps=2", "out=whole"]) == 0
        assert train.main([*argv, "steps=1"]) == 0
        assert train.main([*argv, "steps=2", "--resume"]) == 0
    whole, resumed = (read_arrays(Path(out, "checkpoints/2").absolute(), "") for out in ("whole", "out"))
    assert whole.keys() == resumed.keys()
    for path, leaf in whole.items():
        np.testing.assert_array_equal(resumed[path], leaf, err_msg=path)
        assert resumed[path].dtype == leaf.dtype
    trained = {path for path, leaf in whole.items() if path.startswith("params.") and leaf.dtype == jnp.bfloat16}
    kernels = {path for path in whole if path.startswith("params.") and path.endswith("proj.kernel")}
    everything = {path for path in whole if path.startswith("params.")}
    assert trained == (everything if "others=adamw" in MODES[mode] else kernels)
    assert not any(leaf.dtype == jnp.bfloat16 for path, leaf in whole.items() if path.startswith("opt_state."))

    first = read_arrays(Path("out/checkpoints/1").absolute(), "")
    assert np.mean(np.asarray(first[f"params.{KERNEL}"]) != np.asarray(whole[f"params.{KERNEL}"])) > 0.01
    rests = {path for path in whole if path.startswith("residual.")}
    assert {path.replace("residual.", "params.") for path in rests} == (trained if "residual" in mode else set())
    wide = lambda x: np.asarray(x).astype(np.float32)
    exact = wide(whole[f"params.{KERNEL}"]) + (wide(whole[f"residual.{KERNEL}"]) if rests else 0)
    _, exported = load_hf("out/hf")
    np.testing.assert_array_equal(exported["layers"]["mlp"]["up_proj"]["kernel"], exact)
    assert convert.main(["out", "converted"]) == 0
    for file in Path("out/hf").glob("*.safetensors"):
        assert Path("converted", file.name).read_bytes() == file.read_bytes()
    assert [row["step"] for row in read_rows("out/metrics.jsonl")] == [0, 1]
