"""Whether a run fits the GPUs that it is about to use, asked of the compiler before a weight is allocated."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from logra_jax import distributed, footprint
from logra_jax.config import Config
from logra_jax.errors import UserError
from logra_jax.gpus import GIB
from logra_jax.models import ModelConfig
from logra_jax.plan import Plan, remedies, verdict

TIGHT = 0.03  # what fragments of free memory may cost, as a share of it: with less left, a run may still fail


def memory_limit(devices: Sequence[Any]) -> int | None:
    """Bytes that JAX may use of one of these devices; None where it has no limit of its own, as on a CPU."""
    own = next(device for device in devices if device.process_index == jax.process_index())
    return (own.memory_stats() or {}).get("bytes_limit")


def check(config: Config, shape: ModelConfig, vocab_size: int, prompt_width: int, devices: Sequence[Any]) -> int | None:
    """Compile the run's update and rollout, and compare what they take with what there is.

    Returns the layout of sampling that fits, see `sampling.groups`, or None on devices without a limit, where nothing
    is done.

    The update comes from the cache when it is needed. vocab_size: tokens of the tokenizer. prompt_width: of the
    prompts as they are, at most data.max_prompt_length. Raises UserError if the run cannot fit, and says on standard
    error if it barely does.
    """
    limit = memory_limit(devices)
    if limit is None:
        return None
    if not distributed.alone():  # one decision for all
        limit = -distributed.largest(-(limit // 2**20)) * 2**20
    name, count = config.optimizer.name, len(devices)
    # What is advised below has to keep to the rules of the settings, and those know the configured length alone.
    as_read = replace(config, data=replace(config.data, max_prompt_length=prompt_width))
    found = footprint.measure(as_read, shape, vocab_size, devices, room=limit)
    plan = Plan(found, limit / GIB, reserve=0.0)
    here = f"each of {count} x {devices[0].device_kind} has {plan.card:.2f} GiB for this run"
    refused = None
    if not plan.fits:
        refused = UserError(
            f"{here} (see mesh.memory_fraction), it needs {plan.needed:.2f}: nothing was loaded. "
            f"{verdict(name, plan, config, count)}"
        )
    distributed.agree(refused)  # what a compiler chooses for its own device may take more than another one's
    print(f"memory     {here}, it needs {plan.needed:.2f}", flush=True)
    if plan.left < TIGHT * plan.card:
        print(
            f"warning: only {plan.left:.2f} GiB are left, and free memory in pieces may not do. What helps: "
            f"{remedies(name, None, config, count)}",
            file=sys.stderr,
        )
    return int(distributed.from_first(np.array([found.group], np.int32))[0])


def ran_out(error: BaseException) -> bool:
    """Whether an error of JAX says that a device ran out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def out_of_memory(config: Config, error: BaseException, *, trains: bool = True) -> UserError:
    """What to tell a user whose run, or evaluation, ran out of memory."""
    count = config.mesh.fsdp * config.mesh.tensor or jax.device_count()
    said = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
    if trains:
        helps = remedies(config.optimizer.name, None, config, count)
        helps += ". Saved checkpoints are intact: go on from the newest with --resume"
    else:
        helps = remedies("logra", "rollout", config, count)  # no optimizer that could be another one
    return UserError(f"a device ran out of memory: {said}. What helps: {helps}")
