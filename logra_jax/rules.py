"""Rules between settings; those of a single setting are checked when it is read. Free of jax."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from logra_jax.errors import UserError
from logra_jax.models.presets import check_preset
from logra_jax.rl.reward import check_kind, compile_pattern
from logra_jax.rl.tasks import is_mixture
from logra_jax.schema import SETTINGS, Setting
from logra_jax.settings import Config

# Two ways to say one thing.
EXCLUSIVE = (("loss.micro_batch", "loss.token_budget"), ("optimizer.update_ratio", "optimizer.learning_rate"))


def check(config: Config) -> None:
    """Rules between settings (those of a single setting are checked when it is read). Raises UserError."""
    _check_idle(config)
    rollout, loss, kl = config.rollout, config.loss, config.kl
    if config.model.preset is not None:
        check_preset(config.model.preset)
    if rollout.generations == 1 and config.advantage.estimator != "running_baseline":
        raise UserError(
            f"rollout.generations=1 leaves advantage.estimator={config.advantage.estimator} nothing to "
            "compare an answer with: use at least 2 generations, or advantage.estimator=running_baseline"
        )
    if config.reward.overlong_tokens > rollout.max_new_tokens:
        raise UserError(
            f"reward.overlong_tokens={config.reward.overlong_tokens} is more than rollout.max_new_tokens="
            f"{rollout.max_new_tokens}: lower it"
        )
    if config.reward.overlong_tokens and config.advantage.failure_reward is not None:
        raise UserError(
            f"reward.overlong_tokens={config.reward.overlong_tokens} cannot go with advantage.failure_reward="
            f"{config.advantage.failure_reward}, for which a right answer that loses any of its reward is a failure: "
            "leave one of them out"
        )
    if loss.micro_batch and rollout.rows % loss.micro_batch:
        raise UserError(
            f"loss.micro_batch={loss.micro_batch} does not divide the {rollout.rows} answers of an update "
            f"(rollout.prompts={rollout.prompts} x rollout.generations={rollout.generations})"
        )
    if rollout.slots > rollout.rows:
        raise UserError(
            f"rollout.slots={rollout.slots} is more than the {rollout.rows} answers of an update "
            f"(rollout.prompts={rollout.prompts} x rollout.generations={rollout.generations}): lower it, or set 0"
        )
    _check_token_budget(config)
    if rollout.engine == "vllm":
        _check_vllm(config)
    for key, used, count in (
        ("probe_responses", kl.control, kl.probe_responses),
        ("check_responses", kl.check_every > 0, kl.check_responses),
    ):
        if used and count > rollout.rows:
            raise UserError(
                f"kl.{key}={count} is more than the {rollout.rows} answers of an update "
                f"(rollout.prompts={rollout.prompts} x rollout.generations={rollout.generations})"
            )
    if config.model.remat == "projected" and config.optimizer.name != "logra":
        raise UserError(
            f"model.remat=projected keeps what sketches need, and optimizer.name={config.optimizer.name} takes none: "
            "set model.remat=full"
        )
    if config.model.attention == "cudnn" and config.model.compute_dtype != "bfloat16":
        raise UserError(
            f"model.attention=cudnn needs model.compute_dtype=bfloat16, not {config.model.compute_dtype}: "
            "set one of them, or model.attention=auto"
        )
    if kl.check_every and kl.check_responses > kl.probe_responses:
        raise UserError(
            f"kl.check_responses={kl.check_responses} is more than kl.probe_responses={kl.probe_responses}: "
            "the KL that came out is measured on answers that it was predicted on"
        )
    _check_batches(config)
    _check_optimizer(config)
    if "{prompt}" not in config.data.prompt_format:
        raise UserError(f"data.prompt_format={config.data.prompt_format!r} must contain {{prompt}}")
    _check_reward(config)


def conditions(only: str) -> list[tuple[str, str, str]]:
    """The parts of a setting's `only` as (key, "=" or "!=", values), without how they are joined."""
    return re.findall(r"([\w.]+)(!?=)(\S+)", only)


def idle(config: Config) -> Iterator[Setting]:
    """Settings that differ from their default and have no effect beside the others."""
    for setting in SETTINGS.values():
        if setting.only and setting.of(config) != setting.default:
            alternatives = (part.split(" and ") for part in setting.only.split(" or "))
            if not any(all(_holds(config, part) for part in parts) for parts in alternatives):
                yield setting


def reset(config: Config, settings: Iterable[Setting]) -> Config:
    """The configuration with these settings, all in sections, at their defaults."""
    for setting in settings:
        section, name = setting.key.split(".")
        part = replace(getattr(config, section), **{name: setting.default})
        config = replace(config, **{section: part})
    return config


