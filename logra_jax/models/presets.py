"""Sizes of published models, for planning a run before its weights have been fetched. Free of jax.

The numbers are those of the models' `config.json` files; a folder with weights always speaks for itself.
"""

from __future__ import annotations

import difflib

from logra_jax.errors import UserError
from logra_jax.models.config import LinearAttention, ModelConfig


def _qwen2(
    layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, vocab: int, theta: float, positions: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        model_type="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-6,
        rope_theta=theta,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        qkv_bias=True,
    )


def _qwen3(layers: int, hidden: int, mlp: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,  # its own field: heads x head_dim is not the hidden size everywhere
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
        qkv_bias=False,
        qk_norm=True,
    )


# Qwen3.5-27B, 3.6-27B and 3.8-27B have the same sizes.
_QWEN3_5_27B = ModelConfig(
    model_type="qwen3_5_text",
    vocab_size=248320,
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position_embeddings=262144,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=True,
    partial_rotary_factor=0.25,
    output_gate=True,
    zero_centered_norms=True,
    full_attention_interval=4,
    linear_attention=LinearAttention(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_width=4),
)

PRESETS: dict[str, ModelConfig] = {
    "qwen2.5-math-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, 1e4, 4096, tied=True),
    "qwen2.5-math-7b": _qwen2(28, 3584, 18944, 28, 4, 152064, 1e4, 4096, tied=False),
    "deepseek-r1-distill-qwen-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, 1e4, 131072, tied=False),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 151936, 1e6, 32768, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, 1e6, 32768, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 152064, 1e6, 32768, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3.5-27b": _QWEN3_5_27B,
    "qwen3.6-27b": _QWEN3_5_27B,
    "qwen3.8-27b": _QWEN3_5_27B,
    "smollm2-135m-instruct": ModelConfig(
        model_type="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        qkv_bias=False,
    ),
}

# What makes two models need the same memory; rotary base and length limit can be set apart from them.
_SIZES = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "qkv_bias",
    "qk_norm",
    "full_attention_interval",
    "linear_attention",
]


def check_preset(name: str) -> None:
    """Raise UserError, with the list of presets, for a name that is not among them."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        meant = f": did you mean {near[0]}?" if near else ""
        raise UserError(f"model.preset={name!r} is not known{meant} Presets: {', '.join(PRESETS)}")


def differences(name: str, found: ModelConfig) -> list[str]:
    """Sizes in which a model is not the preset of that name, as texts such as `hidden_size 64 (preset: 128)`."""
    expected = PRESETS[name]
    return [
        f"{key} {getattr(found, key)} (preset: {getattr(expected, key)})"
        for key in _SIZES
        if getattr(found, key) != getattr(expected, key)
    ]
