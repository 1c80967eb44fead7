"""The cache of incremental decoding: keys and values, one slot per position, and the state of linear attention."""

from typing import Any, NamedTuple

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

    Instead of a stack there may be a list of the layers, see `CausalLM.apart`. Instead of k and v with all slots there
    may be tuples, of parts that have them one after the other: a short reach then reads the first parts alone, as they
    are, where a cut would be a copy. The first part takes any number of new tokens at a time, the others one.
    """

    k: Float[Array, "layers batch kv_heads slots head_dim"] | tuple[Array, ...]
    v: Float[Array, "layers batch kv_heads slots head_dim"] | tuple[Array, ...]
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

    k: Float[Array, "*layers batch kv_heads slots head_dim"] | tuple[Array, ...]
    v: Float[Array, "*layers batch kv_heads slots head_dim"] | tuple[Array, ...]
    layer: Int[Array, ""] | None
    slot: Int[Array, ""]
    window: Float[Array, "*linear batch taps channels"] | None = None
    state: Float[Array, "*linear batch value_heads dk dv"] | None = None
    linear: Int[Array, ""] | None = None

    def write(
        self, k: Float[Array, "batch time kv_heads head_dim"], v: Float[Array, "batch time kv_heads head_dim"]
    ) -> "LayerCache":
        """This layer's new keys and values at slots `slot` onwards."""
        return self._replace(k=self._put(self.k, k.swapaxes(1, 2)), v=self._put(self.v, v.swapaxes(1, 2)))

    def _put(self, stack: Any, new: jax.Array) -> Any:
        if not isinstance(stack, tuple):
            return lax.dynamic_update_slice(stack, self._like(stack, new), self._at(self.slot))
        parts, start = [], 0
        for part in stack:
            # A slot of another part: what was there is written again.
            place = self.slot - start
            at, start = self._at(jnp.clip(place, 0, part.shape[-2] - 1)), start + part.shape[-2]
            own = self._like(part, new)
            inside = (place >= 0) & (place < part.shape[-2])
            old = lax.dynamic_slice(part, at, own.shape)
            parts.append(lax.dynamic_update_slice(part, jnp.where(inside, own, old), at))
        return tuple(parts)

    def _at(self, slot: jax.Array) -> tuple[jax.Array, ...]:
        zero = jnp.zeros_like(slot)
        return (*(() if self.layer is None else (self.layer,)), zero, zero, slot, zero)

    def _like(self, stack: jax.Array, new: jax.Array) -> jax.Array:
        return (new if self.layer is None else new[None]).astype(stack.dtype)

    def read(self, dtype: jax.typing.DTypeLike, reach: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """This layer's keys and values, the parts that have the first `reach` slots: `[batch, kv_heads, slots,
        head_dim]` each. A reach has to end where a part does."""

        def near(stack: Any) -> list[jax.Array]:
            found, start = [], 0
            for part in stack if isinstance(stack, tuple) else (stack,):
                if start < reach:
                    found.append(_layer_of(part, self.layer).astype(dtype))
                start += part.shape[-2]
            return found

        return near(self.k), near(self.v)

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
