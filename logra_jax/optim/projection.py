"""Random projections: their keys, their entries, and the three products taken with them.

A projection A `[r, k]` has entries +1/sqrt(r) or -1/sqrt(r), or normal ones of that deviation: E[A^T A] = I.
It is never stored: entries of unit size are drawn from a key wherever they are needed, exact in any
float dtype, and 1/sqrt(r) is applied as a scalar. Word number i of a draw depends on the key and i alone, so
under a sharded program each device draws its own columns.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax._shapes import Array, Float, UInt32
from logra_jax.optim.names import name_hash
from logra_jax.optim.spec import Matrix, SketchSpec

HIGHEST = lax.Precision.HIGHEST


def weight_keys(spec: SketchSpec, matrix: Matrix, update: Any) -> UInt32[Array, "*stack 2"]:
    """Key data of the projections of one leaf at `update` (int or int32 scalar), one key per stacked matrix.

    key = fold_in(fold_in(key(seed), redraw(update)), name_hash), threefry2x32.
    """
    hashes = np.array([name_hash(name) for name in matrix.names], np.uint32)
    with jax.threefry_partitionable(True):
        drawn = jnp.asarray(spec.redraw(update), jnp.uint32)
        base = jax.random.fold_in(jax.random.key(np.uint32(spec.seed), impl="threefry2x32"), drawn)
        keys = jax.vmap(lambda h: jax.random.key_data(jax.random.fold_in(base, h)))(jnp.asarray(hashes))
    return keys.reshape(*matrix.batch, 2)


def signs(
    key_data: UInt32[Array, "2"], r: int, k: int, distribution: str = "rademacher", dtype: Any = jnp.float32
) -> Float[Array, "{r} {k}"]:
    """Entries of sqrt(r) A: +1 or -1 from the bits of 32-bit words, or standard normal numbers.

    The sign in column j is bit j mod 32 of word j // 32 of its row of `r x ceil(k / 32)` words.
    """
    key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
    with jax.threefry_partitionable(True):
        if distribution == "gaussian":
            return jax.random.normal(key, (r, k), jnp.float32).astype(dtype)
        words = jax.random.bits(key, (r, -(-k // 32)), jnp.uint32)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
    bits = bits.reshape(r, -1)[:, :k]
    return jnp.where(bits == 1, jnp.ones((), dtype), -jnp.ones((), dtype))


def sketch_matrix(
    gradient: Float[Array, "k d"], key_data: UInt32[Array, "2"], r: int, distribution: str
) -> Float[Array, "{r} d"]:
    """S^T = A G in float32, of a gradient in the kernel's layout."""
    a = signs(key_data, r, gradient.shape[0], distribution, jnp.float32)
    product = lax.dot(a, gradient.astype(jnp.float32), precision=HIGHEST)
    return product * np.float32(r**-0.5)


def expand_matrix(
    factor: Float[Array, "r d"],
    key_data: UInt32[Array, "2"],
    k: int,
    distribution: str,
    sharding: NamedSharding | None = None,
) -> Float[Array, "{k} d"]:
    """A^T D in float32: a sketch-shaped factor as a full matrix in the kernel's layout.

    sharding: of the result `[k, d]`. Each device draws its own columns of A and receives its own of D.
    """
    r = factor.shape[0]
    a = signs(key_data, r, k, distribution, jnp.float32)
    if sharding is not None:
        mesh, (rows, columns) = sharding.mesh, sharding.spec
        a = lax.with_sharding_constraint(a, NamedSharding(mesh, PartitionSpec(None, rows)))
        factor = lax.with_sharding_constraint(factor, NamedSharding(mesh, PartitionSpec(None, columns)))
    product = lax.dot_general(a, factor.astype(jnp.float32), (((0,), (0,)), ((), ())), precision=HIGHEST)
    return product * np.float32(r**-0.5)


def gram(key_data: UInt32[Array, "2"], r: int, k: int, distribution: str) -> Float[Array, "{r} {r}"]:
    """A A^T in float32. Signs are drawn in bfloat16, where their products are exact and the matrix unit is
    fast."""
    dtype = jnp.bfloat16 if distribution == "rademacher" else jnp.float32
    a = signs(key_data, r, k, distribution, dtype)
    precision = None if dtype == jnp.bfloat16 else HIGHEST
    product = lax.dot_general(a, a, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return product * np.float32(1 / r)


def to_stack(leaf: Array, matrix: Matrix) -> Array:
    """The leaf as a stack of matrices `[n, k, d]`."""
    n, rank = prod(matrix.batch), len(matrix.shape)
    order = (*matrix.batch_axes, *(a % rank for a in matrix.in_axes), *(a % rank for a in matrix.out_axes))
    moved = leaf if order == tuple(range(rank)) else jnp.transpose(leaf, order)
    return moved.reshape(n, matrix.k, matrix.d)


def from_stack(stack: Array, matrix: Matrix) -> Array:
    """Inverse of `to_stack`."""
    rank = len(matrix.shape)
    order = (*matrix.batch_axes, *(a % rank for a in matrix.in_axes), *(a % rank for a in matrix.out_axes))
    moved = stack.reshape(tuple(matrix.shape[a] for a in order))
    return moved if order == tuple(range(rank)) else jnp.transpose(moved, tuple(np.argsort(order)))


def map_stack(fn: Callable[..., Any], *stacks: Array) -> Any:
    """fn over the first axis of the arrays, one matrix at a time, so that only one projection exists at a
    time."""
    if stacks[0].shape[0] == 1:
        return jax.tree.map(lambda x: x[None], fn(*(s[0] for s in stacks)))
    return lax.map(lambda xs: fn(*xs), stacks)


def sketch_leaf(gradient: Array, key_data: Array, matrix: Matrix, spec: SketchSpec) -> Array:
    """Sketch `[..., r, d]` (float32) of a whole leaf's dense gradient."""

    def one(g, key):
        return sketch_matrix(g, key, spec.rank, spec.distribution)

    stack = map_stack(one, to_stack(gradient, matrix), key_data.reshape(-1, 2))
    return stack.reshape(matrix.sketch_shape(spec.rank))


def expand_leaf(factor: Array, key_data: Array, matrix: Matrix, distribution: str) -> Array:
    """Full-shape float32 leaf from its factor `[..., r, d]`."""

    def one(f, key):
        return expand_matrix(f, key, matrix.k, distribution)

    stack = map_stack(one, factor.reshape(-1, *factor.shape[-2:]), key_data.reshape(-1, 2))
    return from_stack(stack, matrix)
