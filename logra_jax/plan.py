"""python -m logra_jax.plan: does a run fit on some GPUs, which need not be present, and what takes the memory.

The compiler's own account of the trainer's update and rollout, for every optimizer on the same weights. It
takes the settings of a training run; model.preset stands in for a model that has not been fetched, and data
files are not read: prompts count at data.max_prompt_length. Compiling for a GPU needs the extra `plan`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from logra_jax import cli
from logra_jax.config import Config, load_config, resolve_path
from logra_jax.errors import UserError
from logra_jax.gpus import GIB, GPUS, Target, find_gpu
from logra_jax.settings import LOW_RANK

if TYPE_CHECKING:
    from logra_jax.footprint import Footprint
    from logra_jax.models import ModelConfig

OPTIMIZERS = ("logra", "adamw", "galore", "lora")
# What no compiler reports: the CUDA context with its libraries, and NCCL's buffers where devices talk.
CONTEXT_GIB, COLLECTIVES_GIB = 0.75, 0.5


class Plan(NamedTuple):
    """One optimizer on one kind of GPU; figures in GiB per device."""

    footprint: Footprint
    card: float
    reserve: float

    @property
    def needed(self) -> float:
        """The larger of update and rollout, with the reserve."""
        return self.footprint.peak / GIB + self.reserve

    @property
    def left(self) -> float:
        """What remains of the card."""
        return self.card - self.needed

    @property
    def fits(self) -> bool:
        """Whether anything remains."""
        return self.left >= 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, compile, and print the plan. Returns the exit code 0, also if the run does not fit."""
    parser = cli.make_parser("python -m logra_jax.plan", __doc__ or "")
    parser.add_argument(
        "--gpu", default="h100-80gb", metavar="NAME|PROTO", help=f"{', '.join(GPUS)}, or a file (default: h100-80gb)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="how many (default: those the mesh settings name)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output instead")
    parser.add_argument("--search", action="store_true", help="find the largest settings that fit as well (minutes)")
    found = parser.parse_intermixed_args(argv)
    config, target = load_config(found.config, found.settings), find_gpu(found.gpu)
    if config.model.attention == "cudnn":  # where it cannot be compiled here, the other one is planned
        config = replace(config, model=replace(config.model, attention="auto"))
    count = found.gpus if found.gpus is not None else max(config.mesh.fsdp, 1) * config.mesh.tensor
    _check_count(config, count)

    by_gpu = has_compiler()
    if not by_gpu:
        print(NO_COMPILER, file=sys.stderr)
    prepare_jax(count)
    from logra_jax import build, footprint
    from logra_jax.models.flash import why_not_cudnn

    shape = build.read_model_config(config)
    vocab_size = _vocabulary(config, shape)
    devices = footprint.absent_gpus(target, count) if by_gpu else _cpu_devices(count)
    reserve = CONTEXT_GIB + (COLLECTIVES_GIB if count > 1 else 0.0)
    attention = build.choose_attention(config, shape, devices[0])
    if attention == "cudnn":
        reserve += footprint.attention_workspace(config, shape, count // config.mesh.tensor) / GIB
    elif (
        by_gpu
        and config.model.attention == "auto"
        and config.model.compute_dtype == "bfloat16"
        and (reason := why_not_cudnn(shape, devices[0])) is not None
    ):
        print(NO_CUDNN.format(reason=reason), file=sys.stderr)

    def plan(config: Config, sampled: dict[int, int] | None = None) -> Plan:
        room = target.memory - reserve * GIB
        found = footprint.measure(config, shape, vocab_size, devices, room=room, sampled=sampled)
        return Plan(found, target.memory / GIB, reserve)

    plans: dict[str, Plan] = {}
    sampled: dict[int, int] = {}
    own = config.optimizer.name
    for name in dict.fromkeys((own, *OPTIMIZERS)):  # what is wrong with all of them is said once, of the one asked for
        print(f"compiling {name} ...", file=sys.stderr, flush=True)
        # Sampling is one program whatever trains the weights, unless they have adapters.
        try:
            plans[name] = plan(footprint.with_optimizer(config, name), {} if name == "lora" else sampled)
        except UserError as error:
            if name == own:
                raise
            print(f"note: {name} is left out: {error}", file=sys.stderr)
    plans = {name: plans[name] for name in dict.fromkeys((*OPTIMIZERS, own)) if name in plans}
    largest = search(config, count, lambda changed: plan(changed).fits, shape) if found.search else {}
    if found.json:
        entries = {name: as_json(name, one, by_gpu) for name, one in plans.items()}
        if largest:
            entries[config.optimizer.name]["largest"] = largest
        print(json.dumps(entries))
        return 0
    print(header(config, shape, target, count, by_gpu, attention))
    print(table(plans))
    print()
    for name, one in plans.items():
        print(verdict(name, one, footprint.with_optimizer(config, name), count))
    for key, value in largest.items():
        print(f"largest {key} that fits with the other settings as they are: {value or 'none'}")
    return 0


NO_COMPILER = (
    "note: there is no GPU compiler here, so this is an ESTIMATE from the same programs compiled for a CPU: weights "
    "and optimizer state are exact, temporaries are not. For the real figures: pip install 'logra-jax[plan]'"
)

NO_CUDNN = (
    "note: planned with attention in blocks, which takes a little more memory than cuDNN's: {reason}. If that is for "
    "want of cuDNN's library: pip install nvidia-cudnn-cu13"
)


def has_compiler() -> bool:
    """Whether a CUDA plugin of jax is installed, which compiles for GPUs that are not there."""
    try:
        return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))
    except ModuleNotFoundError:
        return False


