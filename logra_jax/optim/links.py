"""What several links of a chain need: parameters, states of others, numbers that may be schedules."""

from typing import Any

import jax
import jax.numpy as jnp

from logra_jax._shapes import Array, Float
from logra_jax.errors import UserError


def needs_params(link: str, params: Any) -> Any:
    """The parameters, or an error that says which link needs them."""
    if params is None:
        raise UserError(f"{link}: needs the parameters; call tx.update(updates, state, params)")
    return params


def find_states(state: Any, kind: type) -> list[Any]:
    """All states of one kind in an optimizer state, however deep."""

    def is_kind(node):
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(node)]


def value_at(number_or_schedule: Any, count: Any) -> Float[Array, ""]:
    """A number, or a schedule's value at an update, as a float32 scalar."""
    value = number_or_schedule(count) if callable(number_or_schedule) else number_or_schedule
    return jnp.asarray(value, jnp.float32)


def all_finite(tree: Any) -> Any:
    """Whether every float in a tree is finite, as a bool scalar."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats])) if floats else jnp.asarray(True)
