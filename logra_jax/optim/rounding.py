"""How bfloat16 weights take updates that are far below their resolution.

A bfloat16 number has 8 significant bits, an update is some 6e-5 of its weight: rounded to the nearest, it is
lost every time. Two ways out (method: arXiv 2610.06647):

    stochastic   the sum is rounded up or down at random, so that its expectation is exact; no extra memory
    residual     what rounding lost is kept in a second bfloat16 number, W = high + low: some 16 bits, in
                 which updates add up as in float32
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from logra_jax._shapes import Array, Float, UInt32
from logra_jax.errors import UserError
from logra_jax.optim.names import name_hash
from logra_jax.optim.spec import SketchSpec, path_string
from logra_jax.optim.twin import ROTATIONS

_ROUNDING = 1  # folded into a weight's key, so that rounding and projection have different bits
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def needs_rounding(leaf: Any) -> bool:
    """Whether updates of this leaf (an array or a `ShapeDtypeStruct`) would be lost by plain rounding."""
    return leaf.dtype == jnp.bfloat16


def round_stochastic(x: Float[Array, "*shape"], key_data: UInt32[Array, "2"]) -> Float[Array, "*shape"]:
    """x in bfloat16: one of its two neighbours there, drawn so that the expectation is x.

    The probability of the neighbour further from 0 is the lost fraction of a step, in units of 2^-16. A number
    that bfloat16 holds stays as it is, and so do infinities and NaN; rounding makes neither out of a finite
    number. The random word of an element depends on the key and the element's flat index alone, so the result
    is the same however x is sharded.
    """
    noise = _words(key_data, x.shape) & jnp.uint32(0xFFFF)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # Neighbours in magnitude are neighbours as integers, also across powers of 2 and among subnormal numbers.
    moved = (bits + noise) >> jnp.uint32(16)
    overflow = (moved & jnp.uint32(0x7F80)) == jnp.uint32(0x7F80)
    kept = bits >> jnp.uint32(16)
    rounded = lax.bitcast_convert_type(jnp.where(overflow, kept, moved).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _words(key_data: UInt32[Array, "2"], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """`jax.random.bits` of a key, in its partitionable layout, for up to 2^32 elements.

    Written out because jax's own is a call of a compiled kernel, whose counters and words would be arrays
    of several times the weight's size; this fuses with what uses it.
    """
    low = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        low = low * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, shape, axis)
    first, second = key_data[0], key_data[1]
    schedule = (first, second, first ^ second ^ jnp.uint32(0x1BD11BDA))
    x, y = jnp.full(shape, first), low + second
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation))) ^ x
        x = x + schedule[(group + 1) % 3]
        y = y + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x ^ y


def split(x: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """(high, low): x as the sum of two bfloat16 numbers, to 2^-17 of x or better; high is x to the nearest.

    A pair is split into itself, also where low is half a step of high. Finite numbers above the largest of
    bfloat16 become that one.
    """
    x = jnp.where(jnp.isfinite(x), jnp.clip(x, -_LARGEST, _LARGEST), x)
    high = _nearest(x)
    held = join(high, _rest(x, high))
    high = _nearest(held)
    return high, _rest(held, high)


def join(high: Float[Array, "*shape"], low: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The number that a pair stands for."""
    return high.astype(jnp.float32) + low.astype(jnp.float32)


def _rest(x: Array, high: Array) -> Array:
    """What `high` lacks of x, rounded; infinities and NaN are in `high` alone."""
    return _nearest(jnp.where(jnp.isfinite(x), x - high.astype(jnp.float32), 0.0))


def _nearest(x: Array) -> Array:
    # XLA may drop a conversion down and up again as excess precision; this one has to happen.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def init_residual(train: Any) -> Any:
    """Zeros like the bfloat16 leaves of `train`, None elsewhere: what rounding has lost before any update."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if needs_rounding(leaf) else None, train)


def rounding_keys(spec: SketchSpec, train: Any, update: Any) -> Any:
    """Keys for `apply_updates` to round bfloat16 weights with: uint32 `[2]`, or `[n, 2]` for a stack of n.

        key = fold_in(fold_in(fold_in(key(seed), update), name_hash), 1)             threefry2x32

    one for each weight name; a leaf that `spec` has no names for goes by its key path. None for leaves of
    other dtypes.

    Args:
      spec: gives the seed and the names. Leaves that are not sketched get keys too.
      train: trained weights.
      update: number of the update, int or int32 scalar; it counts every update, whatever `spec.refresh` is.
    """
    matrices = spec.matrices(train)
    with jax.threefry_partitionable(True):
        seed = jax.random.key(np.uint32(spec.seed), impl="threefry2x32")
        base = jax.random.fold_in(seed, jnp.asarray(update, jnp.uint32))

        def key(name: Any) -> Any:
            return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(base, name), _ROUNDING))

        def one(path: Any, leaf: Any) -> Any:
            if not needs_rounding(leaf):
                return None
            where = path_string(path)
            names = matrices[where].names if where in matrices else spec.names_of(where)
            hashes = jnp.asarray(np.array([name_hash(name) for name in names], np.uint32))
            return jax.vmap(key)(hashes) if len(names) > 1 else key(hashes[0])

        return jax.tree.map_with_path(one, train)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`inner` with a float32 state and float32 updates for weights of any dtype.

    Second moments in bfloat16 would be lost as small updates are. For an `inner` whose `init` looks at shapes
    and dtypes only, such as `optax.adamw`.
    """
    inner = optax.with_extra_args_support(inner)

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init_fn(params: Any) -> Any:
        return inner.init(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return inner.update(wide(updates), state, None if params is None else wide(params), **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def refuse_plain(path: Any) -> None:
    """Raise for a bfloat16 weight that nothing says how to round."""
    raise UserError(
        f"apply_updates: {path_string(path)} is bfloat16, where rounding to the nearest loses small updates "
        "entirely; pass keys=rounding_keys(spec, train, step), or use apply_with_residual"
    )
