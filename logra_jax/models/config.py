"""Sizes and switches of one decoder, read from and written to a Hugging Face `config.json`. Free of jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logra_jax.errors import UserError

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}


# What an absent key means in these model types: the defaults of the format itself, not of this library.
# Sizes have none, since the library that wrote the file may have had others than the one that reads it.
_ABSENT: dict[str, Any] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "use_mrope": False,
    "layer_types": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "quantization_config": None,
    "partial_rotary_factor": None,
    "full_attention_interval": None,
    "attn_output_gate": True,
    "output_gate_type": "swish",
}


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of the gated delta layers of a hybrid model; `value_heads` is a multiple of `key_heads`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise UserError(f"linear attention: {field.name} is {getattr(self, field.name)}, but must be above 0")
        if self.value_heads % self.key_heads:
            raise UserError(
                f"linear_num_value_heads ({self.value_heads}) is not a multiple of linear_num_key_heads "
                f"({self.key_heads}), so value heads cannot share key heads evenly"
            )
        if self.conv_width < 2:
            raise UserError(f"linear_conv_kernel_dim is {self.conv_width}, but a convolution needs at least 2 taps")

    @property
    def key_size(self) -> int:
        """Rows of the queries, and of the keys."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Rows of the values, of the gate, and of what the output projection reads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Rows of queries, keys and values together, which pass the convolution."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True)
