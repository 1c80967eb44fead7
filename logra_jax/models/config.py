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
}

# What an absent key means in these three model types: the defaults of the format itself, not of this library.
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
}


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder of the Qwen2, Qwen3 or Llama family.

    `rope_theta` is the base of the rotary frequencies; `max_position_embeddings` is the length the model was
    made for, in tokens. The `*_bias` switches and `qk_norm` say which parameters exist.
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
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} is odd, but rotary positions turn pairs of dimensions")

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
        Raises UserError for a missing or ill-typed key and for any feature that the decoder does not have:
        what is not understood is never ignored.
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
        return dict(sorted(out.items()))


class _Reader:
    """Typed access to the keys of one config.json, with the file's name in every message."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where

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

    def theta(self, override: float | None) -> float:
        """Rotary base, after making sure that nothing but plain rotary positions is asked for."""
        found: Any = None
        for name in ("rope_parameters", "rope_scaling"):
            rope = self.key(name, (dict,))
            if rope is None:
                continue
            for key in ("rope_type", "type"):
                if key in rope and rope[key] != "default":
                    self.refuse(f"{name}.{key}", rope[key], "only rope_type 'default' is supported")
            if "partial_rotary_factor" in rope and rope["partial_rotary_factor"] != 1:
                factor = rope["partial_rotary_factor"]
                self.refuse(f"{name}.partial_rotary_factor", factor, "only full rotation (1.0) is supported")
            if "rope_theta" in rope:
                found = rope["rope_theta"]
        if override is not None:
            return float(override)
        if found is None:
            found = self.key("rope_theta", (int, float))
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.refuse("rope_theta", found, "expected a number")
        return float(found)

    def config(self, rope_theta: float | None, max_positions: int | None) -> ModelConfig:
        model_type = self.key("model_type", (str,))
        if model_type not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            self.refuse("model_type", model_type, f"supported are {known}")
        if self.key("quantization_config", (dict,)) is not None:
            self.refuse("quantization_config", "set", "quantised weights cannot be trained; use the original")
        if (act := self.key("hidden_act", (str,))) != "silu":
            self.refuse("hidden_act", act, "only 'silu' is supported")
        for name in ("use_sliding_window", "use_mrope"):
            if self.key(name, (bool,)):
                self.refuse(name, True, "only full attention over plain positions is supported; set it to false")
        layers = self.key("num_hidden_layers", (int,))
        kinds = self.key("layer_types", (list,))
        if kinds is not None and set(kinds) != {"full_attention"}:
            self.refuse("layer_types", sorted(map(str, set(kinds))), "only 'full_attention' is supported")
        if kinds is not None and len(kinds) != layers:
            self.refuse("layer_types", f"{len(kinds)} entries", f"num_hidden_layers is {layers}")
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
                rope_theta=self.theta(rope_theta),
                max_position_embeddings=max_positions,
                tie_word_embeddings=self.key("tie_word_embeddings", (bool,)),
                qkv_bias=model_type == "qwen2" or bias,
                o_bias=bias,
                mlp_bias=model_type == "llama" and self.key("mlp_bias", (bool,)),
                qk_norm=model_type == "qwen3",
                initializer_range=float(self.key("initializer_range", (int, float))),
            )
        except UserError as error:
            message = str(error)
            raise UserError(message if self.where in message else f"{self.where}: {message}") from None
