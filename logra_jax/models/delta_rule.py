"""The gated delta rule, chunk by chunk and step by step, and the causal convolution before it (arXiv 2412.06464).

Per value head, with a state S `[dk, dv]` that starts at zero, decay g <= 0 and write strength beta:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

All arithmetic is float32. Query and key heads are shared by `value heads / key heads` value heads in a row.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from logra_jax._shapes import Array, Float, Int

CHUNK = 64  # tokens whose mutual influence is one triangular solve; a power of two
NORM_EPS = 1e-6


class DeltaInputs(NamedTuple):
    """What the rule reads at each token; `keys` and `values` are numbers of heads, `values` a multiple of `keys`.

    A token with q, k, beta and g of zero leaves the state as it is: that is what padding is.
    """

    q: Float[Array, "batch time keys dk"]
    k: Float[Array, "batch time keys dk"]
    v: Float[Array, "batch time values dv"]
    g: Float[Array, "batch time values"]
    beta: Float[Array, "batch time values"]


def unit_length(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """`x / sqrt(sum(x^2) + 1e-6)` in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + NORM_EPS)


def delta_rule_step(
    inputs: DeltaInputs, state: Float[Array, "batch values dk dv"]
) -> tuple[Float[Array, "batch one values dv"], Float[Array, "batch values dk dv"]]:
    """One token, time = 1: (output, new state)."""
    q, k, v, g, beta = (x[:, 0].astype(jnp.float32) for x in inputs)
    group = v.shape[1] // q.shape[1]
    q, k = jnp.repeat(q, group, axis=1), jnp.repeat(k, group, axis=1)
    state = state * jnp.exp(g)[..., None, None]
    known = jnp.sum(state * k[..., None], axis=-2)
    state = state + k[..., None] * (beta[..., None] * (v - known))[..., None, :]
    return jnp.sum(state * q[..., None], axis=-2)[:, None], state


