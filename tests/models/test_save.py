"""Saving: the same bytes where nothing changed, the same names and layout where something did."""

import filecmp
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.flax import load_file
from safetensors.numpy import load_file as read_numpy
from safetensors.numpy import save_file as save_numpy

from logra_jax.errors import UserError
from logra_jax.models import CausalLM, load_hf, save_hf

TIED, SHARDED, BF16 = "tiny-qwen2-tied", "tiny-qwen2-sharded", "tiny-qwen2-bf16"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def writable(fixtures, tmp_path):
    """A copy of a checkpoint by its name, to load from and spoil."""

    def copy(name):
        return shutil.copytree(fixtures / name, tmp_path / "source", copy_function=shutil.copyfile)

    return copy


def same_trees(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b))


def json_of(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def assert_same_folder(source, saved):
    names = {p.name for p in source.iterdir() if not p.name.startswith("reference")}
    assert {p.name for p in saved.iterdir()} == names
    same, different, odd = filecmp.cmpfiles(source, saved, names, shallow=False)
    assert (set(same), different, odd) == (names, [], [])
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_load_then_save_gives_the_same_bytes(checkpoint, tmp_path):
    save_hf(checkpoint.model, checkpoint.params, tmp_path / "out")
    assert_same_folder(checkpoint.folder, tmp_path / "out")


def test_bfloat16_weights_stay_bfloat16_all_the_way(fixtures, tmp_path):
    save_hf(*load_hf(fixtures / BF16, "bfloat16"), tmp_path / "out")
    assert_same_folder(fixtures / BF16, tmp_path / "out")


@pytest.mark.parametrize("name", [TIED, BF16])
def test_a_residual_is_added_where_the_file_can_hold_it(fixtures, tmp_path, name):
    """Float32 files hold bfloat16 parameters and what they lack, bfloat16 files the parameters alone."""
    kernel = "layers/mlp/up_proj/kernel"
    model, params = load_hf(fixtures / name, {kernel: "bfloat16"}, compute_dtype="float32")
    high = params["layers"]["mlp"]["up_proj"]["kernel"]
    low = (high.astype(jnp.float32) * 2**-10).astype(jnp.bfloat16)
    residual = {"layers": {"mlp": {"up_proj": {"kernel": low, "bias": None}}}, "norm": {"scale": None}}
    save_hf(model, params, tmp_path / "out", residual=residual)
    _, back = load_hf(tmp_path / "out", {}, compute_dtype="float32")
    exact = high if name == BF16 else high.astype(jnp.float32) + low.astype(jnp.float32)
    np.testing.assert_array_equal(back["layers"]["mlp"]["up_proj"]["kernel"], exact)
    np.testing.assert_array_equal(back["norm"]["scale"], params["norm"]["scale"])


@pytest.mark.parametrize("name", [TIED, SHARDED, "tiny-qwen3"])
def test_changed_weights_come_back_under_the_source_names(load_checkpoint, tmp_path, name):
    known = load_checkpoint(name)
    params = jax.tree.map(lambda x: x + 1, known.params)
    save_hf(known.model, params, tmp_path / "out")
    again_model, again = load_hf(tmp_path / "out")
    assert again_model.config == known.model.config
    assert same_trees(params, again)
    stored = {key for file in (tmp_path / "out").glob("*.safetensors") for key in load_file(file)}
    source = {key for file in known.folder.glob("*.safetensors") for key in load_file(file)}
    assert stored == source
    assert ("lm_head.weight" in stored) == (name != TIED)
    assert json_of(tmp_path / "out") == json_of(known.folder)


def test_files_of_processors_go_along(writable, tmp_path):
    place = writable(SHARDED)
    names = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
    for name in names:
        (place / name).write_text(f'{{"of": "{name}"}}')
    save_hf(*load_hf(place), tmp_path / "out")
    assert [(tmp_path / "out" / name).read_text() for name in names] == [f'{{"of": "{name}"}}' for name in names]


def test_a_head_stored_beside_the_tied_flag_is_left_out(writable, tmp_path):
    """Its shard, made to hold nothing else, goes with it, and the index says so."""
    place = writable(SHARDED)
    first, second = sorted(place.glob("*.safetensors"))
    head = read_numpy(second)
    rest = read_numpy(first) | {name: head.pop(name) for name in list(head) if name != "lm_head.weight"}
    save_numpy(rest, first)
    save_numpy(head, second)
    index = json_of(place, INDEX)
    index["weight_map"] = dict.fromkeys(rest, first.name) | dict.fromkeys(head, second.name)
    (place / INDEX).write_text(json.dumps(index))
    (place / "config.json").write_text(json.dumps(json_of(place) | {"tie_word_embeddings": True}))
    model, params = load_hf(place)
    save_hf(model, params, tmp_path / "out")
    saved = json_of(tmp_path / "out", INDEX)
    assert saved["weight_map"] == dict.fromkeys(rest, first.name)
    assert saved["metadata"] == {"total_parameters": 170816 - 320 * 64, "total_size": 683264 - 320 * 64 * 4}
    assert not (tmp_path / "out" / second.name).exists()
    assert json_of(tmp_path / "out")["tie_word_embeddings"] is True
    with safe_open(tmp_path / "out" / first.name, "numpy") as file:
        assert file.metadata() == {"format": "pt"}  # which the source, written without, lacked
    _, again = load_hf(tmp_path / "out")
    assert same_trees(params, again)


@pytest.mark.parametrize(("name", "key"), [(TIED, "torch_dtype"), (SHARDED, "dtype")])
def test_dtype_overrides_the_source(load_checkpoint, tmp_path, name, key):
    known = load_checkpoint(name)
    save_hf(known.model, known.params, tmp_path / "out", dtype="bfloat16")
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert {x.dtype for x in load_file(file).values()} == {jnp.dtype(jnp.bfloat16)}
    assert json_of(tmp_path / "out") == json_of(known.folder) | {key: "bfloat16"}
    if name == SHARDED:
        assert json_of(tmp_path / "out", INDEX)["metadata"]["total_size"] == 683264 // 2
    _, again = load_hf(tmp_path / "out")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), known.params)
    assert same_trees(rounded, again)