def _holds(config: Config, condition: str) -> bool:
    ((key, sign, values),) = conditions(condition)
    return (_text(SETTINGS[key].of(config)) in values.split(",")) == (sign == "=")


def _text(value: Any) -> str:
    """A value as it stands in YAML."""
    names: dict[Any, str] = {True: "true", False: "false", None: "null"}
    if isinstance(value, bool | None):
        return names[value]
    if isinstance(value, tuple):
        return f"[{','.join(map(_text, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_idle(config: Config) -> None:
    for setting in idle(config):
        keys = dict.fromkeys(key for key, *_ in conditions(setting.only))
        found = " and ".join(f"{key}={_text(SETTINGS[key].of(config))}" for key in keys)
        raise UserError(
            f"{setting.key}={_text(setting.of(config))} has no effect with {found}, only with {setting.only}: "
            "leave it out"
        )


def _check_batches(config: Config) -> None:
    updates = config.loss.updates_per_batch
    values = {"steps": config.steps, "eval.every": config.eval.every, "checkpoint.every": config.checkpoint.every}
    if odd := {key: value for key, value in values.items() if value % updates}:
        found = ", ".join(f"{key}={value}" for key, value in odd.items())
        nearest = " ".join(f"{key}={-(-value // updates) * updates}" for key, value in odd.items())
        raise UserError(f"loss.updates_per_batch={updates} does not divide {found}: set {nearest}")


def _check_token_budget(config: Config) -> None:
    budget, micro = config.loss.token_budget, config.loss.micro_batch
    prompt, answer = config.data.max_prompt_length, config.rollout.max_new_tokens
    if budget and micro:
        raise UserError(
            f"loss.token_budget={budget} and loss.micro_batch={micro} exclude each other: set one of them to 0"
        )
    if budget and config.model.attention == "cudnn":
        raise UserError(
            f"model.attention=cudnn cannot keep apart the answers that loss.token_budget={budget} puts in one row: "
            "set model.attention=auto (or blocked), or loss.token_budget=0 and loss.micro_batch"
        )
    if 0 < budget < prompt + answer:
        raise UserError(
            f"loss.token_budget={budget} is less than the longest answer with its prompt (data.max_prompt_length="
            f"{prompt} + rollout.max_new_tokens={answer} = {prompt + answer}): raise it, or lower one of them"
        )


# Arguments of a server that are none of vllm.arguments, and the settings that stand for them.
_SERVERS_OWN = {
    "--port": "vllm.port",
    "--dtype": "vllm.dtype",
    "--tensor-parallel-size": "vllm.tensor_parallel",
    "-tp": "vllm.tensor_parallel",
    "--host": None,
    "--model": None,
    "--served-model-name": None,
    "--generation-config": None,
    "--logprobs-mode": None,
    "--worker-extension-cls": None,
}


def _check_vllm(config: Config) -> None:
    rollout, optimizer, model, vllm = config.rollout, config.optimizer, config.model, config.vllm
    if not vllm.urls and vllm.python is None:
        raise UserError(
            "rollout.engine=vllm has no servers: give vllm.urls, or as vllm.python the interpreter of an environment "
            "with vLLM, to start them with"
        )
    for url in vllm.urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"vllm.urls has {url!r}: an address is http://HOST:PORT")
    for key, value in (("top_k", rollout.top_k), ("top_p", rollout.top_p)):
        if value != SETTINGS[f"rollout.{key}"].default:
            raise UserError(
                f"rollout.{key}={_text(value)} cannot go with rollout.engine=vllm: its servers report probabilities "
                "among the tokens that are left, and training needs those among all. Leave it out"
            )
    if rollout.staleness:
        _check_staleness(config)
    if vllm.gpus is not None and len(vllm.gpus.split(",")) != vllm.servers * vllm.tensor_parallel:
        raise UserError(
            f"vllm.gpus={vllm.gpus} does not name the {vllm.servers * vllm.tensor_parallel} GPUs of vllm.servers="
            f"{vllm.servers} with vllm.tensor_parallel={vllm.tensor_parallel} each"
        )
    for word in vllm.arguments:
        flag = str(word).partition("=")[0].replace("_", "-")
        if flag in _SERVERS_OWN:
            setting = _SERVERS_OWN[flag]
            raise UserError(
                f"vllm.arguments has {flag}, which the run gives itself: "
                + (f"set {setting}" if setting else "leave it out")
            )
    unfit = {
        "optimizer.name": optimizer.name != "logra",
        "optimizer.distribution": optimizer.distribution != "rademacher",
        "model.rounding": model.param_dtype == "bfloat16" and model.rounding != "residual",
    }
    for key in unfit:
        if unfit[key] and vllm.full_every != 1:
            raise UserError(
                f"{key}={_text(SETTINGS[key].of(config))} cannot go with rollout.engine=vllm: factors can be sent with "
                "optimizer.name=logra, optimizer.distribution=rademacher, and model.param_dtype=float32 or "
                "model.rounding=residual. Set that, or vllm.full_every=1, which sends all weights at every update"
            )


