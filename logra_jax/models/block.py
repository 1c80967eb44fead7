"""One layer of a decoder: a token mixer and an MLP."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from logra_jax._shapes import Float
from logra_jax.mesh import constrain
from logra_jax.models.cache import LayerCache
from logra_jax.models.config import ModelConfig
from logra_jax.models.gated_delta import GatedDelta
from logra_jax.models.layers import MLP, Attention, RMSNorm, Rope, Sight
from logra_jax.models.remat import BETWEEN


class DecoderLayer(nnx.Module):
    """A token mixer and an MLP, each behind a norm and beside the residual stream.

    full: the mixer is attention over all earlier tokens, else the gated delta rule of a hybrid model.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None, full: bool = True):
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps, config.zero_centered_norms)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        if full:
            self.self_attn = Attention(config, mesh)
        else:
            self.linear_attn = GatedDelta(config, mesh)
        self.mlp = MLP(config, mesh)
        self.full, self.mesh = full, mesh

    def __call__(
        self,
        x: Float[jax.Array, "batch time d"],
        rope: Rope,
        sight: Sight,
        cache: LayerCache | None,
    ) -> tuple[Float[jax.Array, "batch time d"], LayerCache | None]:
        normed = self.input_layernorm(x)
        if self.full:
            mixed, cache = self.self_attn(normed, rope, sight, cache)
        else:
            mixed, cache = self.linear_attn(normed, sight.real(x.shape[1]), sight.segments, cache)
        x = checkpoint_name(constrain(x + mixed, self.mesh, "batch", None, None), BETWEEN)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, self.mesh, "batch", None, None), cache
