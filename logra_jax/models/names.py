"""The one table between parameter paths and Hugging Face tensor names. Free of jax, for rollout engines.

A Hugging Face linear weight is `[out, in]`; the kernel here is its transpose `[in, out]`. Layers are stacked
on axis 0 here, those that have the weight, and numbered in the name there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from logra_jax.models.config import ModelConfig

# A multimodal file has the tensors of its text model under the first prefix, and others beside them: an image
# encoder and a head that predicts several tokens, which are neither computed nor changed here.
MULTIMODAL_PREFIX, BESIDE_TEXT = "model.language_model.", ("model.visual.", "mtp.")


def text_name(stored: str) -> str | None:
    """The name of a stored tensor in a text-only file, None if it is none of the text model's."""
    if stored.startswith(MULTIMODAL_PREFIX):
        return "model." + stored.removeprefix(MULTIMODAL_PREFIX)
    return None if stored.startswith(BESIDE_TEXT) else stored


class HfName(NamedTuple):
    """Where a leaf lives in a Hugging Face file: its name, with `{}` for the layer of a stacked leaf.

    layers: numbers of the layers that are stacked, None for a leaf that is not a stack. stack: the axes that they
    are stacked on, in C order: one, or in hybrid models groups of layers and the layers of a group. transpose: the
    file has the transpose of one layer's matrix; unit_axis: with an axis of size 1 in its middle.
    """

    template: str
    layers: tuple[int, ...] | None = None
    stack: tuple[int, ...] = ()
    transpose: bool = False
    unit_axis: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in the order of the stacking axis; one name for a leaf that is not stacked."""
        if self.layers is None:
            return (self.template,)
        return tuple(self.template.format(layer) for layer in self.layers)

    def to_file(self, value: Any) -> Any:
        """One layer's value as the file has it."""
        value = value.T if self.transpose else value
        return value[:, None] if self.unit_axis else value

    def from_file(self, value: Any) -> Any:
        """What the file has as one layer's value."""
        value = value[:, 0] if self.unit_axis else value
        return value.T if self.transpose else value

    def file_shape(self, shape: tuple[Any, ...], unit: Any = 1) -> tuple[Any, ...]:
        """Shape of the tensor in the file for that of the whole leaf, or what else goes by axes, with its `unit`."""
        one = shape[len(self.stack) :]
        one = one[::-1] if self.transpose else one
        return (one[0], unit, *one[1:]) if self.unit_axis else one


def name_table(config: ModelConfig) -> dict[str, HfName]:
    """Every parameter of the model, `"layers/mlp/up_proj/kernel"` -> its name in a Hugging Face file.

    The names are those of a text model; a multimodal file has `model.language_model.` for `model.`.
    """
    table = {
        "embed_tokens/embedding": HfName("model.embed_tokens.weight"),
        "norm/scale": HfName("model.norm.weight"),
    }
    if not config.tie_word_embeddings:
        table["lm_head/kernel"] = HfName("lm_head.weight", transpose=True)
    every, full, linear = tuple(range(config.num_hidden_layers)), config.full_layers, config.linear_layers

    def stacked(layers: tuple[int, ...], path: str, leaf: str, suffix: str = ".weight", **form: bool) -> None:
        name = f"model.layers.{{}}.{path.replace('/', '.')}{suffix}"
        of_group = len(layers) // len(full)  # one full layer each
        stack = (len(full),) if of_group == 1 and layers == full else (len(full), of_group)
        table[f"layers/{path}/{leaf}".removesuffix("/")] = HfName(name, layers, stack, **form)

    def linears(layers: tuple[int, ...], block: str, names: str, bias: bool = False) -> None:
        for name in names.split():
            stacked(layers, f"{block}/{name}", "kernel", transpose=True)
            if bias:
                stacked(layers, f"{block}/{name}", "bias", ".bias")

    for norm in ("input_layernorm", "post_attention_layernorm"):
        stacked(every, norm, "scale")
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            stacked(full, f"self_attn/{norm}", "scale")
    linears(full, "self_attn", "q_proj k_proj v_proj", config.qkv_bias)
    linears(full, "self_attn", "o_proj", config.o_bias)
    linears(every, "mlp", "gate_proj up_proj down_proj", config.mlp_bias)
    if config.linear_attention is not None:
        linears(linear, "linear_attn", "in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj")
        stacked(linear, "linear_attn/conv1d", "kernel", transpose=True, unit_axis=True)
        stacked(linear, "linear_attn/norm", "scale")
        for name in ("A_log", "dt_bias"):
            stacked(linear, f"linear_attn/{name}", "", "")
    return table
