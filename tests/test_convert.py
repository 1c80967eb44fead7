"""Conversion: there and back is equal to the byte; wrong folders are refused before anything is written."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from logra_jax import convert
from logra_jax.checkpoint import Checkpoints
from logra_jax.config import load_config, to_yaml
from logra_jax.errors import UserError
from logra_jax.models import load_hf


def run(*arguments: object) -> None:
    assert convert.main([str(argument) for argument in arguments]) == 0


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["tiny-qwen2-tied", "tiny-qwen2-bf16", "tiny-qwen2-sharded"])
def test_there_and_back_is_equal_to_the_byte(fixtures, tmp_path, name):
    run(fixtures / name, tmp_path / "orbax")
    run(tmp_path / "orbax", tmp_path / "hf")
    back, source = contents(tmp_path / "hf"), contents(fixtures / name)
    assert any(file.endswith(".safetensors") for file in back)
    for file, data in back.items():
        assert data == source[file], file
    assert {file for file in source if file.startswith(("config", "model", "tokenizer"))} <= set(back)


@pytest.fixture
def trained(fixtures, tmp_path):
    """A run's folder: two steps of changed weights, and config.yaml. Returns it and the newest weights."""
    source = shutil.copytree(fixtures / "tiny-qwen2-tied", tmp_path / "model")
    out = tmp_path / "out"
    _, params = load_hf(source)
    checkpoints = Checkpoints(out / "checkpoints")
    for step in (1, 2):
        params = jax.tree.map(lambda x: x * 2, params)
        checkpoints.save(step, {"params": params, "opt_state": {"v": np.ones(3, np.float32)}}, {})
    checkpoints.close()
    (out / "config.yaml").write_text(to_yaml(load_config(None, [f"model.path={source}"])))
    return out, params


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/2"])
def test_a_run_becomes_a_model(trained, tmp_path, place):
    out, params = trained
    run(out / place, tmp_path / "hf")
    _, loaded = load_hf(tmp_path / "hf")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_damaged_newest_step_is_passed_over(trained, tmp_path, capsys):
    out, params = trained
    (out / "checkpoints" / "2" / "checksums.json").unlink()
    run(out, tmp_path / "hf")
    _, loaded = load_hf(tmp_path / "hf")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b / 2), loaded, params)
    assert (out / "checkpoints" / "2").is_dir()  # reading moves nothing
    with pytest.raises(UserError, match="damaged"):
        run(out / "checkpoints" / "2", tmp_path / "other")


def test_model_that_has_moved(trained, tmp_path):
    out, _ = trained
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="--model"):
        run(out, tmp_path / "hf")
    run(out, tmp_path / "hf", "--model", tmp_path / "moved")
    assert (tmp_path / "hf" / "config.json").is_file()


def test_what_the_run_changed_in_the_model_is_exported(trained, tmp_path):
    out, _ = trained
    changed = ["model.rope_theta=5e5", "model.max_position_embeddings=99"]
    source = tmp_path / "model"
    (out / "config.yaml").write_text(to_yaml(load_config(None, [f"model.path={source}", *changed])))
    run(out, tmp_path / "hf")
    model, _ = load_hf(tmp_path / "hf")
    assert (model.config.rope_theta, model.config.max_position_embeddings) == (5e5, 99)


def test_dtype(trained, tmp_path):
    out, params = trained
    run(out, tmp_path / "hf", "--dtype", "bfloat16")
    _, loaded = load_hf(tmp_path / "hf")
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)


def test_existing_target_is_refused(fixtures, trained, tmp_path):
    out, _ = trained
    source = fixtures / "tiny-qwen2-tied"
    run(source, tmp_path / "orbax")
    run(out, tmp_path / "hf")
    for src, dst in ((source, tmp_path / "orbax"), (out, tmp_path / "hf")):
        with pytest.raises(UserError, match="--overwrite"):
            run(src, dst)
        run(src, dst, "--overwrite")
    for src, dst in ((source, tmp_path / "hf"), (out, tmp_path / "orbax")):
        before = sorted(dst.iterdir())
        with pytest.raises(UserError, match="does not delete"):
            run(src, dst, "--overwrite")
        assert sorted(dst.iterdir()) == before
    assert not list(tmp_path.glob(".*"))


def test_wrong_folders(tmp_path, trained):
    out, _ = trained
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither"):
        run(tmp_path / "empty", tmp_path / "x")
    with pytest.raises(UserError, match="no such folder"):
        run(tmp_path / "nowhere", tmp_path / "x")
    with pytest.raises(UserError, match="contains SRC"):
        run(out, out, "--overwrite")
    with pytest.raises(UserError, match="contains SRC"):
        run(out / "checkpoints", out, "--overwrite")
    assert not (tmp_path / "x").exists()
