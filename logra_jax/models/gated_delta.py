"""The linear-attention token mixer of the Qwen3.5 family: the gated delta rule behind a short convolution."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.models.cache import LayerCache
from logra_jax.models.config import ModelConfig
from logra_jax.models.delta_rule import (
    DeltaInputs,
    causal_conv,
    delta_rule,
    delta_rule_step,
    next_window,
    unit_length,
)
from logra_jax.models.layers import Linear, RMSNorm, along_last, param


class Conv(nnx.Module):
    """The kernel of a causal convolution over time, one per channel, without a bias."""

    def __init__(self, width: int, channels: int):
        self.kernel = param(width, channels, axes=("taps", "q_heads"))


class GatedDelta(nnx.Module):
    """`out(norm(delta rule) * silu(z))`, the rule on queries, keys and values that passed a convolution and SiLU.

    Padding writes nothing, and the convolution sees zeros there. Decay, write strength and state are float32.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None):
        sizes, hidden = config.linear_attention, config.hidden_size
        assert sizes is not None
        self.sizes = sizes
        linear = partial(Linear, mesh=mesh)
        self.in_proj_qkv = linear(hidden, sizes.channels, axes=("embed", "q_heads"))
        self.in_proj_z = linear(hidden, sizes.value_size, axes=("embed", "q_heads"))
        self.in_proj_b = linear(hidden, sizes.value_heads, axes=("embed", "width"))
        self.in_proj_a = linear(hidden, sizes.value_heads, axes=("embed", "width"))
        self.out_proj = linear(sizes.value_size, hidden, axes=("heads_in", "width"))
        self.conv1d = Conv(sizes.conv_width, sizes.channels)
        self.A_log = param(sizes.value_heads, axes=("norm",))
        self.dt_bias = param(sizes.value_heads, axes=("norm",))
        self.norm = RMSNorm(sizes.value_dim, config.rms_norm_eps)

    def __call__(
        self,
        x: Float[Array, "batch time d"],
        real: Bool[Array, "batch time"],
        segments: Int[Array, "batch time"] | None,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "batch time d"], LayerCache | None]:
        sizes, (batch, time, _) = self.sizes, x.shape
        x = jnp.where(real[..., None], x, 0)
        mixed = self.in_proj_qkv(x)
        if cache is None:
            window = jnp.zeros((batch, sizes.conv_width - 1, sizes.channels), mixed.dtype)
            state = jnp.zeros((batch, sizes.value_heads, sizes.key_dim, sizes.value_dim), jnp.float32)
        else:
            window, state = cache.read_state()
        conv = jax.nn.silu(causal_conv(mixed, window, self.conv1d.kernel.get_value(), segments)).astype(x.dtype)
        q, k, v = jnp.split(conv, [sizes.key_size, 2 * sizes.key_size], axis=-1)
        q, k = (unit_length(part.reshape(batch, time, sizes.key_heads, sizes.key_dim)) for part in (q, k))
        rule = DeltaInputs(
            q=(q * sizes.key_dim**-0.5).astype(x.dtype),
            k=k.astype(x.dtype),
            v=v.reshape(batch, time, sizes.value_heads, sizes.value_dim),
            g=jnp.where(real[..., None], self._decay(x), 0.0),
            beta=jnp.where(real[..., None], jax.nn.sigmoid(self.in_proj_b(x).astype(jnp.float32)), 0.0),
        )
        if cache is not None and time == 1:
            out, state = delta_rule_step(rule, state)
        else:
            exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
            out, state = delta_rule(rule, state, segments, exact)
        if cache is not None:
            last = jnp.max(jnp.where(real, jnp.arange(time)[None] + 1, 0), axis=1)
            cache = cache.write_state(next_window(mixed, window, last), state)
        gate = self.in_proj_z(x).reshape(out.shape)
        out = self.norm(out.astype(x.dtype)) * jax.nn.silu(gate)
        return self.out_proj(out.reshape(batch, time, sizes.value_size)), cache

    def _decay(self, x: Float[Array, "batch time d"]) -> Float[Array, "batch time heads"]:
        """g = -exp(A_log) softplus(a + dt_bias), the logarithm of what a step keeps of the state."""
        a = self.in_proj_a(x).astype(jnp.float32)
        rate = jnp.exp(along_last(self.A_log.get_value(), a))
        return -rate * jax.nn.softplus(a + along_last(self.dt_bias.get_value(), a))
