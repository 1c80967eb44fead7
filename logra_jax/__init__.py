"""Gradient sketches, RowAdam and predicted-KL steps for reinforcement learning of language models in JAX.

The optimizer's names are here; they are loaded when first used, so that `import logra_jax` alone imports no
jax.
"""

from typing import TYPE_CHECKING, Any

from logra_jax import optim as _optim
from logra_jax.errors import UserError as UserError

if TYPE_CHECKING:
    from logra_jax.optim import *  # noqa: F403


__all__ = [*_optim.EXPORTS, "UserError"]  # what help() shows


def __getattr__(name: str) -> Any:
    if name not in _optim.EXPORTS:
        known = ", ".join(__dir__())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {known}")
    return getattr(_optim, name)


def __dir__() -> list[str]:
    return sorted(__all__)
