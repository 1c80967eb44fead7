"""Gradient sketches, RowAdam and predicted-KL steps for reinforcement learning of language models in JAX."""