def delta_rule(
    inputs: DeltaInputs,
    state: Float[Array, "batch values dk dv"],
    segments: Int[Array, "batch time"] | None = None,
    precision: lax.Precision | None = None,
) -> tuple[Float[Array, "batch time values dv"], Float[Array, "batch values dk dv"]]:
    """Any number of tokens, as a loop over chunks whose insides are matrix products: (outputs, last state).

    segments: tokens of different numbers in a row know nothing of each other; a row's first tokens go on from
        `state` as long as they have the number of the first one. The last state is that of the last token's.
    precision: of the products with q, k, v and the state; the solve is always exact float32.

    Only the inputs and the state at each chunk's start are kept for the backward pass.
    """
    batch, time, keys, dk = inputs.q.shape
    values, dv = inputs.v.shape[2:]
    size = min(CHUNK, 1 << (time - 1).bit_length())
    count = -(-time // size)
    if segments is None:
        segments = jnp.zeros((batch, time), jnp.int32)

    def chunks(x: Array, fill: str = "constant") -> Array:
        padded = jnp.pad(x, ((0, 0), (0, count * size - time), *((0, 0),) * (x.ndim - 2)), mode=fill)
        return padded.reshape(batch, count, size, *x.shape[2:]).swapaxes(0, 1)

    def heads(x: Array) -> Array:  # [b, n, heads, ...] -> [b, keys, heads / keys, n, ...]
        split = x.reshape(batch, size, keys, -1, *x.shape[3:])
        return jnp.moveaxis(split, 1, 3).astype(jnp.float32)

    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(carry: tuple[Array, Array], xs: tuple[DeltaInputs, Array]) -> tuple[tuple[Array, Array], Array]:
        (state, number), (rows, numbers) = carry, xs
        q, k = (jnp.moveaxis(x, 1, 2).astype(jnp.float32) for x in rows[:2])  # [b, keys, n, dk]
        v, g, beta = (heads(x) for x in rows[2:])
        from_start = (numbers == number[:, None])[:, None, None]  # [b, 1, 1, n]: may read the incoming state
        to_end = (numbers == numbers[:, -1:])[:, None, None]  # may write to the outgoing one
        same = (numbers[:, :, None] == numbers[:, None, :])[:, None, None]
        decay = jnp.cumsum(g, axis=-1)
        # Where j comes after i the difference is positive and its exponential overflows: cut before, not after.
        gap = jnp.where(same & _lower(size), decay[..., :, None] - decay[..., None, :], -jnp.inf)
        between = jnp.exp(gap)  # [b, keys, group, n, n]
        since = jnp.where(from_start, jnp.exp(decay), 0.0)[..., None]
        overlap = product("bhid,bhjd->bhij", k, k)[:, :, None]
        unknown = jnp.tril(beta[..., None] * overlap * between, -1)
        known = jnp.broadcast_to(k[:, :, None], (*v.shape[:-1], dk))
        solved = solve_unit_lower(unknown, beta[..., None] * jnp.concatenate([v, since * known], axis=-1))
        written = solved[..., :dv] - product("bhgnk,bhgkv->bhgnv", solved[..., dv:], state)
        seen = product("bhid,bhjd->bhij", q, k)[:, :, None] * between
        out = since * product("bhnk,bhgkv->bhgnv", q, state) + product("bhgij,bhgjv->bhgiv", seen, written)
        rest = jnp.where(to_end, jnp.exp(decay[..., -1:] - decay), 0.0)
        kept = jnp.where(from_start[..., -1], jnp.exp(decay[..., -1]), 0.0)[..., None, None]
        state = kept * state + product("bhnk,bhgnv->bhgkv", k, rest[..., None] * written)
        return (state, numbers[:, -1]), jnp.moveaxis(out, 3, 1).reshape(batch, size, values, dv)

    parts = DeltaInputs(*(chunks(x) for x in inputs)), chunks(segments, "edge")
    start = state.astype(jnp.float32).reshape(batch, keys, values // keys, dk, dv)
    (state, _), out = lax.scan(chunk, (start, segments[:, 0]), parts)
    out = out.swapaxes(0, 1).reshape(batch, count * size, values, dv)[:, :time]
    return out, state.reshape(batch, values, dk, dv)


def solve_unit_lower(
    lower: Float[Array, "*batch n n"], right: Float[Array, "*batch n m"]
) -> Float[Array, "*batch n m"]:
    """X with (1 + lower) X = right, for a strictly lower triangle; n a power of two.

    One inverse serves the solve, its derivative in forward mode and, transposed, the one backwards: none of them
    differentiates how it was made. `lax.linalg.triangular_solve` calls a library on CPUs, which never returns in
    forward mode.
    """
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    inverse = _inverse(lax.stop_gradient(lower))
    return lax.custom_linear_solve(
        lambda x: x + product(lower, x),
        right,
        solve=lambda _, b: product(inverse, b),
        transpose_solve=lambda _, b: product(inverse.swapaxes(-1, -2), b),
    )


def _inverse(lower: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """(1 + lower)^-1: the inverses of both halves on the diagonal, made together, and what lies below them.

    As exact as forward substitution, in log2(n) steps of matrix products. The product of 1 - L, 1 + L^2, 1 + L^4 ..
    is not: its powers grow with equal keys.
    """
    half = lower.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(lower)
    product = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    first, last = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -product(last, product(lower[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, last], axis=-1)], axis=-2)


def _lower(size: int) -> Array:
    """[1, 1, 1, n, n], True where the second token does not come after the first."""
    return jnp.tril(jnp.ones((size, size), jnp.bool_))[None, None, None]


def causal_conv(
    x: Float[Array, "batch time channels"],
    window: Float[Array, "batch taps channels"],
    kernel: Float[Array, "width channels"],
    segments: Int[Array, "batch time"] | None = None,
) -> Float[Array, "batch time channels"]:
    """`y_t = sum_j kernel[j] x_{t - (width - 1) + j}`, channel by channel; `window` is what came before.

    The window holds width - 1 inputs and belongs to the first token's segment. A tap that reaches into another
    segment counts as zero.
    """
    time, taps = x.shape[1], kernel.shape[0] - 1
    whole = jnp.concatenate([window.astype(x.dtype), x], axis=1)
    numbers = None if segments is None else jnp.pad(segments, ((0, 0), (taps, 0)), mode="edge")
    total = jnp.zeros(x.shape, jnp.float32)
    for j in range(taps + 1):
        tap = whole[:, j : j + time].astype(jnp.float32) * kernel[j].astype(jnp.float32)[None, None]
        if segments is not None and numbers is not None:
            tap = jnp.where((numbers[:, j : j + time] == segments)[..., None], tap, 0)
        total = total + tap
    return total


def next_window(
    x: Float[Array, "batch time channels"],
    window: Float[Array, "batch taps channels"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "batch taps channels"]:
    """The window that follows, where of each row's inputs the first `lengths` are there."""
    whole = jnp.concatenate([window, x.astype(window.dtype)], axis=1)
    at = lengths[:, None] + jnp.arange(window.shape[1])[None]
    return jnp.take_along_axis(whole, at[..., None], axis=1)