def _check_count(config: Config, count: int) -> None:
    fsdp, tensor = config.mesh.fsdp, config.mesh.tensor
    if count < 1:
        raise UserError(f"--gpus {count}: give at least 1")
    if count % tensor:
        enough = -(-count // tensor) * tensor
        raise UserError(f"--gpus {count} is not a multiple of mesh.tensor={tensor}: use --gpus {enough}")
    if fsdp and fsdp * tensor != count:
        raise UserError(
            f"--gpus {count}, but mesh.fsdp={fsdp} x mesh.tensor={tensor} uses {fsdp * tensor}: "
            f"set mesh.fsdp={count // tensor}, or --gpus {fsdp * tensor}"
        )


def prepare_jax(count: int) -> None:
    """Settings that jax reads when it is first imported: compile only, touch no device, and enough fake ones."""
    if "jax" in sys.modules:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()


def _cpu_devices(count: int) -> Sequence[Any]:
    import jax

    return jax.devices("cpu")[:count]


def _vocabulary(config: Config, shape: ModelConfig) -> int:
    """Ids that can be sampled: the trainer leaves out the padding of the embedding table."""
    if not config.model.path:
        return shape.vocab_size
    from logra_jax.rl.tokenizer import load_tokenizer

    return min(len(load_tokenizer(resolve_path(config.model.path))), shape.vocab_size)


def rows(name: str, plan: Plan) -> dict[str, float]:
    """The figures of a plan in GiB, by their JSON key."""
    found = plan.footprint
    figures = {
        "weights": found.weights,
        "optimizer": found.optimizer,
        "sketches" if name == "logra" else "gradients": found.gradients,
        "temporaries": found.temporaries,
        "total": found.update,
        "kv_cache": found.kv_cache,
        "rollout": found.rollout,
        "copy": found.copy,
        "reference": found.reference,
    }
    in_gib = {f"{key}_gib": size / GIB for key, size in figures.items()}
    return in_gib | {
        "reserve_gib": plan.reserve,
        "needed_gib": plan.needed,
        "card_gib": plan.card,
        "left_gib": plan.left,
    }


def as_json(name: str, plan: Plan, by_gpu: bool) -> dict[str, Any]:
    """A plan as plain values. total_gib: compiled bytes of the update; needed_gib: of both phases, with the reserve."""
    figures: dict[str, Any] = {key: round(value, 9) for key, value in rows(name, plan).items()}
    return figures | {"fits": plan.fits, "compiled_for": "gpu" if by_gpu else "cpu (estimate)"}


def header(config: Config, shape: ModelConfig, target: Target, count: int, by_gpu: bool, attention: str) -> str:
    """What is planned, for people."""
    model, rollout, optimizer = config.model, config.rollout, config.optimizer
    name = model.path or model.preset
    budget = config.loss.token_budget
    passes = f"{budget} tokens per GPU" if budget else f"{config.loss.micro_batch or rollout.rows} answers"
    compiled = "compiled for these GPUs" if by_gpu else "ESTIMATE: compiled for a CPU"
    return (
        f"{name}: {shape.num_hidden_layers} layers, hidden {shape.hidden_size}, {model.compute_dtype} compute, "
        f"remat {model.remat}, attention {attention}\n"
        f"{count} x {target.name} ({target.memory / GIB:.1f} GiB each), "
        f"mesh fsdp={count // config.mesh.tensor} tensor={config.mesh.tensor}; {compiled}\n"
        f"{rollout.prompts} prompts x {rollout.generations} answers, {config.data.max_prompt_length} + "
        f"{rollout.max_new_tokens} tokens, {passes} per micro-batch; rank {optimizer.rank} but for adamw\n"
        f"{_sampled(config, count)}"
    )


def _sampled(config: Config, count: int) -> str:
    """What is counted as the rollout, where that is not the training's."""
    from logra_jax.sampling import sampled_here

    if config.rollout.engine == "jax":
        return ""
    asked = sampled_here(config, count // config.mesh.tensor)
    here = (
        "nothing is sampled here"
        if asked is None
        else (f"the rollout is that of the evaluation, {asked.prompts} prompts x {asked.samples} answers")
    )
    return f"vLLM servers sample what is trained on, and their memory is their own: {here}\n"


def table(plans: dict[str, Plan]) -> str:
    """The figures side by side."""
    labels = {
        "weights": "weights",
        "optimizer": "optimizer state",
        "gradients": "sketches / gradients (computed; in temporaries)",
        "temporaries": "temporaries of the update",
        "total": "update, compiled total",
        "kv_cache": "KV cache (computed; in the rollout)",
        "copy": "weights laid out to sample (computed; in it)",
        "rollout": "rollout, compiled total",
        "reference": "copy of the weights for the reference KL",
        "reserve": "context and collectives (estimate)",
        "needed": "total: larger phase + estimate",
        "card": "card",
        "left": "left",
    }
    columns = {name: rows(name, plan) for name, plan in plans.items()}
    lines = [f"{'GiB per GPU':<50}" + "".join(f"{name:>9}" for name in columns)]
    for key, label in labels.items():
        values = [found.get(f"{key}_gib", found.get("sketches_gib", 0.0)) for found in columns.values()]
        if key not in ("reference", "copy") or any(values):
            lines.append(f"{label:<50}" + "".join(f"{value:9.2f}" for value in values))
    return "\n".join(lines)


def verdict(name: str, plan: Plan, config: Config, count: int) -> str:
    """Whether it fits; if not, what is largest and what to change."""
    found = plan.footprint
    if plan.fits:
        share, given = found.peak / GIB / plan.card, config.mesh.memory_fraction or cli.MEMORY_FRACTION
        more = f", if mesh.memory_fraction={math.ceil(100 * share) / 100} instead of {given}" if share > given else ""
        return f"{name}: fits, {plan.left:.2f} GiB left{more}"
    parts = {
        "weights": found.weights,
        "optimizer state": found.optimizer,
        "temporaries of the update": found.temporaries,
        "rollout": found.rollout - found.weights,
    }
    largest = max(parts, key=lambda part: parts[part])
    return (
        f"{name}: DOES NOT FIT, {-plan.left:.2f} GiB too large; the largest part is the {largest} "
        f"({parts[largest] / GIB:.2f} GiB). What helps: {remedies(name, largest, config, count)}"
    )


def remedies(name: str, part: str | None, config: Config, count: int) -> str:
    """What to change so that less memory is needed for one part of `verdict`, or for any of them (None)."""
    micro, fsdp = config.loss.micro_batch, count // config.mesh.tensor
    changes = []
    if part in ("rollout", None) and (config.rollout.engine == "jax" or config.data.eval is not None):
        if config.rollout.layout == "tensor" or (part is None and config.rollout.layout == "auto" and count > 1):
            changes.append("set rollout.layout=train")
        changes.append(f"lower rollout.prompts={config.rollout.prompts}")
        if config.rollout.generations > 1:
            changes.append(f"rollout.generations={config.rollout.generations}")
        changes.append(f"rollout.max_new_tokens={config.rollout.max_new_tokens}")
        changes.append(f"rollout.slots={config.rollout.slots or config.rollout.rows}")
    if part in ("temporaries of the update", None):
        longest = config.data.max_prompt_length + config.rollout.max_new_tokens
        if config.loss.token_budget:
            if config.loss.token_budget > longest:
                changes.append(f"set loss.token_budget={longest}")
        elif micro == 0 or micro > fsdp:
            changes.append(f"set loss.micro_batch={fsdp}")
        remat = config.model.remat
        if remat != "offload":
            changes.append(f"set model.remat={'offload' if remat == 'full' else 'full'}")
        if part is not None:
            changes.append(f"lower rollout.max_new_tokens={config.rollout.max_new_tokens}")
        if name in LOW_RANK:
            changes.append(f"lower optimizer.rank={config.optimizer.rank}")
    if part in ("weights", None) and config.model.param_dtype == "float32":
        changes.append("set model.param_dtype=bfloat16")
    if name != "logra":
        changes.append("use optimizer.name=logra")
    changes.append(f"use more than {count} GPU{'s' * (count > 1)}, or larger ones")
    return "; ".join(changes)


def search(config: Config, count: int, fits: Callable[[Config], bool], shape: ModelConfig) -> dict[str, int | None]:
    """The largest value of each of three settings with which the run fits, the others as they are; None: none does.

    Answers per micro-batch are tried among the numbers that the rows and the devices allow, token budgets, where one is
    set, in multiples of the longest answer, answers per prompt among 1 to 64, and tokens per answer in steps of 256 up
    to what the model and the budget take.
    """
    fsdp, rollout, micro = count // config.mesh.tensor, config.rollout, config.loss.micro_batch or 1
    budget, prompt = config.loss.token_budget, config.data.max_prompt_length
    longest = min(shape.max_position_embeddings, budget or shape.max_position_embeddings) - prompt
    settings: dict[str, tuple[list[int], Callable[[int], Config]]] = {
        "loss.micro_batch": (
            [size for size in range(fsdp, rollout.rows + 1, fsdp) if rollout.rows % size == 0],
            lambda value: replace(config, loss=replace(config.loss, micro_batch=value)),
        ),
        "rollout.max_new_tokens": (
            [*range(256, longest, 256), longest],
            lambda value: replace(config, rollout=replace(rollout, max_new_tokens=value)),
        ),
        "rollout.generations": (
            [n for n in range(1 if rollout.generations == 1 else 2, 65) if rollout.prompts * n % micro == 0],
            lambda value: replace(config, rollout=replace(rollout, generations=value)),
        ),
    }
    if budget:
        del settings["loss.micro_batch"]
        row = prompt + rollout.max_new_tokens
        settings["loss.token_budget"] = (
            [row * count for count in range(1, rollout.rows // fsdp + 1)],
            lambda value: replace(config, loss=replace(config.loss, token_budget=value)),
        )
    found: dict[str, int | None] = {}
    for key, (values, changed) in settings.items():
        print(f"searching {key} ...", file=sys.stderr, flush=True)
        found[key] = largest_fitting(values, partial(_fits, fits, changed))
    return found


def _fits(fits: Callable[[Config], bool], changed: Callable[[int], Config], value: int) -> bool:
    """Whether the configuration with this value fits; sizes that cannot be compiled do not."""
    try:
        return fits(changed(value))
    except UserError as error:
        print(f"note: counted as not fitting: {error}", file=sys.stderr)
        return False


def largest_fitting(values: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The last of the rising `values` that fits, by bisection: where one fits, all before it do."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(values[middle]) else (low, middle)
    return values[low - 1] if low else None


if __name__ == "__main__":
    cli.run(main)
