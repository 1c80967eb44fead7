"""Hybrid models: caches, padding on either side, multimodal folders, sketches, and what is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from logra_jax.errors import UserError
from logra_jax.models import CausalLM, ModelConfig, load_hf, save_hf
from logra_jax.optim import SketchSpec, merge, predict_kl, sketched_value_and_grad
from logra_jax.optim.twin import signs

TEXT, MULTIMODAL = "tiny-qwen3_5-text", "tiny-qwen3_5-vlm-names"


def test_caches_are_those_of_torch(load_checkpoint):
    """Rows 0 and 1 of the right-padded batch, unpadded there and padded here: a state is that of its own row's end."""
    known = load_checkpoint(TEXT)
    ids, mask = known.ref["right_input_ids"], known.ref["right_attention_mask"]
    _, cache = jax.jit(lambda p: known.model.hidden(p, ids, mask, cache=known.model.init_cache(3, 172)))(known.params)
    for row in (0, 1):
        stored = {key.split("/", 1)[1]: x for key, x in known.ref.items() if key.startswith(f"cache{row}/")}
        for layer in range(3):
            window = stored[f"layer{layer}/conv_state"][0].T  # which keeps one input more than the next step reads
            np.testing.assert_allclose(cache.window[layer, row], window[1:], atol=1e-4, rtol=0)
            np.testing.assert_allclose(
                cache.state[layer, row], stored[f"layer{layer}/recurrent_state"][0], atol=1e-4, rtol=0
            )
        length = mask[row].sum()
        for name, ours in (("keys", cache.k), ("values", cache.v)):
            expected = stored[f"layer3/{name}"][0]
            np.testing.assert_allclose(ours[0, row, :, :length], expected, atol=1e-4, rtol=0)


