"""The sizes of the model that the tests of single mechanisms build; where a test needs others, it replaces some."""

from logra_jax.models import ModelConfig

TINY = ModelConfig(
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
)
