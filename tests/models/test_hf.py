"""Loading a folder: every way in which one can be wrong is refused by name, and nothing is made up."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from logra_jax.errors import UserError
from logra_jax.mesh import make_mesh, shardings
from logra_jax.models import load_hf
from logra_jax.models.hf import _put

TIED, SHARDED, LLAMA = "tiny-qwen2-tied", "tiny-qwen2-sharded", "tiny-llama"
SECOND = "model-00002-of-00002.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(fixtures, tmp_path):
    """A writable copy of a checkpoint by its name."""

    def copy(name):
        target = tmp_path / name
        target.mkdir()
        for path in (fixtures / name).iterdir():
            if not path.name.startswith("reference"):
                shutil.copyfile(path, target / path.name)
        return target

    return copy


def edit_config(folder, **changes):
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder, change, file="model.safetensors"):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("name", [TIED, SHARDED, "tiny-qwen3", LLAMA])
def test_every_tensor_lands_in_its_place(fixtures, load_checkpoint, name):
    """Against the reader of the safetensors library; linear weights are transposed, layers stacked."""
    stored = {}
    for path in (fixtures / name).glob("*.safetensors"):
        stored |= load_file(path)
    params = load_checkpoint(name).params
    np.testing.assert_array_equal(params["embed_tokens"]["embedding"], stored["model.embed_tokens.weight"])
    seen = 1
    for key, value in stored.items():
        parts = key.split(".")
        if parts[1] == "layers":
            leaf = params["layers"]
            for part in parts[3:-1]:
                leaf = leaf[part]
            kind = parts[-1] if parts[-1] == "bias" else "scale" if "norm" in parts[-2] else "kernel"
            mine = leaf[kind][int(parts[2])]
            np.testing.assert_array_equal(mine.T if kind == "kernel" else mine, value, err_msg=key)
            seen += 1
    np.testing.assert_array_equal(params["norm"]["scale"], stored["model.norm.weight"])
    if "lm_head.weight" in stored:
        np.testing.assert_array_equal(params["lm_head"]["kernel"].T, stored["lm_head.weight"])
    assert seen + 1 + ("lm_head.weight" in stored) == len(stored)


def test_a_tied_head_is_the_embedding(load_checkpoint):
    known = load_checkpoint(TIED)
    assert "lm_head" not in known.params
    np.testing.assert_array_equal(known.model.head(known.params), known.params["embed_tokens"]["embedding"].T)


def test_a_head_stored_beside_the_tied_flag_is_ignored(folder, load_checkpoint):
    place = folder(TIED)
    edit_tensors(place, lambda t: t.update({"lm_head.weight": np.full((320, 64), 9, np.float32)}))
    model, params = load_hf(place)
    assert "lm_head" not in params
    np.testing.assert_array_equal(model.head(params), load_checkpoint(TIED).params["embed_tokens"]["embedding"].T)


def test_padded_vocabulary_rows_are_kept(load_checkpoint, fixtures):
    """The table has 320 rows, the tokenizer fewer."""
    tokenizer = json.loads((fixtures / TIED / "tokenizer.json").read_text())
    assert len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"]) < 320
    known = load_checkpoint(TIED)
    assert known.model.head(known.params).shape == (64, 320)


def test_float16_and_mixed_files_are_read(folder, load_checkpoint):
    place = folder(TIED)

    def halve(tensors):
        tensors[UP] = tensors[UP].astype(np.float16)

    edit_tensors(place, halve)
    _, params = load_hf(place)
    up, exact = (p["layers"]["mlp"]["up_proj"]["kernel"] for p in (params, load_checkpoint(TIED).params))
    assert up.dtype == jnp.float32
    np.testing.assert_array_equal(up[1], np.asarray(exact[1]).astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(up[0], exact[0])


@pytest.mark.parametrize("name", [TIED, "tiny-qwen2-bf16"])
def test_dtypes_by_path(name, load_checkpoint, fixtures):
    """Named parameters get theirs, rounded to the nearest; the others stay as stored."""
    kernel = "layers/mlp/up_proj/kernel"
    stored = jnp.bfloat16 if name.endswith("bf16") else jnp.float32
    for dtype in ("float32", "bfloat16"):
        model, params = load_hf(fixtures / name, {kernel: dtype}, compute_dtype="float32")
        assert model.compute_dtype == "float32"
        assert params["layers"]["mlp"]["up_proj"]["kernel"].dtype == dtype
        dtypes = {leaf.dtype for path, leaf in flatten_dict(params, sep="/").items() if path != kernel}
        assert dtypes == {jnp.dtype(stored)}
        exact = load_checkpoint(name).params
        want = jax.tree.map(lambda x, y: x.astype(y.dtype), exact, params)
        jax.tree.map(np.testing.assert_array_equal, params, want)
    with pytest.raises(UserError, match="compute_dtype"):
        load_hf(fixtures / name, {kernel: "float32"})
    with pytest.raises(UserError, match="up_porj, which are no parameters"):
        load_hf(fixtures / name, {"up_porj": "float32"}, compute_dtype="float32")


def test_leaves_are_placed_as_asked(load_checkpoint, fixtures):
    model = load_checkpoint(TIED).model
    places = shardings(make_mesh(2, 2), model.logical_axes())
    _, params = load_hf(fixtures / TIED, shardings=places)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, places))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), params, load_checkpoint(TIED).params))


def test_a_tensor_is_written_in_place():
    """Of a stack of 4 x 64 x 32 floats on 4 devices, by the compiler's account, without a copy or communication."""
    mesh = make_mesh(2, 2)
    stack, file = (NamedSharding(mesh, P(*axes)) for axes in ((None, "fsdp", "tensor"), ("tensor", "fsdp")))
    shapes = (
        jax.ShapeDtypeStruct((4, 64, 32), "float32", sharding=stack),
        jax.ShapeDtypeStruct((32, 64), "float32", sharding=file),
    )
    program = _put(True, False, stack).lower(*shapes, np.int32([2])).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * 64 * 32
    assert memory.temp_size_in_bytes <= 64 * 32
    assert not re.search("all-|collective", program.as_text())