@pytest.mark.parametrize("name", [TIED, SHARDED])
def test_position_overrides_are_written_in_the_dialect_of_the_file(fixtures, tmp_path, name):
    model, params = load_hf(fixtures / name, rope_theta=40000.0, max_position_embeddings=16384)
    save_hf(model, params, tmp_path / "out")
    expected = json_of(fixtures / name) | {"max_position_embeddings": 16384}
    if name == TIED:
        expected["rope_theta"] = 40000.0
    else:
        expected["rope_parameters"] = {"rope_theta": 40000.0, "rope_type": "default"}
    assert json_of(tmp_path / "out") == expected
    assert load_hf(tmp_path / "out")[0].config == model.config


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_model_without_a_source_gets_a_sound_folder(load_checkpoint, random_params, tmp_path, dtype, stored):
    config = load_checkpoint("tiny-qwen3").model.config
    model = CausalLM(config, end_ids=(1, 5), pad_id=2)
    params = jax.tree.map(lambda x: x.astype(dtype), random_params(model))
    save_hf(model, params, tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    raw = json_of(tmp_path / "out")
    assert (raw["architectures"], raw["dtype"]) == (["Qwen3ForCausalLM"], stored)
    again_model, again = load_hf(tmp_path / "out", dtype)
    assert (again_model.config, again_model.end_ids, again_model.pad_id) == (config, (1, 5), 2)
    assert same_trees(params, again)


def test_an_existing_folder_is_kept_unless_overwriting_is_asked_for(load_checkpoint, tmp_path):
    known = load_checkpoint(TIED)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="out exists already"):
        save_hf(known.model, known.params, out)
    assert [p.name for p in out.iterdir()] == ["notes.txt"]
    save_hf(known.model, known.params, out, overwrite=True)
    assert not (out / "notes.txt").exists()
    assert load_hf(out)[0].config == known.model.config
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_source_can_be_overwritten_by_itself(writable, tmp_path):
    place = writable(TIED)
    model, params = load_hf(place)
    save_hf(model, jax.tree.map(lambda x: x * 2, params), place, overwrite=True)
    _, again = load_hf(place)
    assert same_trees(jax.tree.map(lambda x: x * 2, params), again)
    assert (place / "tokenizer.json").is_file()


def test_a_failure_while_writing_leaves_nothing(load_checkpoint, tmp_path, monkeypatch):
    known = load_checkpoint(SHARDED)

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr("logra_jax.models.save.shutil.copyfile", full_disk)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("kept")
    with pytest.raises(OSError, match="no space left"):
        save_hf(known.model, known.params, tmp_path / "out", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "old").read_text() == "kept"


def test_parameters_of_another_model_are_refused(load_checkpoint, tmp_path):
    known = load_checkpoint(TIED)
    with pytest.raises(UserError, match="lm_head/kernel are in one of the two only"):
        save_hf(known.model, known.params | {"lm_head": {"kernel": jnp.ones((64, 320))}}, tmp_path / "out")
    with pytest.raises(UserError, match=r"norm/scale has shape \[63\], expected \[64\]"):
        save_hf(known.model, known.params | {"norm": {"scale": jnp.ones(63)}}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_source_that_is_gone_or_no_longer_fits_is_named(writable, tmp_path):
    place = writable(TIED)
    model, params = load_hf(place)
    changed = model.replace(config=model.config.replace(rms_norm_eps=1e-3))
    with pytest.raises(UserError, match=r"no longer that of .*config.json"):
        save_hf(changed, params, tmp_path / "out")
    shutil.rmtree(place)
    with pytest.raises(UserError, match="source, is gone"):
        save_hf(model, params, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_value_that_overflows_a_float16_source_is_named(writable, tmp_path):
    place = writable(TIED)
    halves = {name: x.astype(np.float16) for name, x in read_numpy(place / "model.safetensors").items()}
    save_numpy(halves, place / "model.safetensors", {"format": "pt"})
    model, params = load_hf(place)
    params["norm"]["scale"] = params["norm"]["scale"].at[0].set(1e5)
    with pytest.raises(UserError, match=r"model.norm.weight has values up to 1e\+05, too large"):
        save_hf(model, params, tmp_path / "out")
    save_hf(model, params, tmp_path / "out", dtype="float32")
    assert load_hf(tmp_path / "out")[1]["norm"]["scale"][0] == 1e5
