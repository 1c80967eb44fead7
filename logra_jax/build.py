"""From the settings of a run to its optimizer, its prompts and its grader. Used by the commands alone."""

import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax import distributed, optim
from logra_jax.config import Config, check_paths, resolve_path
from logra_jax.errors import UserError
from logra_jax.models import CausalLM, ModelConfig
from logra_jax.models.flash import why_not_cudnn
from logra_jax.models.hf import read_json
from logra_jax.models.presets import PRESETS, differences
from logra_jax.rl.loss import LossSettings
from logra_jax.rl.packing import Packing, row_width
from logra_jax.rl.policy import Policy
from logra_jax.rl.prompts import PromptSet, check_columns, load_prompts
from logra_jax.rl.reward import Grader, make_reward
from logra_jax.rl.rollout import Sampler
from logra_jax.rl.shared_grading import SharedGrader
from logra_jax.rl.tasks import TASK, is_mixture
from logra_jax.rl.update import TrainState, make_update
from logra_jax.settings import LOW_RANK


def check_files(config: Config, *, trains: bool) -> None:
    """Refuse missing files and columns, before anything that takes long. Raises UserError."""
    check_paths(config, trains=trains)
    data = config.data
    for path, held_out in ((data.train if trains else None, False), (data.eval, True)):
        if path is not None:
            wanted = {name: getattr(data, name) for name in ("prompt_column", "answer_column", "task_column")}
            check_columns(resolve_path(path), wanted, held_out=held_out)


def read_model_config(config: Config) -> ModelConfig:
    """The sizes of the model in model.path, or, without a folder, those of model.preset. Raises UserError."""
    settings = config.model
    if not settings.path:
        if settings.preset is None:
            raise UserError("neither model.path nor model.preset is set: give a folder, or the name of a model")
        changes = {"rope_theta": settings.rope_theta, "max_position_embeddings": settings.max_position_embeddings}
        return PRESETS[settings.preset].replace(**{k: v for k, v in changes.items() if v is not None})
    folder = resolve_path(settings.path)
    shape = ModelConfig.from_hf(
        read_json(folder, "config.json"),
        where=str(folder / "config.json"),
        rope_theta=settings.rope_theta,
        max_position_embeddings=settings.max_position_embeddings,
    )
    if settings.preset is not None and (found := differences(settings.preset, shape)):
        raise UserError(
            f"model.path={settings.path} is not the model of model.preset={settings.preset}: {', '.join(found)}; "
            "set model.preset=null, or give the right folder"
        )
    return shape


def choose_attention(config: Config, shape: ModelConfig, device: Any) -> str:
    """How training passes attend on such a device, "cudnn" or "blocked". UserError if cuDNN is asked for in vain.

    device: one of this process, or the description of one. Several processes, which call this together, attend in one
    way: what cannot be compiled for one of them is for none.
    """
    wanted = config.model.attention
    if wanted == "blocked" or config.model.compute_dtype != "bfloat16":
        return "blocked"
    if config.loss.token_budget:  # several answers in a row, which cuDNN would let see each other
        return "blocked"
    reason = why_not_cudnn(shape, device)
    refused = None
    if reason is not None and wanted == "cudnn":
        refused = UserError(f"model.attention=cudnn: {reason}; set model.attention=auto or blocked")
    distributed.agree(refused)
    return "blocked" if distributed.largest(reason is not None) else "cudnn"


def check_split(config: Config, fsdp: int) -> None:
    """Refuse numbers of rows that the devices cannot share evenly. Raises UserError."""
    rollout, micro = config.rollout, config.loss.micro_batch
    for name, count in (
        ("rollout.prompts", rollout.prompts), ("rollout.slots", rollout.slots), ("loss.micro_batch", micro)
    ):  # fmt: skip
        if count % fsdp:
            divisors = ", ".join(str(d) for d in range(1, count + 1) if count % d == 0)
            raise UserError(
                f"{name}={count} cannot be split over mesh.fsdp={fsdp} devices: use a multiple of {fsdp}, "
                f"or mesh.fsdp from {divisors}"
            )


