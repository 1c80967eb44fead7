"""From the settings of a run to its optimizer, its prompts and its grader. Used by the commands alone."""

from typing import Any

import optax

from logra_jax import optim
from logra_jax.config import Config, check_paths, resolve_path
from logra_jax.models import CausalLM
from logra_jax.rl.prompts import PromptSet, check_columns, load_prompts
from logra_jax.rl.reward import Grader, make_reward


def check_files(config: Config, *, trains: bool) -> None:
    """Refuse missing files and columns, before anything that takes long. Raises UserError."""
    check_paths(config, trains=trains)
    data = config.data
    for path in (data.train if trains else None, data.eval):
        if path is not None:
            check_columns(resolve_path(path), [data.prompt_column, data.answer_column])


def make_grader(config: Config) -> Grader:
    """The reward; a context manager whose end is that of the grading processes."""
    reward = config.reward
    return make_reward(
        reward.kind,
        answer_column=config.data.answer_column,
        timeout_s=reward.timeout_s,
        workers=reward.workers,
        pattern=reward.pattern,
    )


def read_prompts(config: Config, path: str, tokenizer: Any, vocab_size: int) -> PromptSet:
    """The tokenized prompts of a file."""
    data = config.data
    return load_prompts(
        resolve_path(path),
        tokenizer,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        template=data.template,
        prompt_format=data.prompt_format,
        system=data.system,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong,
        vocab_size=vocab_size,
    )


def learning_rate(config: Config) -> optax.Schedule:
    """Size of each update, a ratio or a learning rate: linear warm-up, then constant or cosine."""
    settings = config.optimizer
    peak = settings.update_ratio if settings.learning_rate is None else settings.learning_rate
    assert peak is not None  # one of the two is set: checked with the configuration
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
    """Which weights are sketched, or, for dense optimizers, are meant by `others: frozen`."""
    settings = config.optimizer
    targets = {} if settings.targets is None else {"targets": settings.targets}
    return optim.SketchSpec(
        rank=settings.rank,
        seed=settings.sketch_seed,
        distribution=settings.distribution,
        refresh=settings.refresh,
        names=model.weight_names(),
        **targets,
    )


def make_optimizer(config: Config, spec: optim.SketchSpec) -> optax.GradientTransformationExtraArgs:
    """The update rule, KL control around it, and a guard that turns a step that is not finite into none."""
    settings, kl = config.optimizer, config.kl
    budget = optim.cosine_budget(kl.budget_start, kl.budget_end, kl.budget_steps) if kl.control else None
    schedule = learning_rate(config)
    clip = optax.identity()
    if settings.max_grad_norm is not None:
        clip = optax.clip_by_global_norm(settings.max_grad_norm)
    if settings.name == "adamw":
        b1 = 0.9 if settings.b1 is None else settings.b1
        tx = optim.in_float32(optax.adamw(schedule, b1, settings.b2, settings.eps, weight_decay=settings.weight_decay))
        link = optax.identity() if budget is None else optim.scale_by_predicted_kl(budget, kl.alpha_max)
        return optim.guard_nonfinite(optax.chain(clip, tx, link))
    dense = None
    if settings.others == "adamw":
        rate = settings.others_learning_rate
        dense = optim.in_float32(optax.adamw(schedule if rate is None else rate, 0.9, settings.b2, settings.eps))
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
