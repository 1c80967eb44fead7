"""Gradient sketches, RowAdam and predicted-KL steps as optax transformations (arXiv 2610.06647).

Names are loaded when they are first used, so that `logra_jax.optim.names` and `logra_jax.optim.twin` can be
imported where there is no jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logra_jax.optim.alias import logra as logra
    from logra_jax.optim.apply import LowRank as LowRank
    from logra_jax.optim.apply import apply_updates as apply_updates
    from logra_jax.optim.apply import apply_with_residual as apply_with_residual
    from logra_jax.optim.apply import lift as lift
    from logra_jax.optim.apply import sketch_shardings as sketch_shardings
    from logra_jax.optim.apply import state_shardings as state_shardings
    from logra_jax.optim.galore import per_matrix as per_matrix
    from logra_jax.optim.galore import stacked_galore as stacked_galore
    from logra_jax.optim.guard import guard_nonfinite as guard_nonfinite
    from logra_jax.optim.guard import step_ok as step_ok
    from logra_jax.optim.guard import update_count as update_count
    from logra_jax.optim.lora import LoraKernel as LoraKernel
    from logra_jax.optim.lora import adapter_scale as adapter_scale
    from logra_jax.optim.lora import adapter_shapes as adapter_shapes
    from logra_jax.optim.lora import add_adapters as add_adapters
    from logra_jax.optim.lora import merge_adapters as merge_adapters
    from logra_jax.optim.lora import split_adapters as split_adapters
    from logra_jax.optim.names import DEFAULT_TARGETS as DEFAULT_TARGETS
    from logra_jax.optim.names import name_hash as name_hash
    from logra_jax.optim.predicted_kl import HiddenHead as HiddenHead
    from logra_jax.optim.predicted_kl import cosine_budget as cosine_budget
    from logra_jax.optim.predicted_kl import kl_link as kl_link
    from logra_jax.optim.predicted_kl import mismatch_average as mismatch_average
    from logra_jax.optim.predicted_kl import predict_kl as predict_kl
    from logra_jax.optim.predicted_kl import scale_by_predicted_kl as scale_by_predicted_kl
    from logra_jax.optim.rounding import in_float32 as in_float32
    from logra_jax.optim.rounding import init_residual as init_residual
    from logra_jax.optim.rounding import rounding_keys as rounding_keys
    from logra_jax.optim.row_adam import scale_by_row_adam as scale_by_row_adam
    from logra_jax.optim.sketching import sketch as sketch
    from logra_jax.optim.sketching import sketch_count as sketch_count
    from logra_jax.optim.sketching import sketched as sketched
    from logra_jax.optim.slot import Slot as Slot
    from logra_jax.optim.slot import sketch_matmul as sketch_matmul
    from logra_jax.optim.slot import sketched_value_and_grad as sketched_value_and_grad
    from logra_jax.optim.slot import with_slots as with_slots
    from logra_jax.optim.spec import SketchSpec as SketchSpec
    from logra_jax.optim.spec import Target as Target
    from logra_jax.optim.spec import merge as merge
    from logra_jax.optim.update_ratio import scale_by_update_ratio as scale_by_update_ratio

# Public name -> the module of this package that defines it.
EXPORTS = {
    "DEFAULT_TARGETS": "names",
    "HiddenHead": "predicted_kl",
    "LoraKernel": "lora",
    "LowRank": "apply",
    "SketchSpec": "spec",
    "Slot": "slot",
    "Target": "spec",
    "adapter_scale": "lora",
    "adapter_shapes": "lora",
    "add_adapters": "lora",
    "apply_updates": "apply",
    "apply_with_residual": "apply",
    "cosine_budget": "predicted_kl",
    "guard_nonfinite": "guard",
    "in_float32": "rounding",
    "init_residual": "rounding",
    "kl_link": "predicted_kl",
    "lift": "apply",
    "logra": "alias",
    "merge": "spec",
    "merge_adapters": "lora",
    "mismatch_average": "predicted_kl",
    "name_hash": "names",
    "per_matrix": "galore",
    "predict_kl": "predicted_kl",
    "rounding_keys": "rounding",
    "scale_by_predicted_kl": "predicted_kl",
    "scale_by_row_adam": "row_adam",
    "scale_by_update_ratio": "update_ratio",
    "sketch": "sketching",
    "sketch_count": "sketching",
    "sketch_matmul": "slot",
    "sketched": "sketching",
    "sketched_value_and_grad": "slot",
    "sketch_shardings": "apply",
    "split_adapters": "lora",
    "stacked_galore": "galore",
    "state_shardings": "apply",
    "step_ok": "guard",
    "update_count": "guard",
    "with_slots": "slot",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(EXPORTS)}")
    return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(EXPORTS)
