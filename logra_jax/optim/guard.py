"""A chain that moves nothing when a number in it is not usable."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax._shapes import Array, Bool, Int
from logra_jax.errors import UserError
from logra_jax.optim.links import all_finite, find_states
from logra_jax.optim.predicted_kl import PredictedKLState


class GuardState(NamedTuple):
    """ok: whether the last update was usable. count: usable ones so far, int32. inner_state: that of the
    guarded transformation."""

    ok: Bool[Array, ""]
    count: Any
    inner_state: Any


def guard_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx`, inside the program without effect for gradients, updates or predictions that are not finite.

    Donated buffers leave no way back after a step, so the check is part of it. After a bad one all updates,
    weight decay included, are exactly zero and the state is what it was, counters included; only the flags
    tell: `step_ok(state)` is False, and the KL link's state has alpha 0, ok False and the unusable
    prediction. A KL link that found its own prediction unusable counts as bad too.

    Wrap the whole chain, `lift` included.
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: Any) -> GuardState:
        return GuardState(jnp.asarray(True), jnp.zeros((), jnp.int32), inner.init(params))

    def update_fn(updates: Any, state: GuardState, params: Any = None, **extra_args: Any) -> Any:
        new, after = inner.update(updates, state.inner_state, params, **extra_args)
        links = find_states(after, PredictedKLState)
        ok = all_finite(updates) & all_finite(new)
        for link in links:
            ok = ok & link.ok
        ok = ok & ~_broken(state.inner_state, after)

        def select(kept: Any, moved: Any) -> Any:
            if isinstance(moved, PredictedKLState):
                return PredictedKLState(
                    count=jnp.where(ok, moved.count, kept.count),
                    alpha=jnp.where(ok, moved.alpha, 0.0),
                    predicted_kl=moved.predicted_kl,
                    budget=moved.budget,
                    ok=ok,
                )
            return jnp.where(ok, moved, kept)

        chosen = jax.tree.map(select, state.inner_state, after, is_leaf=_is_link)
        zeroed = jax.tree.map(
            lambda u: jnp.where(ok, u, jnp.zeros((), u.dtype)) if jnp.issubdtype(u.dtype, jnp.inexact) else u,
            new,
        )
        count = jnp.where(ok, optax.safe_increment(state.count), state.count)
        return zeroed, GuardState(ok, count, chosen)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def step_ok(state: Any) -> Bool[Array, ""]:
    """Whether the last update was usable, from the outermost `guard_nonfinite` in an optimizer state.

    Raises:
      UserError: there is none.
    """
    return _guard("step_ok", state).ok


def update_count(state: Any) -> Int[Array, ""]:
    """Updates done, unusable ones not counted, from the outermost `guard_nonfinite` in an optimizer state.

    Raises:
      UserError: there is none.
    """
    return _guard("update_count", state).count


def _guard(what: str, state: Any) -> GuardState:
    found = find_states(state, GuardState)
    if not found:
        raise UserError(f"{what}: this optimizer state has no guard_nonfinite(...)")
    return found[0]


def _is_link(node: Any) -> bool:
    return isinstance(node, PredictedKLState)


def _broken(before: Any, after: Any) -> Any:
    """Whether a number of the state has ceased to be finite. KL links are judged by their own ok instead."""

    def one(old: Any, new: Any) -> Any:
        if _is_link(new) or not jnp.issubdtype(new.dtype, jnp.inexact):
            return jnp.asarray(False)
        return jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))

    flags = jax.tree.leaves(jax.tree.map(one, before, after, is_leaf=_is_link))
    return jnp.any(jnp.stack(flags)) if flags else jnp.asarray(False)
