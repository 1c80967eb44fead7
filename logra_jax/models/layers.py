"""The parts of a decoder as Flax NNX modules: norm, linear, embedding, attention, gated MLP.

Modules are built from shapes alone: a parameter starts as a `jax.ShapeDtypeStruct` and gets its value when
`nnx.merge` puts a parameter tree into the module's graph. Each parameter names its logical axes, which
`logra_jax.mesh` maps to the axes of a device mesh.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.mesh import AxisTable, constrain
from logra_jax.models.cache import LayerCache
from logra_jax.models.config import ModelConfig
from logra_jax.models.flash import attend_to_front

QUERY_BLOCK = 512  # queries whose scores exist at a time: longer sequences take several turns
SMALL_BLOCK = 128  # as few where texts are short, so that a block sees little but its own texts


class Sight(NamedTuple):
    """What a query may see: query t of a row sees slot s where `valid[s]` and `s <= offset + t`.

    segments: with several texts in a row (and no cache), the number of the text that a slot belongs to, the only
    one that it sees. reach: the length of the longest of them, if that is known.
    lengths: if the real tokens of every row are its first ones and attention is to be that of cuDNN, their number.
    """

    valid: Bool[Array, "batch slots"]
    offset: Int[Array, ""]
    segments: Int[Array, "batch slots"] | None = None
    reach: int | None = None
    lengths: Int[Array, " batch"] | None = None

    def mask(self, start: int | Array, count: int) -> Bool[Array, "batch count slots"]:
        """The slots that queries start .. start + count - 1 may see."""
        queries = jnp.arange(count) + start + self.offset
        seen = jnp.arange(self.valid.shape[1])[None, :] <= queries[:, None]
        seen = seen[None] & self.valid[:, None, :]
        if self.segments is None:
            return seen
        # Queries past the end fill up a block; which text they see does not matter.
        own = jnp.take(self.segments, queries, axis=1, mode="clip")
        return seen & (own[:, :, None] == self.segments[:, None, :])

    def real(self, count: int) -> Bool[Array, "batch count"]:
        """Which of `count` queries are no padding."""
        return jax.lax.dynamic_slice_in_dim(self.valid, self.offset, count, axis=1)


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles, in the activation dtype."""

    cos: Float[Array, "batch time half"]
    sin: Float[Array, "batch time half"]


def param(*shape: int, axes: tuple[str, ...]) -> nnx.Param:
    """A parameter of that shape, one logical axis name per dimension; its value comes with `nnx.merge`."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), logical=axes)


def along_last(vector: Float[Array, "d"], like: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """`vector` in the dtype of `like`, with as many leading axes of size 1 as it takes to broadcast."""
    return vector.astype(like.dtype).reshape((1,) * (like.ndim - 1) + (-1,))


class RMSNorm(nnx.Module):
    """`scale * x / sqrt(mean(x^2) + eps)`: statistics in float32, the product in the activation dtype.

    zero_centered: the factor is 1 + scale, and the product is in float32 too.
    """

    def __init__(self, size: int, eps: float, zero_centered: bool = False):
        self.scale = param(size, axes=("norm",))
        self.eps, self.zero_centered = eps, zero_centered

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        if self.zero_centered:
            return (normed + normed * along_last(self.scale.get_value(), normed)).astype(x.dtype)
        normed = normed.astype(x.dtype)
        return normed * along_last(self.scale.get_value(), normed)


class Linear(nnx.Module):
    """`y = x W + b` with the kernel cast to the activation dtype at the point of use.

    The kernel may be any pytree node that has `astype` and answers `x @ kernel`, such as a sketch slot; on a mesh
    it also needs `constrain`. A kernel that is stored in parts is put together here, after the cast, so that no
    more than one layer's kernels are whole at a time.
    """

    def __init__(
        self, size_in: int, size_out: int, *, axes: tuple[str, str], bias: bool = False, mesh: Mesh | None = None
    ):
        self.kernel = param(size_in, size_out, axes=axes)
        self.axes, self.mesh = axes, mesh
        self.bias = param(size_out, axes=axes[1:]) if bias else None

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... d"]:
        # One plain matrix product: the backward products of a batched one are transposed by copying on a CPU, and
        # the whole gradient then takes three times as long.
        kernel = self.kernel.get_value().astype(x.dtype)
        # As stored first: else the stack is gathered before it is sliced down to a matrix, in a layout of its own.
        kernel = constrain(kernel, self.mesh, *self.axes)
        kernel = constrain(kernel, self.mesh, *self.axes, table=AxisTable().gathered)
        rows = x.reshape(-1, x.shape[-1]) @ kernel
        y = rows.reshape(*x.shape[:-1], rows.shape[-1])
        return y if self.bias is None else y + along_last(self.bias.get_value(), y)


class Embedding(nnx.Module):
    """One row per token id, cast to `dtype` after the lookup."""

    def __init__(self, rows: int, size: int, mesh: Mesh | None = None):
        self.embedding = param(rows, size, axes=("vocab", "embed"))
        self.mesh = mesh

    def __call__(self, ids: Int[Array, "batch time"], dtype: jax.typing.DTypeLike) -> jax.Array:
        # Every device looks up its part of the width for all rows: ids travel, the table does not.
        found = self.embedding.get_value()[constrain(ids, self.mesh, None, None)].astype(dtype)
        return constrain(constrain(found, self.mesh, None, None, "embed"), self.mesh, "batch", None, None)


def positions_within(segments: Int[Array, "batch time"]) -> Int[Array, "batch time"]:
    """How many tokens of the same segment come before each token; the tokens of a segment lie next to each other."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place - jax.lax.cummax(jnp.where(starts, place, 0), axis=1)


