"""A kernel may be any pytree node that answers `x @ kernel`: it passes through merge, scan and checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax.models import CausalLM, ModelConfig

CONFIG = ModelConfig(
    model_type="qwen2",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    qkv_bias=True,
    initializer_range=0.3,
)
IDS = np.random.default_rng(5).integers(0, 32, (2, 7), dtype=np.int32)
TARGETS = (("self_attn", "q_proj"), ("self_attn", "o_proj"), ("mlp", "down_proj"))


@jax.tree_util.register_pytree_node_class
class LowRank:
    """`x @ W + (x @ a) @ u`, a sketch slot reduced to what a model has to put up with."""

    def __init__(self, kernel, a, u):
        self.kernel, self.a, self.u = kernel, a, u

    def tree_flatten(self):
        return (self.kernel, self.a, self.u), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)

    def astype(self, dtype):
        return LowRank(self.kernel.astype(dtype), self.a, self.u)

    def __rmatmul__(self, x):
        return x @ self.kernel + (x.astype(jnp.float32) @ self.a @ self.u).astype(x.dtype)


def with_slots(params, us):
    """The parameters with low-rank nodes at the targets and at the head; `us` are their u, by target."""
    out = jax.tree.map(lambda x: x, params)
    for block, name in TARGETS:
        kernel = out["layers"][block][name]["kernel"]
        a = jnp.asarray(np.random.default_rng(7).normal(0, 0.1, (*kernel.shape[:2], 2)), jnp.float32)
        out["layers"][block][name]["kernel"] = LowRank(kernel, a, us[name])
    kernel = out["lm_head"]["kernel"]
    out["lm_head"]["kernel"] = LowRank(kernel, jnp.full((16, 2), 0.1), us["lm_head"])
    return out


def densified(params):
    """The same weights as plain arrays."""
    return jax.tree.map(
        lambda x: x.kernel + x.a @ x.u if isinstance(x, LowRank) else x,
        params,
        is_leaf=lambda x: isinstance(x, LowRank),
    )


def us_for(params):
    shapes = {name: params["layers"][block][name]["kernel"].shape for block, name in TARGETS}
    us = {name: (shape[0], 2, shape[2]) for name, shape in shapes.items()} | {"lm_head": (2, 32)}
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.standard_normal(shape, np.float32)) for name, shape in us.items()}


def test_value_and_gradient_are_those_of_the_dense_sum(random_params):
    base = CausalLM(CONFIG)
    params = random_params(base)
    us = us_for(params)

    def loss(us, model, dense):
        full = with_slots(params, us)
        return jnp.square(model.logits(densified(full) if dense else full, IDS)).mean()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=(1, 2))
    expected, expected_grads = run(us, base, True)
    for change in ({"scan_unroll": 1}, {"scan_unroll": 3}, {"scan_unroll": 1, "remat": "full"}):
        value, grads = run(us, base.replace(**change), False)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        for name, grad in grads.items():
            bound = 1e-5 * np.abs(expected_grads[name]).max()
            assert bound > 0
            np.testing.assert_allclose(grad, expected_grads[name], atol=bound, rtol=0, err_msg=name)


def test_decoding_with_slots_in_bfloat16(random_params):
    model = CausalLM(CONFIG, compute_dtype="bfloat16")
    params = random_params(model)
    slots = with_slots(params, jax.tree.map(jnp.zeros_like, us_for(params)))
    hidden, cache = jax.jit(model.hidden)(slots, IDS, cache=model.init_cache(2, 9))
    plain, _ = jax.jit(model.hidden)(params, IDS, cache=model.init_cache(2, 9))
    np.testing.assert_array_equal(hidden, plain)
    assert cache.slot == 7
    assert jax.eval_shape(model.logits, slots, IDS).dtype == jnp.float32