def make_grader(config: Config) -> Grader:
    """The reward; a context manager whose end is that of the grading processes."""
    reward = config.reward
    grader = make_reward(
        reward.kind,
        answer_column=config.data.answer_column,
        timeout_s=reward.timeout_s,
        workers=reward.workers,
        pattern=reward.pattern,
    )
    return grader if distributed.alone() else SharedGrader(grader)


def read_prompts(config: Config, key: Literal["train", "eval"], tokenizer: Any, vocab_size: int) -> PromptSet:
    """The tokenized prompts of data.train or data.eval; what the tokenizer cannot read in them is said."""
    data = config.data
    path = str(getattr(data, key))
    found = load_prompts(
        resolve_path(path),
        tokenizer,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        template=data.template,
        enable_thinking=data.enable_thinking,
        prompt_format=data.prompt_format,
        system=data.system,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong,
        vocab_size=vocab_size,
        held_out=key == "eval",
    )
    if found.unread and distributed.first():
        lost = f"{found.unread[:40]}{' ...' if len(found.unread) > 40 else ''}"
        print(
            f"note: data.{key}={path}: the model does not see all of its prompts: {config.model.path} has no tokens "
            f"for the characters {lost}",
            file=sys.stderr,
            flush=True,
        )
    return found


def gradable(config: Config, key: Literal["train", "eval"], prompts: PromptSet, grader: Grader) -> PromptSet:
    """The prompts without those whose reference answer no answer could be compared with, which are listed.

    Raises UserError if none is left.
    """
    bad = grader.unusable(prompts.columns)
    if not bad:
        return prompts
    path = getattr(config.data, key)
    said = "; ".join(f"row {prompts.ids[i] + 1}: {reason}" for i, reason in list(bad.items())[:5])
    if len(bad) == len(prompts):
        raise UserError(f"data.{key}={path}: no reference answer can be used: {said}")
    if distributed.first():
        note = (
            f"note: data.{key}={path}: {len(bad)} of {len(prompts)} prompts are left out for their reference answers: "
            f"{said}{' ...' if len(bad) > 5 else ''} (python -m logra_jax.data lists all)"
        )
        print(note, file=sys.stderr, flush=True)
    return prompts.take([i for i in range(len(prompts)) if i not in bad])


def tasks_of(config: Config, key: Literal["train", "eval"], prompts: PromptSet) -> list[str] | None:
    """The task that each prompt belongs to; None where prompts have none."""
    column = config.data.task_column or (TASK if is_mixture(str(getattr(config.data, key))) else None)
    return None if column is None else [str(value) for value in prompts.columns[column]]


def learning_rate(config: Config) -> optax.Schedule:
    """Size of each update, a ratio or a learning rate."""
    peak = config.optimizer.update_ratio if config.optimizer.learning_rate is None else config.optimizer.learning_rate
    assert peak is not None  # one of the two is set: checked with the configuration
    return _schedule(config, peak)


def _schedule(config: Config, peak: float) -> optax.Schedule:
    """Linear warm-up to `peak`, then constant or cosine."""
    settings = config.optimizer
    if settings.schedule == "cosine":
        length = max(config.steps - settings.warmup, 1)
        after = optax.cosine_decay_schedule(peak, length, settings.final_fraction)
    else:
        after = optax.constant_schedule(peak)
    if not settings.warmup:
        return after
    # Counting from 1, so that the first update is not lost on a step size of zero.
    rise = optax.linear_schedule(peak / settings.warmup, peak, settings.warmup - 1)
    return optax.join_schedules([rise, after], [settings.warmup])


