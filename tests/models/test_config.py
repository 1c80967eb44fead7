"""Reading config.json: both dialects, derived sizes, and a refusal for whatever is not computed."""

import json
import subprocess
import sys

import pytest

from logra_jax.errors import UserError
from logra_jax.models import CausalLM, ModelConfig

# Qwen2.5-0.5B, older dialect.
QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = QWEN2 | {"model_type": "llama", "attention_bias": True, "mlp_bias": True}


def tensors(raw):
    """Every tensor of the model's files -> shape in file orientation, from parameter shapes and names."""
    model = CausalLM(ModelConfig.from_hf(raw))
    out = {}
    for path, names in model.weight_names().items():
        leaf = model.abstract_params()
        for key in path.split("/"):
            leaf = leaf[key]
        shape = leaf.shape[1:] if path.startswith("layers/") else leaf.shape
        out |= dict.fromkeys(names, shape[::-1] if path.endswith("kernel") else shape)
    return out


def test_qwen2_has_biases_on_q_k_v_alone_without_a_key_that_says_so():
    found = tensors(QWEN2)
    biases = {name for name in found if name.endswith(".bias")}
    assert len(found) == 290
    assert biases == {f"model.layers.{n}.self_attn.{p}_proj.bias" for n in range(24) for p in ("q", "k", "v")}
    assert tensors(QWEN2 | {"attention_bias": True, "mlp_bias": True}) == found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (  # Qwen3-0.6B
            {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
            | {"head_dim": 128},
            {"q_proj": (2048, 1024), "k_proj": (1024, 1024), "v_proj": (1024, 1024), "o_proj": (1024, 2048)}
            | {"q_norm": (128,), "k_norm": (128,)},
        ),
        (  # Qwen3-4B
            {"model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
            | {"head_dim": 128},
            {"q_proj": (4096, 2560), "k_proj": (1024, 2560), "o_proj": (2560, 4096)},
        ),
        ({}, {"q_proj": (896, 896), "k_proj": (128, 896)}),
        ({"head_dim": None}, {"q_proj": (896, 896), "k_proj": (128, 896)}),
    ],
)
def test_head_dim_is_read_when_present_and_derived_when_absent(changes, expected):
    found = tensors(QWEN2 | changes)
    for name, shape in expected.items():
        assert found[f"model.layers.0.self_attn.{name}.weight"] == shape


def test_llama_biases_follow_their_keys():
    both = {name.removeprefix("model.layers.0.") for name in tensors(LLAMA) if ".0." in name and "bias" in name}
    attention = {f"self_attn.{p}_proj.bias" for p in "qkvo"}
    mlp = {f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")}
    assert both == attention | mlp
    assert not any("bias" in name for name in tensors(LLAMA | {"attention_bias": False, "mlp_bias": False}))
    none = {key: value for key, value in LLAMA.items() if not key.endswith("bias")}
    assert not any("bias" in name for name in tensors(none))


def test_both_dialects_give_one_configuration():
    new = {key: value for key, value in QWEN2.items() if key not in ("rope_theta", "torch_dtype")}
    new |= {"rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "dtype": "bfloat16"}
    new |= {"layer_types": ["full_attention"] * 24}
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(QWEN2)
    assert ModelConfig.from_hf(new).rope_theta == 1e6
    assert ModelConfig.from_hf(QWEN2 | {"rope_scaling": None}) == ModelConfig.from_hf(QWEN2)


def test_theta_and_length_can_be_overridden():
    config = ModelConfig.from_hf(QWEN2, rope_theta=4e4, max_position_embeddings=16384)
    assert (config.rope_theta, config.max_position_embeddings) == (4e4, 16384)


@pytest.mark.parametrize("raw", [QWEN2, LLAMA, QWEN2 | {"model_type": "qwen3", "head_dim": 128}])
def test_a_written_configuration_reads_back_equal(raw):
    config = ModelConfig.from_hf(raw)
    written = json.loads(json.dumps(config.to_hf("bfloat16")))
    assert ModelConfig.from_hf(written) == config
    assert written["dtype"] == "bfloat16"
    assert written["architectures"] == [
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[raw["model_type"]]
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'.*supported are llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"use_mrope": True}, "use_mrope is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling.type is 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.rope_type is 'llama3'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
            "rope_parameters.rope_type is 'linear'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types is .*sliding_attention"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types is '3 entries'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "24"}, "num_hidden_layers is '24', expected int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 13}, "hidden_size 896 is not a multiple"),
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads \(14\) is not a multiple of num_key_value_heads \(3\)",
        ),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_file_and_the_key(changes, message):
    with pytest.raises(UserError, match=f"some/config.json: .*{message}"):
        ModelConfig.from_hf(QWEN2 | changes, where="some/config.json")


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "rms_norm_eps", "rope_theta", "hidden_act"])
def test_a_missing_key_is_named(key):
    raw = {name: value for name, value in QWEN2.items() if name != key}
    with pytest.raises(UserError, match=f"lacks the key '{key}'"):
        ModelConfig.from_hf(raw)


def test_configuration_and_names_need_neither_jax_nor_flax():
    code = (
        "import sys; import logra_jax.models.config, logra_jax.models.names, logra_jax.models.tokens;"
        " assert not {'jax', 'flax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
