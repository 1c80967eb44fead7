"""The cache of incremental decoding: keys and values, one slot per position, and the state of linear attention."""

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

    k, v: of the layers with full attention. window, state: of the gated delta layers, None where there are none: the
    newest inputs of the convolution, and S in float32. They grow with nothing, and nothing can be taken out of them.
    """

    k: Float[Array, "layers batch slots kv_heads head_dim"]
    v: Float[Array, "layers batch slots kv_heads head_dim"]
    valid: Bool[Array, "batch slots"]
    lengths: Int[Array, "batch"]
    slot: Int[Array, ""]
    window: Float[Array, "linear batch taps channels"] | None = None
    state: Float[Array, "linear batch value_heads dk dv"] | None = None


class LayerCache(NamedTuple):
    """The stacks of a `Cache` on their way through the layers, with the layers and the slot to write next.

    The stacks travel whole, as the carry of the layer scan, so that each write is in place; slicing them per
    layer and stacking the slices again would copy the whole cache for every token. `layer` counts layers with
    full attention, `linear` the others.
    """

    k: Float[Array, "layers batch slots kv_heads head_dim"]
    v: Float[Array, "layers batch slots kv_heads head_dim"]
    layer: Int[Array, ""]
    slot: Int[Array, ""]
    window: Float[Array, "linear batch taps channels"] | None = None
    state: Float[Array, "linear batch value_heads dk dv"] | None = None
    linear: Int[Array, ""] | None = None

    def write(
        self, k: Float[Array, "batch time kv_heads head_dim"], v: Float[Array, "batch time kv_heads head_dim"]
    ) -> "LayerCache":
        """This layer's new keys and values at slots `slot` onwards."""
        zero = jnp.zeros_like(self.slot)
        at = (self.layer, zero, self.slot, zero, zero)
        return self._replace(
            k=lax.dynamic_update_slice(self.k, k[None].astype(self.k.dtype), at),
            v=lax.dynamic_update_slice(self.v, v[None].astype(self.v.dtype), at),
        )

    def read_state(self) -> tuple[jax.Array, jax.Array]:
        """Window and state of this gated delta layer."""
        window, state = (lax.dynamic_index_in_dim(x, self.linear, keepdims=False) for x in (self.window, self.state))
        return window, state

    def write_state(
        self, window: Float[Array, "batch taps channels"], state: Float[Array, "batch value_heads dk dv"]
    ) -> "LayerCache":
        """This gated delta layer's new window and state."""
        assert self.window is not None
        assert self.state is not None
        return self._replace(
            window=lax.dynamic_update_index_in_dim(self.window, window.astype(self.window.dtype), self.linear, 0),
            state=lax.dynamic_update_index_in_dim(self.state, state.astype(self.state.dtype), self.linear, 0),
        )

    def read(self, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
        """All slots of this layer, keys and values `[batch, slots, kv_heads, head_dim]`."""
        k, v = (lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (self.k, self.v))
        return k.astype(dtype), v.astype(dtype)