def make_spec(config: Config, model: CausalLM) -> optim.SketchSpec:
    """Which weights are sketched, projected or adapted, or, for adamw, not meant by `others`. Raises UserError."""
    settings = config.optimizer
    targets = {} if settings.targets is None else {"targets": settings.targets}
    spec = optim.SketchSpec(
        rank=settings.rank if settings.name in LOW_RANK else 1,  # nothing is of low rank there
        seed=settings.sketch_seed,
        distribution=settings.distribution,
        refresh=settings.refresh,
        names=model.weight_names(),
        **targets,
    )
    try:
        matrices = spec.matrices(model.abstract_params())
    except UserError as error:
        raise UserError(f"optimizer.rank={settings.rank}, optimizer.targets: {error}") from None
    for path, matrix in matrices.items():
        if settings.name == "lora" and not path.startswith("layers/"):
            raise UserError(
                f"optimizer.name=lora: {matrix.names[0]} is no projection of a layer, and adapters are for those: "
                "leave it out of optimizer.targets"
            )
    return spec


def split(config: Config, spec: optim.SketchSpec, params: Any) -> tuple[Any, Any]:
    """(train, frozen), to be merged again by `optim.merge`: what an update changes of all parameters, and the rest."""
    if config.optimizer.name == "lora":
        return optim.split_adapters(params)
    return spec.split(params, dense=densely_trained(config))


def check_adapters(config: Config, params: Any) -> None:
    """Refuse adapters whose factor is not that of the settings. Raises UserError."""
    settings = config.optimizer
    wanted = optim.adapter_scale(settings.rank, settings.lora_alpha)
    for node in jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, optim.LoraKernel)):
        if isinstance(node, optim.LoraKernel) and (found := float(jnp.ravel(node.scale)[0])) != jnp.float32(wanted):
            raise UserError(
                f"optimizer.lora_alpha={settings.lora_alpha} makes the adapters count {wanted}, but those of the "
                f"checkpoint were trained to count {found}: set optimizer.lora_alpha={found * settings.rank:g}"
            )


def densely_trained(config: Config) -> tuple[str, ...]:
    """Regexes of the weights that are trained although no target: argument `dense` of `spec.split`."""
    return (r".*",) if config.optimizer.others == "adamw" else ()


def make_optimizer(config: Config, spec: optim.SketchSpec) -> optax.GradientTransformationExtraArgs:
    """The update rule, KL control around it, and a guard that turns a step that is not finite into none."""
    settings, kl = config.optimizer, config.kl
    budget = optim.cosine_budget(kl.budget_start, kl.budget_end, kl.budget_steps) if kl.control else None
    schedule = learning_rate(config)
    clip = optax.identity()
    if settings.max_grad_norm is not None:
        clip = optax.clip_by_global_norm(settings.max_grad_norm)
    dense = None
    if settings.others == "adamw":
        rate = schedule if settings.others_learning_rate is None else _schedule(config, settings.others_learning_rate)
        moments = {"b1": 0.9, "b2": settings.b2, "eps": settings.eps}
        dense = optim.in_float32(optax.adamw(rate, **moments, weight_decay=settings.weight_decay))
    if settings.name != "logra":
        b1 = settings.b1 if settings.b1 is not None else 0.0 if settings.name == "row_adam" else 0.9
        numbers = {"b1": b1, "b2": settings.b2, "eps": settings.eps, "weight_decay": settings.weight_decay}
        if settings.name == "galore":
            interval, scale = settings.projection_interval, settings.galore_scale
            tx = optim.stacked_galore(spec, schedule, interval=interval, scale=scale, dense=dense, **numbers)
        elif settings.name == "row_adam":
            scale = optim.scale_by_row_adam(b2=settings.b2, eps=settings.eps, b1=b1)
            decay = optax.add_decayed_weights(settings.weight_decay)
            tx = optim.in_float32(optax.chain(scale, decay, optax.scale_by_learning_rate(schedule)))
        else:
            tx = optim.in_float32(optax.adamw(schedule, **numbers))
        link = optax.identity() if budget is None else optim.scale_by_predicted_kl(budget, kl.alpha_max)
        return optim.guard_nonfinite(optax.chain(clip, tx, link))
    by_ratio = settings.update_ratio is not None
    tx = optim.logra(
        spec,
        update_ratio=schedule if by_ratio else None,
        learning_rate=None if by_ratio else schedule,
        preserve_norm=by_ratio if settings.preserve_norm is None else settings.preserve_norm,
        b1=0.0 if settings.b1 is None else settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        kl_budget=budget,
        alpha_max=kl.alpha_max,
        weight_decay=settings.weight_decay,
        dense=dense,
    )
    return optax.chain(clip, tx)


