"""The one table between parameter paths and Hugging Face tensor names. Free of jax, for rollout engines.

A Hugging Face linear weight is `[out, in]`; the kernel here is its transpose `[in, out]`. Layers are stacked
on axis 0 here and numbered in the name there.
"""

from __future__ import annotations

from typing import NamedTuple

from logra_jax.models.config import ModelConfig


class HfName(NamedTuple):
    """Where a leaf lives in a Hugging Face file: its name, with `{}` for the layer of a stacked leaf."""

    template: str
    transpose: bool = False

    def names(self, layers: int) -> tuple[str, ...]:
        """Tensor names in the order of the stacking axis; one name for a leaf that is not stacked."""
        if "{}" not in self.template:
            return (self.template,)
        return tuple(self.template.format(layer) for layer in range(layers))


def name_table(config: ModelConfig) -> dict[str, HfName]:
    """Every parameter of the model, `"layers/mlp/up_proj/kernel"` -> its name in a Hugging Face file."""
    table = {
        "embed_tokens/embedding": HfName("model.embed_tokens.weight"),
        "norm/scale": HfName("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        table["lm_head/kernel"] = HfName("lm_head.weight", transpose=True)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        table[f"layers/{norm}/scale"] = HfName(f"model.layers.{{}}.{norm}.weight")
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            table[f"layers/self_attn/{norm}/scale"] = HfName(f"model.layers.{{}}.self_attn.{norm}.weight")
    linears = [("self_attn", name, config.qkv_bias) for name in ("q_proj", "k_proj", "v_proj")]
    linears += [("self_attn", "o_proj", config.o_bias)]
    linears += [("mlp", name, config.mlp_bias) for name in ("gate_proj", "up_proj", "down_proj")]
    for block, name, bias in linears:
        here, there = f"layers/{block}/{name}", f"model.layers.{{}}.{block}.{name}"
        table[f"{here}/kernel"] = HfName(f"{there}.weight", transpose=True)
        if bias:
            table[f"{here}/bias"] = HfName(f"{there}.bias")
    return table
