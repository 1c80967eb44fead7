"""Flash attention of cuDNN, where it exists: no scores in memory, no work above the diagonal.

It has no forward mode and no cache, and wants each row's tokens at its start.
"""

import re
from functools import cache as memo
from typing import Any, Literal

import jax
import jax.numpy as jnp

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.models.config import ModelConfig

# Other lengths than multiples of 128 have been the source of wrong gradients in several versions of cuDNN.
TILE = 128


class Front:
    """Rows whose real tokens, next to each other, are moved to the start of rows of a multiple of TILE."""

    def __init__(self, real: Bool[Array, "batch time"]):
        self.time = real.shape[1]
        self.padding = -self.time % TILE
        self.start = jnp.argmax(real, axis=1).astype(jnp.int32)
        self.lengths = jnp.sum(real, axis=1, dtype=jnp.int32)

    @property
    def real(self) -> Bool[Array, "batch padded"]:
        """Where the real tokens are after the move."""
        return jnp.arange(self.time + self.padding)[None] < self.lengths[:, None]

    def move(self, ids: Int[Array, "batch time"]) -> Int[Array, "batch padded"]:
        """To the front; what comes after a row's tokens means nothing."""
        padded = jnp.pad(ids, ((0, 0), (0, self.padding)))
        return jnp.take_along_axis(padded, self._turned(self.start, padded.shape[1]), axis=1)

    def back(self, x: Float[Array, "batch padded d"]) -> Float[Array, "batch time d"]:
        """To where the tokens were."""
        return jnp.take_along_axis(x, self._turned(-self.start, x.shape[1])[:, : self.time, None], axis=1)

    @staticmethod
    def _turned(shift: Int[Array, " batch"], period: int) -> Int[Array, "batch {period}"]:
        return (jnp.arange(period)[None] + shift[:, None]) % period


def attend_to_front(
    q: Float[Array, "batch time heads head_dim"],
    k: Float[Array, "batch time kv_heads head_dim"],
    v: Float[Array, "batch time kv_heads head_dim"],
    lengths: Int[Array, " batch"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "batch time heads head_dim"]:
    """Causal softmax attention among the first `lengths` tokens of each row; 0 at all others."""
    real = (jnp.arange(q.shape[1])[None] < lengths[:, None])[..., None, None]

    # In both directions: what the kernel leaves at padding is not defined, and 0 times NaN would spread.
    def cleared(x: Array) -> Array:
        return jnp.where(real, x, jnp.zeros((), x.dtype))

    some = jnp.maximum(lengths, 1)  # a row of padding alone
    mixed = jax.nn.dot_product_attention(
        *map(cleared, (q, k, v)),
        is_causal=True,
        query_seq_lengths=some,
        key_value_seq_lengths=some,
        implementation=implementation,
    )
    return cleared(mixed)


def why_not_cudnn(config: ModelConfig, device: Any) -> str | None:
    """Why cuDNN's attention cannot be used for a model of these sizes on such a device; None: it can.

    The last word has the compiler: a pass of one tile is compiled for the device, which may be a description.
    """
    capability = re.match(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform not in ("gpu", "cuda") or capability is None:
        return f"{device.device_kind} is not an NVIDIA GPU"
    if int(capability[1]) < 8:
        return f"{device.device_kind} has compute capability {capability[0]}, and it takes 8.0"
    return _compiles(config.num_attention_heads, config.num_key_value_heads, config.head_dim, device)


@memo
def _compiles(heads: int, kv_heads: int, head_dim: int, device: Any) -> str | None:
    place = jax.sharding.SingleDeviceSharding(device)

    def array(shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    def loss(q: Array, k: Array, v: Array, lengths: Array) -> Array:
        return jnp.sum(attend_to_front(q, k, v, lengths).astype(jnp.float32))

    q, kv = (array((1, TILE, count, head_dim), "bfloat16") for count in (heads, kv_heads))
    try:
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv, array((1,), "int32")).compile()
    except Exception as error:  # the library is missing, too old, or does not know the device: it raises what it likes
        return f"it cannot be compiled ({(str(error).strip() or repr(error)).splitlines()[0].rstrip('.')})"
    return None