def rope_angles(positions: Int[Array, "batch time"], config: ModelConfig, dtype: jax.typing.DTypeLike) -> Rope:
    """Angles `position * theta^(-2i/rotary_dim)`, computed in float32."""
    half = config.rotary_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) * (-2.0 / config.rotary_dim)
    frequencies = jnp.power(jnp.float32(config.rope_theta), exponents)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    return Rope(jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))


def rotate(x: Float[Array, "batch time heads head_dim"], rope: Rope) -> Float[Array, "batch time heads head_dim"]:
    """Rotary positions in the half-split layout: of the first 2 * half dimensions, i turns together with i + half."""
    half = rope.cos.shape[-1]
    a, b, still = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1)


def attend(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch slots kv_heads head_dim"],
    v: Float[Array, "batch slots kv_heads head_dim"],
    mask: Bool[Array, "batch time slots"],
) -> Float[Array, "batch time heads head_dim"]:
    """Softmax attention in float32 over the slots that `mask` allows; query head j reads kv head j // group.

    A query that may see nothing (padding) gets an even average of the values: finite, and used by nobody.
    """
    batch, time, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * head_dim**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)


def attend_from_one(
    q: Float[Array, "batch one heads head_dim"],
    k: list[Array],
    v: list[Array],
    valid: Bool[Array, "batch slots"],
) -> Float[Array, "batch one heads head_dim"]:
    """`attend` of a row's newest token to all of its slots, on parts of keys and values as a cache holds them."""
    batch, head_dim = q.shape[0], q.shape[-1]
    grouped = q.reshape(batch, k[0].shape[1], -1, head_dim)
    products = [jnp.einsum("bkgh,bksh->bkgs", grouped, part, preferred_element_type=jnp.float32) for part in k]
    scores = jnp.concatenate(products, axis=-1) * head_dim**-0.5
    scores = jnp.where(valid[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    ends = np.cumsum([part.shape[2] for part in v])[:-1]
    mixed = [jnp.einsum("bkgs,bksh->bkgh", w, x) for w, x in zip(jnp.split(weights, ends, axis=-1), v, strict=True)]
    return sum(mixed[1:], mixed[0]).reshape(q.shape)


def attend_in_blocks(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch slots kv_heads head_dim"],
    v: Float[Array, "batch slots kv_heads head_dim"],
    sight: Sight,
) -> Float[Array, "batch time heads head_dim"]:
    """`attend` for at most QUERY_BLOCK queries at a time: scores of all queries at once never exist.

    A block whose queries cannot see far is given only the slots that they reach.
    """
    batch, time, *inner = q.shape
    slots = k.shape[1]
    reach = slots if sight.reach is None else sight.reach
    longest = min(QUERY_BLOCK, max(reach, SMALL_BLOCK))
    if time <= longest:
        return attend(q, k, v, sight.mask(0, time))
    count = -(-time // longest)
    size = -(-time // count)
    seen = min(slots, reach + size - 1)
    blocks = jnp.pad(q, ((0, 0), (0, count * size - time), (0, 0), (0, 0))).reshape(batch, count, size, *inner)
    # Wide, because their gradients are sums over the blocks.
    wide_k, wide_v = k.astype(jnp.float32), v.astype(jnp.float32)

    @partial(jax.checkpoint, prevent_cse=False)
    def block(start: Array, q: Array) -> Array:
        mask, near_k, near_v = sight.mask(start, size), wide_k, wide_v
        if seen < slots:
            first = jnp.clip(start - reach + 1, 0, slots - seen)
            near = partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=seen)
            mask, near_k, near_v = near(mask, axis=2), near(wide_k, axis=1), near(wide_v, axis=1)
        return attend(q, near_k.astype(k.dtype), near_v.astype(v.dtype), mask)

    mixed = jax.lax.map(lambda xs: block(*xs), (jnp.arange(count) * size, blocks.swapaxes(0, 1)))
    return mixed.swapaxes(0, 1).reshape(batch, count * size, *inner)[:, :time]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, and RMSNorm on query and key heads where asked for.

    With an output gate the query projection has, head by head, the query and then a gate of the same size, whose
    sigmoid multiplies what the head returns.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None):
        c = config
        self.config = config
        linear = partial(Linear, mesh=mesh)
        q_size = 2 * c.q_size if c.output_gate else c.q_size
        self.q_proj = linear(c.hidden_size, q_size, axes=("embed", "q_heads"), bias=c.qkv_bias)
        self.k_proj = linear(c.hidden_size, c.kv_size, axes=("embed", "kv_heads"), bias=c.qkv_bias)
        self.v_proj = linear(c.hidden_size, c.kv_size, axes=("embed", "kv_heads"), bias=c.qkv_bias)
        self.o_proj = linear(c.q_size, c.hidden_size, axes=("heads_in", "width"), bias=c.o_bias)
        norm = partial(RMSNorm, c.head_dim, c.rms_norm_eps, c.zero_centered_norms)
        self.q_norm = norm() if c.qk_norm else None
        self.k_norm = norm() if c.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "batch time d"],
        rope: Rope,
        sight: Sight,
        kv: LayerCache | None,
    ) -> tuple[Float[Array, "batch time d"], LayerCache | None]:
        c, places = self.config, x.shape[:2]
        q, k, v = (proj(x).reshape(*places, -1, c.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        gate = None
        if c.output_gate:
            q, gate = (half[..., 0, :] for half in jnp.split(q.reshape(*places, -1, 2, c.head_dim), 2, axis=-2))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        if kv is not None:
            kv = kv.write(k, v)
            parts = kv.read(x.dtype, sight.valid.shape[1])
            k, v = (part[0].swapaxes(1, 2) for part in parts)
        if kv is not None and x.shape[1] == 1:
            mixed = attend_from_one(q, *parts, sight.valid)
        elif sight.lengths is None:
            mixed = attend_in_blocks(q, k, v, sight)
        else:
            mixed = attend_to_front(q, k, v, sight.lengths)
        if gate is not None:
            mixed = mixed * jax.nn.sigmoid(gate)
        return self.o_proj(mixed.reshape(*places, -1)), kv


class MLP(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None):
        wide, narrow = config.intermediate_size, config.hidden_size
        linear = partial(Linear, bias=config.mlp_bias, mesh=mesh)
        self.gate_proj = linear(narrow, wide, axes=("embed", "mlp"))
        self.up_proj = linear(narrow, wide, axes=("embed", "mlp"))
        self.down_proj = linear(wide, narrow, axes=("mlp_in", "width"))

    def __call__(self, x: Float[Array, "batch time d"]) -> Float[Array, "batch time d"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
