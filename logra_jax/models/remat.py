"""What the backward pass of a layer keeps, by name; all else is computed again.

| name | kept per layer, beside parameters |
|---|---|
| none | whatever the compiler sees fit: nothing is computed twice |
| full | the layer's input |
| projected | the input, the state between attention and MLP, and x A^T of every sketched kernel: attention and
  its output product are then not needed again |
| offload | the layer's input, in pinned host memory |
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from logra_jax.optim.names import PROJECTED_INPUT

REMAT = ("none", "full", "projected", "offload")

# Names that the decoder gives to values, for the policies to know them by.
LAYER_INPUT, BETWEEN = "layer_input", "between_attention_and_mlp"


def rematerialized(layer: Callable[..., Any], name: str, *, looped: bool) -> Callable[..., Any]:
    """`layer(activations, parameters)` under the policy of that name.

    looped: it is in the body of a loop.
    """
    if name == "none":
        return layer
    policies = jax.checkpoint_policies
    policy = {
        "full": policies.nothing_saveable,
        "projected": policies.save_only_these_names(PROJECTED_INPUT, BETWEEN),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }[name]
    # In a loop's body nothing can be merged with the recomputation. But the layers of one body could all be computed
    # again at once: a barrier makes each wait for the gradient that comes back to it. It leaves out the parameters,
    # which it would copy.
    barriers = not looped
    return partial(jax.checkpoint, policy=policy, prevent_cse=barriers)(layer)