def rounding(config: Config) -> str | None:
    """How updated weights are rounded: None for float32 weights, which are not."""
    return (config.model.rounding or "stochastic") if config.model.param_dtype == "bfloat16" else None


def sends_factors(config: Config) -> bool:
    """Whether updates travel to rollout servers as factors."""
    return config.rollout.engine == "vllm" and config.vllm.full_every != 1 and config.optimizer.name == "logra"


def state_layout(
    tx: optax.GradientTransformation, train: Any, everywhere: jax.sharding.Sharding, rounding: str | None
) -> tuple[TrainState, TrainState]:
    """Abstract training state and its shardings; `train` may be abstract, but must carry shardings."""
    own: Any = jax.tree.map(lambda leaf: leaf.sharding, train)
    residual = rounding == "residual"
    places: tuple[Any, Any, Any, Any] = (own, optim.state_shardings(tx, train), everywhere, own if residual else None)
    opt_state = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        jax.eval_shape(tx.init, train),
        places[1],
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), train)
    mismatch: Any = jax.ShapeDtypeStruct((), "float32", sharding=everywhere)
    return TrainState(shapes, opt_state, mismatch, shapes if residual else None), TrainState(*places)


def abstract_packing(config: Config, mesh: jax.sharding.Mesh, prompt_width: int) -> Packing | None:
    """Shapes and places of the packing of a batch; None where every answer has its own row."""
    budget, fsdp = config.loss.token_budget, mesh.shape["fsdp"]
    if not budget:
        return None
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "fsdp"), ()))
    longest, answers = prompt_width + config.rollout.max_new_tokens, config.rollout.rows // fsdp
    row = row_width(min(budget, answers * longest), longest)  # room for all of them is enough
    source: Any = jax.ShapeDtypeStruct((answers, fsdp, row), "int32", sharding=rows)
    passes: Any = jax.ShapeDtypeStruct((), "int32", sharding=whole)
    return Packing(source, passes)


def make_sampler(
    config: Config,
    model: CausalLM,
    vocab_size: int,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    group: int = 0,
) -> Sampler:
    """A sampler of the model, with the end tokens and the vocabulary that all samplers of a run share.

    group: devices that share its products, see `sampling.groups`.
    """
    return Sampler(
        model,
        max_new_tokens=config.rollout.max_new_tokens,
        end_ids=model.end_ids,
        vocab_size=vocab_size,
        pad_id=model.pad_id,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        slots=config.rollout.slots,
        cache_dtype=config.rollout.cache_dtype,
        tensor=group,
    )


def make_policy_update(
    config: Config,
    policy: Policy,
    tx: optax.GradientTransformationExtraArgs,
    spec: optim.SketchSpec,
    state_shardings: TrainState,
) -> Callable[..., Any]:
    """The jitted update of a run: see `logra_jax.rl.update.make_update`."""
    loss, kl = config.loss, config.kl
    return make_update(
        policy,
        tx,
        spec,
        LossSettings(
            aggregation=loss.aggregation,
            ratio=loss.ratio,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            importance_cap=loss.importance_cap,
            reference_kl=loss.reference_kl,
        ),
        sketched=config.optimizer.name == "logra",
        kl_control=kl.control,
        rounding=rounding(config),
        sends=sends_factors(config),
        micro_batch=loss.micro_batch,
        mismatch=kl.mismatch,
        probe_tokens=kl.probe_tokens,
        check_responses=kl.check_responses if kl.check_every else 0,
        state_shardings=state_shardings,
    )
