"""The parts of a decoder as Flax NNX modules: norm, linear, attention, gated MLP, one layer.

Modules are built from shapes alone: a parameter starts as a `jax.ShapeDtypeStruct` and gets its value when
`nnx.merge` puts a parameter tree into the module's graph. Each parameter names its logical axes, which
`logra_jax.mesh` maps to the axes of a device mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.models.cache import LayerKV
from logra_jax.models.config import ModelConfig


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
    """`scale * x / sqrt(mean(x^2) + eps)`: statistics in float32, the product in the activation dtype."""

    def __init__(self, size: int, eps: float):
        self.scale = param(size, axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        normed = normed.astype(x.dtype)
        return normed * along_last(self.scale.get_value(), normed)


class Linear(nnx.Module):
    """`y = x W + b` with the kernel cast to the activation dtype at the point of use.

    The kernel may be any pytree node that has `astype` and answers `x @ kernel`, such as a sketch slot.
    """

    def __init__(self, size_in: int, size_out: int, *, axes: tuple[str, str], bias: bool = False):
        self.kernel = param(size_in, size_out, axes=axes)
        # A bias of the residual stream is as small as a norm's scale and is replicated like one.
        bias_axis = "norm" if axes[1] == "embed" else axes[1]
        self.bias = param(size_out, axes=(bias_axis,)) if bias else None

    def __call__(self, x: Float[Array, "... k"]) -> Float[Array, "... d"]:
        # One plain matrix product: the backward products of a batched one are transposed by copying on a CPU, and
        # the whole gradient then takes three times as long.
        rows = x.reshape(-1, x.shape[-1]) @ self.kernel.get_value().astype(x.dtype)
        y = rows.reshape(*x.shape[:-1], rows.shape[-1])
        return y if self.bias is None else y + along_last(self.bias.get_value(), y)


class Embedding(nnx.Module):
    """One row per token id, cast to `dtype` after the lookup."""

    def __init__(self, rows: int, size: int):
        self.embedding = param(rows, size, axes=("vocab", "embed"))

    def __call__(self, ids: Int[Array, "batch time"], dtype: jax.typing.DTypeLike) -> jax.Array:
        return self.embedding.get_value()[ids].astype(dtype)


def rope_angles(positions: Int[Array, "batch time"], config: ModelConfig, dtype: jax.typing.DTypeLike) -> Rope:
    """Angles `position * theta^(-2i/head_dim)`, computed in float32."""
    half = config.head_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) * (-2.0 / config.head_dim)
    frequencies = jnp.power(jnp.float32(config.rope_theta), exponents)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    return Rope(jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype))


def rotate(x: Float[Array, "batch time heads head_dim"], rope: Rope) -> Float[Array, "batch time heads head_dim"]:
    """Rotary positions in the half-split layout: dimension i turns together with i + head_dim / 2."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


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


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, and RMSNorm on query and key heads where asked for."""

    def __init__(self, config: ModelConfig):
        c = config
        self.config = config
        self.q_proj = Linear(c.hidden_size, c.q_size, axes=("embed", "q_heads"), bias=c.qkv_bias)
        self.k_proj = Linear(c.hidden_size, c.kv_size, axes=("embed", "kv_heads"), bias=c.qkv_bias)
        self.v_proj = Linear(c.hidden_size, c.kv_size, axes=("embed", "kv_heads"), bias=c.qkv_bias)
        self.o_proj = Linear(c.q_size, c.hidden_size, axes=("q_heads", "embed"), bias=c.o_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "batch time d"],
        rope: Rope,
        mask: Bool[Array, "batch time slots"],
        kv: LayerKV | None,
    ) -> tuple[Float[Array, "batch time d"], LayerKV | None]:
        heads = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (proj(x).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope), rotate(k, rope)
        if kv is not None:
            kv = kv.write(k, v)
            k, v = kv.read(x.dtype)
        mixed = attend(q, k, v, mask)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), kv


class MLP(nnx.Module):
    """`down(silu(gate x) * up x)`."""

    def __init__(self, config: ModelConfig):
        wide, narrow, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.gate_proj = Linear(narrow, wide, axes=("embed", "mlp"), bias=bias)
        self.up_proj = Linear(narrow, wide, axes=("embed", "mlp"), bias=bias)
        self.down_proj = Linear(wide, narrow, axes=("mlp", "embed"), bias=bias)

    def __call__(self, x: Float[Array, "batch time d"]) -> Float[Array, "batch time d"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """A token mixer and an MLP, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def __call__(
        self,
        x: Float[Array, "batch time d"],
        rope: Rope,
        mask: Bool[Array, "batch time slots"],
        kv: LayerKV | None,
    ) -> tuple[Float[Array, "batch time d"], LayerKV | None]:
        mixed, kv = self.self_attn(self.input_layernorm(x), rope, mask, kv)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kv