class ModelConfig:
    """One decoder of the Qwen2, Qwen3, Qwen3.5 or Llama family.

    `rope_theta` is the base of the rotary frequencies, `partial_rotary_factor` the share of each head that turns;
    `max_position_embeddings` is the length the model was made for, in tokens. The `*_bias` switches and `qk_norm`
    say which parameters exist. `output_gate`: the query projection also makes a gate on what attention returns.
    `zero_centered_norms`: a norm multiplies by 1 + scale. Every `full_attention_interval`-th layer is full
    attention; where that is not 1, the others are gated delta layers of the sizes in `linear_attention`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    partial_rotary_factor: float = 1.0
    output_gate: bool = False
    zero_centered_norms: bool = False
    full_attention_interval: int = 1
    linear_attention: LinearAttention | None = None

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            raise UserError(
                f"model_type {self.model_type!r} is not known; known are {', '.join(sorted(ARCHITECTURES))}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and not value > 0 and field.name != "initializer_range":
                raise UserError(f"{field.name} is {value}, but must be above 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads}), so query heads cannot share key heads evenly"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            share = self.partial_rotary_factor
            odd = "odd" if share == 1 else f"times partial_rotary_factor {share} not an even number"
            raise UserError(f"head_dim {self.head_dim} is {odd}, but rotary positions turn pairs of dimensions")
        if (self.full_attention_interval == 1) != (self.linear_attention is None):
            raise UserError(
                f"full_attention_interval is {self.full_attention_interval}, and sizes of the layers between are "
                f"{'missing' if self.linear_attention is None else 'given'}: a hybrid model has both"
            )
        if self.num_hidden_layers % self.full_attention_interval:
            raise UserError(
                f"num_hidden_layers ({self.num_hidden_layers}) is not a multiple of full_attention_interval "
                f"({self.full_attention_interval}): the last layer has to be full attention"
            )

    @property
    def hybrid(self) -> bool:
        """Whether some layers are gated delta layers; files of such models may be multimodal."""
        return self.linear_attention is not None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of each head that rotary positions turn, the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with full attention."""
        every = self.full_attention_interval
        return tuple(range(every - 1, self.num_hidden_layers, every))

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Numbers of the gated delta layers."""
        return tuple(sorted(set(range(self.num_hidden_layers)) - set(self.full_layers)))

    @property
    def q_size(self) -> int:
        """Rows of the fused query projection: heads times head_dim (not always hidden_size)."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key and of the value projection."""
        return self.num_key_value_heads * self.head_dim

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(
        cls,
        raw: Mapping[str, Any],
        *,
        where: str = "config.json",
        rope_theta: float | None = None,
        max_position_embeddings: int | None = None,
    ) -> ModelConfig:
        """Read the content of a `config.json`, in either dialect (`rope_theta` or `rope_parameters`).

        `where` names the file in messages; `rope_theta` and `max_position_embeddings` override what it says.
        Raises UserError for a missing or ill-typed key and for any feature of these model types that the decoder
        does not have. Keys that are none of theirs mean nothing, as in transformers. A multimodal file
        (`text_config`) gives its text model.
        """
        return _Reader(raw, where).config(rope_theta, max_position_embeddings)

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """The `config.json` of a model that never had one (current dialect); `dtype`: of its weights."""
        out: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "dtype": dtype,
            "hidden_act": "silu",
            "model_type": self.model_type,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
        }
        same = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
            "num_key_value_heads rms_norm_eps max_position_embeddings tie_word_embeddings initializer_range"
        )
        out |= {name: getattr(self, name) for name in same.split()}
        if self.model_type == "qwen2":
            out["use_sliding_window"] = False
        else:
            out["attention_bias"] = self.o_bias
        if self.model_type == "qwen3":
            out["use_sliding_window"] = False
        if self.model_type == "llama":
            out["mlp_bias"] = self.mlp_bias
        if self.linear_attention is not None:
            sizes = self.linear_attention
            out["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
            out |= {
                "layer_types": [
                    "full_attention" if layer in self.full_layers else "linear_attention"
                    for layer in range(self.num_hidden_layers)
                ],
                "full_attention_interval": self.full_attention_interval,
                "attn_output_gate": self.output_gate,
                "linear_num_key_heads": sizes.key_heads,
                "linear_num_value_heads": sizes.value_heads,
                "linear_key_head_dim": sizes.key_dim,
                "linear_value_head_dim": sizes.value_dim,
                "linear_conv_kernel_dim": sizes.conv_width,
            }
        return dict(sorted(out.items()))


class _Reader:
    """Typed access to the keys of one config.json, with the file's name in every message."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        text = raw.get("text_config")
        if raw.get("model_type") == "qwen3_5" and isinstance(text, Mapping):
            # A multimodal file: its text model is all that is read. What it leaves out stands outside.
            outer = {k: raw[k] for k in ("tie_word_embeddings",) if k in raw}
            self.raw, self.where = outer | dict(text), f"{where} (text_config)"
        elif raw.get("vision_config") and not isinstance(text, Mapping):
            raise UserError(f"{where} has a vision_config and no text_config: only text models are supported")

    def key(self, name: str, kinds: tuple[type, ...]) -> Any:
        if name not in self.raw:
            if name in _ABSENT:
                return _ABSENT[name]
            raise UserError(f"{self.where} lacks the key {name!r}; it is not a complete model configuration")
        value = self.raw[name]
        if value is None and name in _ABSENT:
            return _ABSENT[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise UserError(f"{self.where}: {name} is {value!r}, expected {wanted}")
        return value

    def refuse(self, name: str, value: object, why: str) -> None:
        raise UserError(f"{self.where}: {name} is {value!r}: {why}")

    def rope(self, override: float | None, hybrid: bool) -> tuple[float, float]:
        """Rotary base and share of a head that turns, after making sure that nothing else is asked for."""
        found: Any = None
        share: Any = self.key("partial_rotary_factor", (int, float))
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.key(name, (dict,))
            if rope is None:
                continue
            for key in ("rope_type", "type"):
                if key in rope and rope[key] != "default":
                    self.refuse(f"{name}.{key}", rope[key], "only rope_type 'default' is supported")
            share = rope.get("partial_rotary_factor", share)
            found = rope.get("rope_theta", found)
        share = 1.0 if share is None else share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            self.refuse("partial_rotary_factor", share, "expected a number above 0 and at most 1")
        if share != 1 and not hybrid:
            self.refuse("partial_rotary_factor", share, "only full rotation (1.0) is supported for this model_type")
        if override is not None:
            return float(override), float(share)
        if found is None:
            found = self.key("rope_theta", (int, float))
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.refuse("rope_theta", found, "expected a number")
        return float(found), float(share)

    def interval(self, layers: int, hybrid: bool) -> int:
        """Every how many layers full attention comes, from layer_types or full_attention_interval, which must agree."""
        kinds, stated = self.key("layer_types", (list,)), self.key("full_attention_interval", (int,))
        names = ("full_attention", "linear_attention") if hybrid else ("full_attention",)
        if kinds is not None and (odd := sorted({str(kind) for kind in kinds} - set(names))):
            self.refuse("layer_types", odd, f"supported are {', '.join(map(repr, names))}")
        if kinds is not None and len(kinds) != layers:
            self.refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
        if not hybrid:
            return 1
        if kinds is None and stated is None:
            self.refuse("layer_types", None, "give it, or full_attention_interval")
        if kinds is None:
            return int(stated)
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
        if (
            every < 2
            or layers % every
            or kinds != (["linear_attention"] * (every - 1) + ["full_attention"]) * (layers // every)
        ):
            self.refuse("layer_types", kinds, "supported are equal groups of linear layers that end with a full one")
        if stated is not None and stated != every:
            self.refuse("full_attention_interval", stated, f"layer_types has full attention every {every} layers")
        return every

    def linear_attention(self) -> LinearAttention:
        """Sizes of the gated delta layers, after making sure that their gates are those that are computed."""
        if (gate := self.key("output_gate_type", (str,))) != "swish":
            self.refuse("output_gate_type", gate, "only 'swish' is supported")
        if not self.key("attn_output_gate", (bool,)):
            self.refuse("attn_output_gate", False, "only attention with an output gate is supported")
        return LinearAttention(
            key_heads=self.key("linear_num_key_heads", (int,)),
            value_heads=self.key("linear_num_value_heads", (int,)),
            key_dim=self.key("linear_key_head_dim", (int,)),
            value_dim=self.key("linear_value_head_dim", (int,)),
            conv_width=self.key("linear_conv_kernel_dim", (int,)),
        )

    def config(self, rope_theta: float | None, max_positions: int | None) -> ModelConfig:
        model_type = self.key("model_type", (str,))
        if model_type not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            self.refuse(
                "model_type", model_type, f"supported are {known}; of a multimodal model (qwen3_5) its text part"
            )
        if self.key("quantization_config", (dict,)) is not None:
            self.refuse("quantization_config", "set", "quantised weights cannot be trained; use the original")
        if (act := self.key("hidden_act", (str,))) != "silu":
            self.refuse("hidden_act", act, "only 'silu' is supported")
        for name in ("use_sliding_window", "use_mrope"):
            if self.key(name, (bool,)):
                self.refuse(name, True, "only full attention over plain positions is supported; set it to false")
        layers = self.key("num_hidden_layers", (int,))
        hybrid = model_type == "qwen3_5_text"
        theta, share = self.rope(rope_theta, hybrid)
        heads, hidden = self.key("num_attention_heads", (int,)), self.key("hidden_size", (int,))
        head_dim = self.key("head_dim", (int,))
        if head_dim is None:
            if heads < 1 or hidden % heads:
                self.refuse("num_attention_heads", heads, f"hidden_size {hidden} is not a multiple of it")
            head_dim = hidden // heads
        kv_heads = self.key("num_key_value_heads", (int,))
        # Qwen2 has query, key and value biases in every file and no key that says so.
        bias = self.key("attention_bias", (bool,)) and model_type != "qwen2"
        if max_positions is None:
            max_positions = self.key("max_position_embeddings", (int,))
        try:
            return ModelConfig(
                model_type=model_type,
                vocab_size=self.key("vocab_size", (int,)),
                hidden_size=hidden,
                intermediate_size=self.key("intermediate_size", (int,)),
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads if kv_heads is None else kv_heads,
                head_dim=head_dim,
                rms_norm_eps=float(self.key("rms_norm_eps", (int, float))),
                rope_theta=theta,
                max_position_embeddings=max_positions,
                tie_word_embeddings=self.key("tie_word_embeddings", (bool,)),
                qkv_bias=model_type == "qwen2" or bias,
                o_bias=bias,
                mlp_bias=model_type == "llama" and self.key("mlp_bias", (bool,)),
                qk_norm=model_type == "qwen3" or hybrid,
                initializer_range=float(self.key("initializer_range", (int, float))),
                partial_rotary_factor=share,
                output_gate=hybrid,
                zero_centered_norms=hybrid,
                full_attention_interval=self.interval(layers, hybrid),
                linear_attention=self.linear_attention() if hybrid else None,
            )
        except UserError as error:
            message = str(error)
            raise UserError(message if self.where in message else f"{self.where}: {message}") from None