def _check_staleness(config: Config) -> None:
    loss = config.loss
    if loss.updates_per_batch != 1:
        raise UserError(
            f"rollout.staleness=1 cannot go with loss.updates_per_batch={loss.updates_per_batch}: the last of these "
            "updates would be further from the answers. Set one of them to its default"
        )
    if loss.importance_cap is None:
        raise UserError(
            "rollout.staleness=1 learns from answers of other weights and needs loss.importance_cap, which weighs each "
            "token by how much likelier it is now: 2 in the paper"
        )


def _check_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    ratio, rate = optimizer.update_ratio, optimizer.learning_rate
    if optimizer.name != "logra" and rate is None:
        usual = {"adamw": "1e-6 in the paper", "row_adam": "as for adamw", "lora": "1e-5 to 3e-4"}
        usual["galore"] = "a few times that of adamw"
        raise UserError(
            f"optimizer.learning_rate is required for optimizer.name={optimizer.name} ({usual[optimizer.name]})"
        )
    if optimizer.name in ("lora", "row_adam") and optimizer.others != "frozen":
        raise UserError(
            f"optimizer.others={optimizer.others} cannot go with optimizer.name={optimizer.name}, which trains "
            "its targets alone: leave it out, or use another optimizer"
        )
    if optimizer.name == "lora":
        _check_lora(config)
    if ratio is None and rate is None:
        raise UserError(
            "the size of an update is not set: give optimizer.update_ratio (6e-5 in the paper) or "
            "optimizer.learning_rate"
        )
    if ratio is not None and rate is not None:
        raise UserError(
            f"optimizer.update_ratio={ratio} and optimizer.learning_rate={rate} exclude each other: "
            "set one of them to null"
        )
    own_rate = optimizer.others_learning_rate
    if optimizer.others == "adamw" and rate is None and own_rate is None:
        raise UserError("optimizer.others=adamw needs optimizer.others_learning_rate: update_ratio is for the targets")
    if optimizer.name == "logra" and optimizer.b1 and optimizer.refresh == 1:
        raise UserError(
            f"optimizer.b1={optimizer.b1} has no effect with optimizer.refresh=1: momentum starts anew with every "
            "redraw of the projections. Set optimizer.refresh to 0 or above 1, or leave optimizer.b1 out"
        )
    if optimizer.warmup >= config.steps and optimizer.warmup:
        raise UserError(f"optimizer.warmup={optimizer.warmup} must be smaller than steps={config.steps}")
    if optimizer.targets == ():
        raise UserError("optimizer.targets is empty: name at least one weight, or leave it out for the default")
    for pattern in optimizer.targets or ():
        compile_pattern(pattern, "optimizer.targets", groups=0)


def _check_lora(config: Config) -> None:
    if config.model.param_dtype != "float32":
        raise UserError(
            f"model.param_dtype={config.model.param_dtype} cannot go with optimizer.name=lora: adapters are float32, "
            "and the weights beside them are frozen, so they keep the number format of the folder. Leave it out"
        )


def _check_reward(config: Config) -> None:
    reward = config.reward
    check_kind(reward.kind)
    for key, path in (("train", config.data.train), ("eval", config.data.eval)):
        if reward.kind == "reasoning_gym" and path and not is_mixture(path):
            raise UserError(
                f"data.{key}={path} is no mixture of tasks (a .yaml file), which reward.kind=reasoning_gym is for: "
                "give one, or set reward.kind to math, exact, or module:function"
            )
    if reward.pattern is not None:
        compile_pattern(reward.pattern)


def check_lengths(config: Config, max_positions: int) -> None:
    """Refuse sequences longer than the model was made for; called once the model's own limit is known."""
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    if longest > max_positions:
        raise UserError(
            f"data.max_prompt_length={config.data.max_prompt_length} + rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} = {longest} tokens, but the model takes {max_positions}: "
            "lower one of them, or set model.max_position_embeddings if the model can take more"
        )
