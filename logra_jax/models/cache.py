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

    Slots lie next to each other, head by head: a token's query then reads them as they are. k, v: of the layers with
    full attention. window, state: of the gated delta layers, None where there are none: the
    newest inputs of the convolution, and S in float32. They grow with nothing, and nothing can be taken out of them.

    Instead of a stack there may be a tuple of the layers, see `CausalLM.apart`.
    """

    k: Float[Array, "layers batch kv_heads slots head_dim"]
    v: Float[Array, "layers batch kv_heads slots head_dim"]
    valid: Bool[Array, "batch slots"]
    lengths: Int[Array, "batch"]
    slot: Int[Array, ""]
    window: Float[Array, "linear batch taps channels"] | None = None
    state: Float[Array, "linear batch value_heads dk dv"] | None = None


class LayerCache(NamedTuple):
    """The stacks of a `Cache` on their way through the layers, with the layers and the slot to write next.

    The stacks travel whole, as the carry of the layer scan, so that each write is in place; slicing them per
    layer and stacking the slices again would copy the whole cache for every token. `layer` counts layers with
    full attention, `linear` the others; None where there is no stack, but what belongs to one layer.
    """

    k: Float[Array, "*layers batch kv_heads slots head_dim"]
    v: Float[Array, "*layers batch kv_heads slots head_dim"]
    layer: Int[Array, ""] | None
    slot: Int[Array, ""]
    window: Float[Array, "*linear batch taps channels"] | None = None
    state: Float[Array, "*linear batch value_heads dk dv"] | None = None
    linear: Int[Array, ""] | None = None

    def write(
        self, k: Float[Array, "batch time kv_heads head_dim"], v: Float[Array, "batch time kv_heads head_dim"]
    ) -> "LayerCache":
        """This layer's new keys and values at slots `slot` onwards."""
        zero = jnp.zeros_like(self.slot)
        at = (zero, zero, self.slot, zero)

        def put(stack: jax.Array, new: jax.Array) -> jax.Array:
            new = new.swapaxes(1, 2).astype(stack.dtype)
            if self.layer is None:
                return lax.dynamic_update_slice(stack, new, at)
            return lax.dynamic_update_slice(stack, new[None], (self.layer, *at))

        return self._replace(k=put(self.k, k), v=put(self.v, v))

    def read(self, dtype: jax.typing.DTypeLike, span: int) -> tuple[jax.Array, jax.Array]:
        """The first `span` slots of this layer, keys and values `[batch, kv_heads, span, head_dim]`."""
        k, v = (_layer_of(stack, self.layer)[:, :, :span].astype(dtype) for stack in (self.k, self.v))
        return k, v

    def read_state(self) -> tuple[jax.Array, jax.Array]:
        """Window and state of this gated delta layer."""
        assert self.window is not None
        assert self.state is not None
        return _layer_of(self.window, self.linear), _layer_of(self.state, self.linear)

    def write_state(
        self, window: Float[Array, "batch taps channels"], state: Float[Array, "batch value_heads dk dv"]
    ) -> "LayerCache":
        """This gated delta layer's new window and state."""
        assert self.window is not None
        assert self.state is not None
        window = window.astype(self.window.dtype)
        if self.linear is None:
            return self._replace(window=window, state=state)
        return self._replace(
            window=lax.dynamic_update_index_in_dim(self.window, window, self.linear, 0),
            state=lax.dynamic_update_index_in_dim(self.state, state.astype(self.state.dtype), self.linear, 0),
        )


def _layer_of(stack: jax.Array, layer: jax.Array | None) -> jax.Array:
    return stack if layer is None else lax.dynamic_index_in_dim(stack, layer, keepdims=False)
