"""Language models in Flax NNX, loaded from and saved to Hugging Face folders.

The names are resolved on first use, so that `logra_jax.models.config` and `.names` stay free of jax and flax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra_jax.models.cache import Cache
    from logra_jax.models.config import ModelConfig
    from logra_jax.models.decoder import CausalLM
    from logra_jax.models.hf import load_hf
    from logra_jax.models.save import save_hf

_HOMES = {
    "Cache": "cache",
    "ModelConfig": "config",
    "CausalLM": "decoder",
    "load_hf": "hf",
    "save_hf": "save",
}

__all__ = ["Cache", "CausalLM", "ModelConfig", "load_hf", "save_hf"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