def test_theta_override_reaches_the_angles(fixtures, load_checkpoint):
    known = load_checkpoint(TIED)
    model, params = load_hf(fixtures / TIED, rope_theta=500.0, max_position_embeddings=4096)
    assert (model.config.rope_theta, model.config.max_position_embeddings) == (500.0, 4096)
    ids = known.ref["short_input_ids"]
    other = jax.jit(model.logits)(params, ids)
    assert np.abs(other - known.logits(known.params, ids)).max() > 1e-2


def rename(tensors):
    tensors["model.layers.1.mlp.extra_proj.weight"] = tensors.pop(UP)


def transposed(tensors):
    tensors[UP] = np.ascontiguousarray(tensors[UP].T)


def integers(tensors):
    tensors[UP] = tensors[UP].astype(np.int8)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (TIED, lambda f: edit_tensors(f, lambda t: t.pop(UP)), f"lacks {UP}: the folder is incomplete"),
        (TIED, lambda f: edit_tensors(f, rename), f"lacks {UP}"),
        (
            TIED,
            lambda f: edit_tensors(f, lambda t: t.update({"model.extra.weight": np.ones(3, np.float32)})),
            r"model.safetensors holds model.extra.weight, which a qwen2 model .* does not have",
        ),
        (
            TIED,
            lambda f: edit_tensors(f, transposed),
            rf"model.safetensors: tensor '{UP}' has shape \[64, 160\], expected \[160, 64\]",
        ),
        (
            TIED,
            lambda f: edit_tensors(f, integers),
            rf"tensor '{UP}' has dtype 'I8', readable are F32, F16, BF16",
        ),
        (
            TIED,
            lambda f: edit_config(f, tie_word_embeddings=False),
            "lacks lm_head.weight: .* must be stored",
        ),
        (TIED, lambda f: edit_config(f, num_hidden_layers=4), r"lacks model.layers.3\..* and 6 more"),
        (TIED, lambda f: edit_config(f, num_hidden_layers=2), r"holds model.layers.2\."),
        (TIED, lambda f: edit_config(f, model_type="llama"), "holds model.layers.0.self_attn.k_proj.bias"),
        (LLAMA, lambda f: edit_config(f, attention_bias=True), "lacks .*k_proj.bias"),
        (
            LLAMA,
            lambda f: edit_config(f, head_dim=4),
            r"q_proj.weight' has shape \[72, 72\], expected \[36, 72\]",
        ),
        (TIED, lambda f: edit_config(f, vocab_size=311), r"has shape \[320, 64\], expected \[311, 64\]"),
        (TIED, lambda f: edit_config(f, model_type="gpt2"), "config.json: model_type is 'gpt2'"),
        (TIED, lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (TIED, lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
        (TIED, lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (TIED, lambda f: (f / "model.safetensors").unlink(), "holds neither model.safetensors nor"),
        (
            TIED,
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            "found pytorch_model.bin: convert to safetensors",
        ),
        (SHARDED, lambda f: (f / SECOND).unlink(), f"lacks {SECOND}, named in .*the download is incomplete"),
        (
            SHARDED,
            lambda f: [path.unlink() for path in f.glob("model-*.safetensors")],
            f"lacks model-00001-of-00002.safetensors, {SECOND}",
        ),
        (
            SHARDED,
            lambda f: shutil.copyfile(f / SECOND, f / "model-00003-of-00003.safetensors"),
            "holds model-00003-of-00003.safetensors, which .* does not name",
        ),
        (
            SHARDED,
            lambda f: edit_index(f, lambda m: m.pop("lm_head.weight")),
            f"{SECOND} holds the tensor 'lm_head.weight', which .* does not name",
        ),
        (
            SHARDED,
            lambda f: edit_tensors(f, lambda t: t.update({"model.embed_tokens.weight": t["lm_head.weight"]}), SECOND),
            f"{SECOND} holds the tensor 'model.embed_tokens.weight', which .* places in model-00001-of-00002",
        ),
        (
            SHARDED,
            lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight"), SECOND),
            f"{SECOND} lacks lm_head.weight, which .* places there",
        ),
        (
            SHARDED,
            lambda f: (f / "model.safetensors.index.json").unlink(),
            "holds neither model.safetensors nor model.safetensors.index.json",
        ),
        (
            SHARDED,
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
            "has no weight_map",
        ),
    ],
)
def test_a_bad_folder_is_refused_by_name(folder, name, spoil, message):
    place = folder(name)
    spoil(place)
    with pytest.raises(UserError, match=message):
        load_hf(place)


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        load_hf(tmp_path / "nowhere")


def test_an_unknown_dtype_is_refused(fixtures):
    with pytest.raises(UserError, match="dtype is 'float16'; choose float32 or bfloat16"):
        load_hf(fixtures / TIED, "float16")
