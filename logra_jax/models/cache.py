"""The key/value cache of incremental decoding: one slot per position, the same slot for every row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from logra_jax._shapes import Array, Bool, Float, Int


class Cache(NamedTuple):
    """Keys (after norm and rotation) and values of all layers, and which slots hold a real token.

    All rows write at the same slot, `slot` for the next token, so prompts of different lengths are
    left-padded; a row's positions count its own real tokens, `lengths` so far. The caller makes the cache
    long enough: a slot past the end would be clamped onto the last one.
    """

    k: Float[Array, "layers batch slots kv_heads head_dim"]
    v: Float[Array, "layers batch slots kv_heads head_dim"]
    valid: Bool[Array, "batch slots"]
    lengths: Int[Array, "batch"]
    slot: Int[Array, ""]


class LayerKV(NamedTuple):
    """The stacked keys and values on their way through the layers, with the layer and slot to write next.

    The stack travels whole, as the carry of the layer scan, so that each write is in place; slicing it per
    layer and stacking the slices again would copy the whole cache for every token.
    """

    k: Float[Array, "layers batch slots kv_heads head_dim"]
    v: Float[Array, "layers batch slots kv_heads head_dim"]
    layer: Int[Array, ""]
    slot: Int[Array, ""]

    def write(
        self, k: Float[Array, "batch time kv_heads head_dim"], v: Float[Array, "batch time kv_heads head_dim"]
    ) -> "LayerKV":
        """This layer's new keys and values at slots `slot` onwards."""
        zero = jnp.zeros_like(self.slot)
        at = (self.layer, zero, self.slot, zero, zero)
        return self._replace(
            k=lax.dynamic_update_slice(self.k, k[None].astype(self.k.dtype), at),
            v=lax.dynamic_update_slice(self.v, v[None].astype(self.v.dtype), at),
        )

    def read(self, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        """All slots of this layer, keys and values `[batch, slots, kv_heads, head_dim]`."""
        k, v = (lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (self.k, self.v))
        return k.astype(dtype), v.astype(dtype)
