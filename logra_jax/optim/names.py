"""Names: the hash of a weight's, which keys its projection, those sketched by default, and one for remat policies.

Neither jax nor flax is imported: an engine that rebuilds projections needs this module and `twin`.
"""

import hashlib

# Attention and MLP projections, and the projections of a linear-attention (hybrid) layer, by the names of a
# Hugging Face file ("model.layers.3.mlp.up_proj.weight") or by key paths ("layers/mlp/up_proj/kernel").
DEFAULT_TARGETS: tuple[str, ...] = (
    r"(^|[./])((q|k|v|o|gate|up|down)_proj|linear_attn[./](in_proj_qkv|in_proj_z|out_proj))([./](weight|kernel))?$",
)

# What the backward pass keeps of a sketched kernel's input, x A^T, under this name for remat policies
# (`jax.checkpoint_policies.save_only_these_names`).
PROJECTED_INPUT = "projected_input"


def name_hash(name: str) -> int:
    """Little-endian unsigned 32-bit integer of blake2b(name, 4 bytes): the part of a key that is the
    weight's own."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