def test_decoding_goes_on_from_either_padding(load_checkpoint):
    """Prefill padded left, in one piece and in two; the states are those of the rows alone."""
    known = load_checkpoint(TEXT)
    ids, mask = known.ref["left_input_ids"], known.ref["left_attention_mask"]
    run = jax.jit(known.model.hidden)
    whole, cache = run(known.params, ids, mask, cache=known.model.init_cache(3, 172))
    split, pieces = known.model.init_cache(3, 172), []
    for first, last in ((0, 100), (100, 171), (171, 172)):
        hidden, split = run(known.params, ids[:, first:last], mask[:, first:last], cache=split)
        pieces.append(hidden)
    real = mask == 1
    np.testing.assert_allclose(np.concatenate(pieces, 1)[real], whole[real], atol=3e-4, rtol=0)
    np.testing.assert_allclose(split.state, cache.state, atol=1e-4, rtol=0)
    np.testing.assert_allclose(split.window, cache.window, atol=1e-4, rtol=0)
    right, right_mask = known.ref["right_input_ids"], known.ref["right_attention_mask"]
    _, other = run(known.params, right, right_mask, cache=known.model.init_cache(3, 172))
    np.testing.assert_allclose(other.state, cache.state, atol=1e-4, rtol=0)
    np.testing.assert_allclose(other.window, cache.window, atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def small():
    """Two groups of two layers, and every linear weight a target."""
    config = ModelConfig.from_hf(
        {
            "model_type": "qwen3_5_text", "hidden_act": "silu", "vocab_size": 32, "hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "full_attention_interval": 2,
            "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "attn_output_gate": True,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        }
    )  # fmt: skip
    return CausalLM(config, scan_unroll=1)


def test_sketches_are_projected_dense_gradients(small, random_params):
    """A G for the target kinds of both kinds of layers, decay and write strength included, and the predicted KL."""
    targets = (r"_proj\.weight$", r"linear_attn\.(in_proj_\w+|out_proj)\.weight$")
    spec = SketchSpec(rank=4, seed=9, targets=targets, names=small.weight_names())
    params = random_params(small)
    train, frozen = spec.split(params)
    ids = np.random.default_rng(5).integers(0, 32, (2, 7), dtype=np.int32)
    logits = lambda train, model=small: model.logits(merge(train, frozen), ids)
    run_logits = jax.jit(logits)
    loss = lambda train, model: jnp.square(logits(train, model)).mean()
    dense = jax.jit(jax.grad(lambda train: loss(train, small)))(train)
    run = sketched_value_and_grad(lambda train: loss(train, small.replace(remat="full")), spec, materialize=False)
    _, grads = jax.jit(lambda train: run(train, step=3))(train)
    names = {path: found for path, found in small.weight_names().items() if path in spec.matrices(train)}
    assert len(names) == 4 + 3 + 5
    for path, found in names.items():
        whole, sketch = dense, grads
        for key in path.split("/"):
            whole, sketch = whole[key], sketch[key]
        whole, sketch = (x.reshape(len(found), *x.shape[-2:]) for x in (whole, sketch))
        expected = [signs(9, 3, n, 4, g.shape[0]) / 2 @ g for n, g in zip(found, np.asarray(whole), strict=True)]
        atol = 2e-5 * np.abs(expected).max()
        np.testing.assert_allclose(sketch, np.stack(expected), atol=atol, rtol=0, err_msg=path)

    # Half the variance of the logits' change under the step, here from the difference of two forward passes.
    step = jax.tree.map(lambda g: -1e-3 * g / jnp.abs(g).max(), grads)
    q = jax.jit(lambda step: predict_kl(logits, train, spec, step=3, mask=jnp.ones((2, 7)))(step))(step)

    def moved(sign):
        there = jax.tree.map(lambda x: x, train)
        for path, found in names.items():
            *parents, last = path.split("/")
            here, change = there, step
            for key in parents:
                here, change = here[key], change[key]
            kernel, steps = here[last], change[last].reshape(len(found), 4, -1)
            rows = [signs(9, 3, n, 4, kernel.shape[-2]).T / 2 @ d for n, d in zip(found, steps, strict=True)]
            here[last] = kernel + sign * jnp.asarray(np.stack(rows).reshape(kernel.shape), jnp.float32)
        return np.asarray(run_logits(there), np.float64)

    change = (moved(1) - moved(-1)) / 2
    base = np.asarray(run_logits(train), np.float64)
    probability = np.exp(base - base.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    centred = change - (probability * change).sum(-1, keepdims=True)
    np.testing.assert_allclose(q, (0.5 * probability * centred**2).sum(-1).mean(), rtol=5e-3)


def test_multimodal_folders_come_back_to_the_byte(fixtures, load_checkpoint, tmp_path):
    model, params = load_hf(fixtures / MULTIMODAL)
    text = load_checkpoint(TEXT)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, text.params))
    assert (model.config, model.end_ids) == (text.model.config, text.model.end_ids)
    assert model.weight_names() == text.model.weight_names()
    save_hf(model, params, tmp_path / "back")
    for path in (tmp_path / "back").iterdir():
        assert path.read_bytes() == (fixtures / MULTIMODAL / path.name).read_bytes(), path.name
    save_hf(model, params, tmp_path / "narrow", dtype="bfloat16")
    raw = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert (raw["dtype"], raw["text_config"]["dtype"], raw["vision_config"]["dtype"]) == ("bfloat16",) * 2 + (
        "float32",
    )
    longer, _ = load_hf(fixtures / MULTIMODAL, max_position_embeddings=77, rope_theta=5.0)
    save_hf(longer, params, tmp_path / "longer")
    text_config = json.loads((tmp_path / "longer" / "config.json").read_text())["text_config"]
    assert (text_config["max_position_embeddings"], text_config["rope_parameters"]["rope_theta"]) == (77, 5.0)


def test_tensors_that_are_missing_or_foreign(fixtures, tmp_path):
    for number, (change, message) in enumerate(
        (
            (
                lambda t: t.pop("model.language_model.layers.1.linear_attn.A_log"),
                r"lacks model\.layers\.1\.linear_attn\.A_log",
            ),
            (lambda t: t.update({"model.audio.x": np.zeros(2, np.float32)}), r"holds model\.audio\.x"),
            (lambda t: t.update({"model.norm.weight": np.zeros(64, np.float32)}), "is the same tensor as"),
        )
    ):
        folder = tmp_path / str(number)
        shutil.copytree(fixtures / MULTIMODAL, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=message):
            load_hf(folder)


LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [LINEAR, FULL, LINEAR, LINEAR]}, "layer_types.*equal groups"),
        ({"layer_types": [LINEAR] * 4}, "layer_types.*equal groups"),
        ({"layer_types": [LINEAR, "sliding_attention", LINEAR, FULL]}, "layer_types.*sliding_attention"),
        ({"full_attention_interval": 2}, "full_attention_interval is 2: layer_types has full attention every 4"),
        ({"layer_types": None}, "layer_types is None: give it, or full_attention_interval"),
        ({"layer_types": None, "full_attention_interval": 3}, r"num_hidden_layers \(4\) is not a multiple"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': only 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ({"model_type": "qwen3_5_vision"}, "model_type is 'qwen3_5_vision': supported are .* its text part"),
    ],
)
def test_configurations_that_contradict_themselves(fixtures, changes, message):
    raw = json.loads((fixtures / TEXT / "config.json").read_text()) | changes
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (["text_config"], r"config\.json has a vision_config and no text_config: only text models are supported"),
        (["text_config", "model_type"], "has a vision_config and no text_config"),
    ],
)
def test_configurations_of_images_alone(fixtures, left_out, message):
    raw = json.loads((fixtures / MULTIMODAL / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf({key: value for key, value in raw.items() if key not in left_out})


def test_a_written_configuration_reads_back(load_checkpoint):
    config = load_checkpoint(TEXT).model.config
    assert ModelConfig.from_hf(config.to_hf("float32")) == config


def test_initial_weights(small):
    params = jax.jit(small.init_params)(jax.random.key(0))
    layers = params["layers"]
    assert (layers["input_layernorm"]["scale"] == 0).all()  # of zero-centred norms
    assert (layers["linear_attn"]["norm"]["scale"] == 1).all()
    rate = np.exp(np.asarray(layers["linear_attn"]["A_log"]))
    assert ((rate > 0) & (rate <= 16)).all()
    assert (layers["linear_attn"]["dt_bias"] == 1).all()


def test_texts_that_share_a_row_are_texts_alone(load_checkpoint):
    """Four texts in one row of 150 slots, with bounds inside chunks: neither convolution nor state cross them."""
    known = load_checkpoint(TEXT)
    lengths, rng = (70, 3, 1, 66), np.random.default_rng(4)
    texts = [rng.integers(0, 300, (1, length), dtype=np.int32) for length in lengths]
    ids = np.concatenate([*texts, np.zeros((1, 10), np.int32)], 1)
    segments = jnp.asarray(np.repeat(np.int32([5, 2, 9, 1, 0]), [*lengths, 10])[None])
    packed = jax.jit(lambda p: known.model.hidden(p, ids, segments=segments))(known.params)
    padded = np.concatenate([np.pad(text, ((0, 0), (0, 70 - text.shape[1]))) for text in texts])
    mask = np.arange(70)[None] < np.asarray(lengths)[:, None]
    alone = jax.jit(lambda p: known.model.hidden(p, padded, mask))(known.params)
    np.testing.assert_allclose(packed[0, :140], np.asarray(alone)[mask], atol=3e-4, rtol=0)
    assert np.isfinite(packed).all()


def test_bfloat16_is_as_close_to_float32_as_torch_bfloat16_is(load_checkpoint):
    """Mean KL(float32 || bfloat16) over real tokens at most twice torch's own, and greedy tokens wherever that allows.

    Torch 2.13 with transformers 5.24 has 0.00117 on this batch, against its own float32 logits (dense fixtures: 0.0002
    to 0.0004). A KL of q is a deviation of sqrt(2 q) per logit.
    """
    known, torch_kl = load_checkpoint(TEXT), 0.00117
    mask = known.ref["right_attention_mask"]
    run = jax.jit(known.model.replace(compute_dtype="bfloat16").logits)
    wide, narrow = (
        np.asarray(jax.nn.log_softmax(jnp.asarray(logits, jnp.float32)), np.float64)[mask == 1]
        for logits in (known.ref["right_logits"], run(known.params, known.ref["right_input_ids"], mask))
    )
    kl = (np.exp(wide) * (wide - narrow)).sum(-1).mean()
    assert 0 < kl <= 2 * torch_kl
    first, second = np.sort(wide)[:, -1], np.sort(wide)[:, -2]
    clear = first - second > 4 * 2 * np.sqrt(torch_kl)  # four deviations of a difference of two logits
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(wide.argmax(-1)[clear], narrow.argmax(-1)[clear])
