"""Every setting of a run: its type, default, allowed values and meaning.

The classes below are the one truth: the table of keys (`schema.py`), loading, checking, `--help` and the written
`config.yaml` (all in `config.py`) are derived from them; rules between settings are in `rules.py`. None of it needs jax
or a model: a mistake is reported within a second.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


def _f(default: Any, help: str, within: str | None = None, only: str = "") -> Any:
    """A field with its one-line help, its interval, and where it has an effect.

    within: for numbers, such as "(0, 1]". only: settings without which this one does nothing, such as
    "kl.control=true or kl.check_every!=0" or "optimizer.name=logra,lora and optimizer.others!=frozen" (`and` binds
    closer than `or`); empty: it always has an effect.
    """
    return dataclasses.field(default=default, metadata={"help": help, "within": within, "only": only})


# Where the settings of an optimizer, of the KL control and of the evaluation have an effect.
LOW_RANK = ("logra", "galore", "lora")  # optimizers with a rank
_LOGRA, _GALORE, _LORA = (f"optimizer.name={name}" for name in LOW_RANK)
_CONTROL, _CHECK, _EVAL = "kl.control=true", "kl.check_every!=0", "data.eval!=null"
_RANDOM = "eval.temperature!=0"
_VLLM = "rollout.engine=vllm"
_STARTS = f"{_VLLM} and vllm.urls=[]"
_SAMPLES = "rollout.engine=jax or data.eval!=null"  # evaluation always takes the built-in sampler


@dataclass(frozen=True)
class Model:
    """The language model, a folder in Hugging Face layout."""

    path: str = _f("", "folder of the model (demo:model is the packaged one)")
    preset: str | None = _f(None, "a published model by name, to plan for one whose folder is not there yet")
    compute_dtype: Literal["float32", "bfloat16"] = _f("bfloat16", "number format of the matrix products")
    param_dtype: Literal["float32", "bfloat16"] = _f(
        "float32", "number format that trained weights are kept in; frozen ones keep that of the folder"
    )
    rounding: Literal["stochastic", "residual"] | None = _f(
        None,
        "param_dtype=bfloat16: how updates below its resolution add up, by random rounding, or in a second "
        "bfloat16 number per weight that holds what rounding lost; null: stochastic",
        only="model.param_dtype=bfloat16",
    )
    remat: Literal["none", "full", "projected", "offload"] = _f(
        "full",
        "what is computed again in the backward pass to save memory: nothing, whole layers (full), layers without "
        "attention (projected, for sketches: keeps their r numbers per input), or whole layers with their inputs in "
        "the host's memory meanwhile (offload)",
    )
    attention: Literal["auto", "cudnn", "blocked"] = _f(
        "auto",
        "attention of the training passes: cuDNN's flash attention (NVIDIA GPUs, bfloat16), or blocks of queries; "
        "auto: cuDNN where it exists",
    )
    rope_theta: float | None = _f(None, "replaces the model's rotary base", "(0, inf)")
    max_position_embeddings: int | None = _f(None, "replaces the model's longest sequence", "[1, inf)")


@dataclass(frozen=True)
class Data:
    """Prompts: JSONL or Parquet files, or YAML files that mix tasks; paths are relative to the current directory."""

    train: str = _f("", "file of training prompts (demo:... lies in the package)")
    eval: str | None = _f(None, "file of held-out prompts, of a mixture its held-out part; null: no evaluation")
    prompt_column: str = _f("prompt", "column that holds the prompt")
    answer_column: str | None = _f("answer", "column that holds the reference answer; null: a reward that needs none")
    task_column: str | None = _f(
        None, "column that names a row's task, for rewards and accuracies by task; null: in mixtures task, else none"
    )
    template: Literal["chat", "plain"] = _f("chat", "apply the model's chat template, or take the text as it is")
    enable_thinking: bool | None = _f(
        None,
        "let the model think before it answers, where its chat template has that switch (Qwen3 and later); null: as "
        "the template has it",
        only="data.template=chat",
    )
    prompt_format: str = _f("{prompt}", "text put around a prompt that is a text, not messages; must contain {prompt}")
    system: str | None = _f(None, "system message; plain: a line above the prompt. A row's own one is kept instead")
    max_prompt_length: int = _f(1024, "longest prompt in tokens", "[1, inf)")
    overlong: Literal["drop", "truncate"] = _f("drop", "what to do with longer prompts; truncate keeps the end")


@dataclass(frozen=True)
class Rollout:
    """Sampling of the answers that are trained on."""

    prompts: int = _f(16, "prompts per update", "[1, inf)")
    generations: int = _f(8, "answers per prompt", "[1, inf)")
    max_new_tokens: int = _f(1024, "longest answer in tokens", "[1, inf)")
    temperature: float = _f(1.0, "sampling temperature", "(0, inf)")
    top_k: int = _f(0, "sample from the k likeliest tokens only; 0: all", "[0, inf)")
    top_p: float = _f(1.0, "sample from the likeliest tokens of this total probability", "(0, 1]")
    engine: Literal["jax", "vllm"] = _f(
        "jax",
        "what samples the answers that are trained on: jax, on the devices that train, or vLLM servers, to which "
        "updates travel as factors. Evaluation always takes jax",
    )
    dynamic_sampling: int = _f(
        0,
        "batches of prompts drawn at most, besides the first, to replace groups whose answers all have the same reward "
        "(DAPO); 0: none are replaced",
        "[0, inf)",
        "advantage.estimator!=running_baseline",
    )
    slots: int = _f(
        0,
        "answers sampled at a time, with memory for their keys and values: when one ends, the next that waits takes "
        "its place; 0: all",
        "[0, inf)",
        _SAMPLES,
    )
    cache_dtype: Literal["float32", "bfloat16"] | None = _f(
        None, "number format of the keys and values of sampling; null: model.compute_dtype", only=_SAMPLES
    )
    layout: Literal["auto", "train", "tensor"] = _f(
        "auto",
        "where weights lie while the built-in sampler is at work: as in training, put together for every token, or a "
        "copy in model.compute_dtype per rollout, of which devices in groups split every product (tensor); auto: what "
        "moves less between devices, and fits",
        only=_SAMPLES,
    )

    staleness: int = _f(
        0,
        "updates that answers may be behind the weights that learn from them. 1: those of the next update are drawn "
        "and graded while one is computed, which loss.importance_cap must make up for",
        "[0, 1]",
        _VLLM,
    )

    @property
    def rows(self) -> int:
        """Answers per update."""
        return self.prompts * self.generations


@dataclass(frozen=True)
class Vllm:
    """Servers of rollout.engine=vllm: ones that run already, or ones that the run starts on its machine and stops."""

    urls: tuple[str, ...] = _f(
        (), "running servers, [http://HOST:PORT, ...], which get the run's weights; []: start some", only=_VLLM
    )
    python: str | None = _f(None, "interpreter of an environment with vLLM, to start servers with", only=_STARTS)
    servers: int = _f(1, "servers to start", "[1, inf)", _STARTS)
    tensor_parallel: int = _f(1, "GPUs, on a CPU ranks, of each server", "[1, inf)", _STARTS)
    dtype: Literal["float32", "bfloat16"] | None = _f(
        None, "number format of the servers' weights and products; null: model.compute_dtype", only=_STARTS
    )
    gpus: str | None = _f(
        None,
        "GPUs of the servers, tensor_parallel for each, as CUDA_VISIBLE_DEVICES names them, such as 4,5; training "
        "should not see them. null: those that it sees",
        only=_STARTS,
    )
    port: int = _f(0, "port of the first server; the others take the next ones. 0: free ones", "[0, 65535]", _STARTS)
    arguments: tuple[str | int | float, ...] = _f(
        (), "further arguments of the servers, such as [--max-num-seqs=64]", only=_STARTS
    )
    start_s: float = _f(600.0, "seconds until a server that was started must answer", "(0, inf)", _STARTS)
    timeout_s: float = _f(600.0, "seconds that any one answer may take", "(0, inf)", _VLLM)
    folder: str | None = _f(
        None, "folder that run and servers both see, for weights and large updates; null: sync in out", only=_VLLM
    )
    full_every: int = _f(
        0,
        "updates between loads of all weights instead of an update's factors; 0: only at the start and after a "
        "failure. 1 serves every optimizer",
        "[0, inf)",
        _VLLM,
    )
    drift_every: int = _f(
        10,
        "updates between comparisons of the servers' log-probabilities of 8 prompts with the trainer's; where they are "
        "apart by more than 5 times what they were after the last load of all weights, these are loaded. 0: never",
        "[0, inf)",
        _VLLM,
    )


@dataclass(frozen=True)
class Reward:
    """How an answer is graded."""

    kind: str = _f(
        "math", "math, exact, reasoning_gym (verifiers of a mixture's tasks), or module:function of your own"
    )
    pattern: str | None = _f(
        None,
        "regex, group 1 of its last match is the answer; null: all of the text",
        only="reward.kind=exact,reasoning_gym",
    )
    overlong_tokens: int = _f(
        0,
        "answers lose up to 1 of their reward in the last so many tokens before rollout.max_new_tokens, in proportion "
        "(DAPO's soft overlong punishment); 0: off",
        "[0, inf)",
    )
    timeout_s: float = _f(
        5.0,
        "seconds of CPU time until an answer's grading is given up; for a function, of a clock, and a batch's",
        "(0, inf)",
        "reward.kind!=exact",
    )
    workers: int = _f(2, "grading processes", "[1, inf)", "reward.kind!=exact")


@dataclass(frozen=True)
class Advantage:
    """What an answer's reward is compared with."""

    estimator: Literal["grpo", "leave_one_out", "running_baseline"] = _f("grpo", "baseline of the reward")
    normalize_std: bool = _f(True, "divide by the group's standard deviation", only="advantage.estimator=grpo")
    eps: float = _f(
        1e-4, "added to the standard deviation", "(0, inf)", "advantage.estimator=grpo and advantage.normalize_std=true"
    )
    failure_reward: float | None = _f(
        None,
        "outcome of rewards below 1 (1 otherwise); null: use the rewards as they are",
        only="advantage.estimator=running_baseline",
    )
    baseline_weight: float = _f(0.1, "weight of the newest batch", "(0, 1]", "advantage.estimator=running_baseline")


@dataclass(frozen=True)
class Loss:
    """Policy-gradient loss."""

    aggregation: Literal["token", "sequence", "constant"] = _f(
        "token",
        "mean over all tokens; over answers of their means; or over answers of their sums divided by "
        "rollout.max_new_tokens (Dr. GRPO)",
    )
    ratio: Literal["token", "sequence"] = _f(
        "token",
        "new to old probability of each token, or of its whole answer, as the geometric mean over its tokens (GSPO, "
        "which goes with aggregation=sequence)",
        only="loss.updates_per_batch!=1",
    )
    skip_cut_off: bool = _f(False, "leave answers that were cut off out of the loss (DAPO's overlong filtering)")
    clip_low: float | None = _f(None, "ratio clipped at 1 - clip_low; null: not", "[0, 1)", "loss.updates_per_batch!=1")
    clip_high: float | None = _f(
        None, "ratio clipped at 1 + clip_high; null: not", "[0, inf)", "loss.updates_per_batch!=1"
    )
    importance_cap: float | None = _f(None, "largest weight trainer / sampler probability; null: off", "(0, inf)")
    reference_kl: float = _f(0.0, "weight of the KL to the initial policy", "[0, inf)")
    updates_per_batch: int = _f(1, "updates taken from each batch of answers", "[1, inf)")
    micro_batch: int = _f(0, "answers per forward and backward pass; 0: all at once", "[0, inf)")
    token_budget: int = _f(
        0,
        "most tokens per device and pass, instead of micro_batch: short answers share a row; 0: each has its own",
        "[0, inf)",
    )


@dataclass(frozen=True)
class Optimizer:
    """The update rule. Give update_ratio or learning_rate."""

    name: Literal["logra", "adamw", "row_adam", "galore", "lora"] = _f(
        "logra",
        "gradient sketches with RowAdam; dense AdamW; RowAdam on dense gradients; AdamW on dense gradients projected "
        "to a low rank; or AdamW on low-rank adapters beside frozen weights, which the export adds up",
    )
    rank: int = _f(256, "rank of sketches, projections and adapters", "[1, inf)", f"{_LOGRA},galore,lora")
    sketch_seed: int = _f(
        42, "logra: seed of the projections; lora: of the adapters' first values", "[0, 4294967296)", f"{_LOGRA},lora"
    )
    distribution: Literal["rademacher", "gaussian"] = _f("rademacher", "entries of the projections", only=_LOGRA)
    refresh: int = _f(1, "updates between redraws of the projections; 0: never", "[0, inf)", _LOGRA)
    projection_interval: int = _f(200, "updates between new projections", "[1, inf)", _GALORE)
    galore_scale: float = _f(0.25, "factor on the updates of projected weights", "(0, inf)", _GALORE)
    lora_alpha: float | None = _f(None, "adapters count lora_alpha / rank; null: 1", "(0, inf)", _LORA)
    targets: tuple[str, ...] | None = _f(None, "regexes on weight names; null: attention and MLP projections")
    others: Literal["frozen", "adamw"] = _f("frozen", "what happens to weights that are not targets")
    others_learning_rate: float | None = _f(
        None,
        "learning rate of the others, on the same schedule; null: learning_rate",
        "(0, inf)",
        f"{_LOGRA},galore and optimizer.others=adamw",
    )
    preserve_norm: bool | None = _f(
        None, "norm-preserving RowAdam; null: with update_ratio yes, with learning_rate no", only=_LOGRA
    )
    b1: float | None = _f(
        None, "first moment's decay; null: 0 for logra (needs refresh other than 1) and row_adam, else 0.9", "[0, 1)"
    )
    b2: float = _f(0.95, "decay of the second moment", "[0, 1)")
    eps: float = _f(1e-8, "added to the root of the second moment", "(0, inf)")
    update_ratio: float | None = _f(None, "size of an update relative to the weights (paper: 6e-5)", "(0, 1)", _LOGRA)
    learning_rate: float | None = _f(None, "step size, instead of update_ratio, which is for logra alone", "(0, inf)")
    warmup: int = _f(0, "updates of linear warm-up", "[0, inf)")
    schedule: Literal["constant", "cosine"] = _f("constant", "course of the step size after the warm-up")
    final_fraction: float = _f(0.1, "last step size as a fraction of the first", "[0, 1]", "optimizer.schedule=cosine")
    weight_decay: float = _f(0.0, "decoupled weight decay, times learning_rate or update_ratio", "[0, inf)")
    max_grad_norm: float | None = _f(None, "gradients longer than this are shortened to it; null: off", "(0, inf)")


@dataclass(frozen=True)
class KL:
    """Predicted-KL control of the step length."""

    control: bool = _f(True, "scale every update so that its predicted KL stays within the budget")
    budget_start: float = _f(2e-4, "KL per token allowed at the first update", "(0, inf)", _CONTROL)
    budget_end: float = _f(2e-5, "KL per token allowed from update budget_steps on", "(0, inf)", _CONTROL)
    budget_steps: int = _f(300, "updates of the cosine from start to end", "[1, inf)", _CONTROL)
    alpha_max: float = _f(3.0, "largest factor on the proposed update", "(0, inf)", _CONTROL)
    probe_responses: int = _f(8, "answers the prediction is made on", "[1, inf)", f"{_CONTROL} or {_CHECK}")
    probe_tokens: int = _f(4096, "tokens used of each of them", "[1, inf)", f"{_CONTROL} or {_CHECK}")
    mismatch: bool = _f(
        True,
        "take the gap between sampler and trainer off the budget; with rollout.staleness=1 the update in between is "
        "part of it, and the budget is for the way from the weights that sampled",
        only=_CONTROL,
    )
    check_every: int = _f(10, "updates between measurements of the KL that really came out; 0: never", "[0, inf)")
    check_responses: int = _f(8, "answers used for that measurement", "[1, inf)", _CHECK)


@dataclass(frozen=True)
class Eval:
    """Evaluation on data.eval."""

    every: int = _f(10, "updates between evaluations; 0: only at the end", "[0, inf)", _EVAL)
    temperature: float = _f(0.0, "sampling temperature; 0: always the likeliest token", "[0, inf)", _EVAL)
    top_p: float = _f(
        1.0, "sample from the likeliest tokens of this total probability", "(0, 1]", f"{_EVAL} and {_RANDOM}"
    )
    samples: int = _f(1, "answers per prompt", "[1, inf)", f"{_EVAL} and {_RANDOM}")
    max_prompts: int | None = _f(None, "evaluate on the first so many prompts; null: all", "[1, inf)", _EVAL)
    before: bool = _f(True, "evaluate before the first update as well", only=_EVAL)


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints of the whole training state, in out/checkpoints."""

    every: int = _f(50, "updates between checkpoints; 0: only at the end", "[0, inf)")
    keep: int = _f(2, "newest checkpoints kept", "[1, inf)")
    keep_best: bool = _f(True, "keep the one with the best evaluation as well", only=_EVAL)
    async_: bool = _f(True, "write in the background while training goes on")


@dataclass(frozen=True)
class Log:
    """Metrics, in out/."""

    samples: int = _f(1, "decoded answers printed at each evaluation", "[0, inf)", _EVAL)
    tensorboard: bool = _f(True, "write TensorBoard event files to out/tensorboard")
    wandb: Literal["off", "auto", "online", "offline"] = _f("off", "Weights & Biases; auto: offline without a key")
    project: str = _f("logra_jax", "Weights & Biases project", only="log.wandb!=off")
    progress: bool = _f(True, "show a line of progress")


@dataclass(frozen=True)
class Mesh:
    """Devices."""

    fsdp: int = _f(0, "devices that share the weights and the batch; 0: all that are left", "[0, inf)")
    tensor: int = _f(1, "devices that share each matrix product", "[1, inf)")
    memory_fraction: float | None = _f(
        None,
        "share of each GPU's memory that the run may take, reserved before anything is compiled (`logra_jax.plan` says "
        "when a run needs more); null: XLA_CLIENT_MEM_FRACTION, or 0.95",
        "(0, 1]",
    )


@dataclass(frozen=True)
class Processes:
    """Several processes that are one run, and what becomes of one that hangs or dies."""

    join_s: float = _f(300.0, "seconds that processes wait for each other at the start", "(0, 100000]")
    silent_s: float = _f(60.0, "seconds without a sign of life after which a process counts as dead", "[1, 100000]")
    hang_s: float = _f(
        1800.0, "seconds without progress after which a process prints its stacks and leaves; 0: never", "[0, 100000]"
    )


@dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = _f(0, "seed of the prompt order and of sampling", "[0, 4294967296)")
    out: str = _f("out", "folder for everything the run writes")
    steps: int = _f(100, "updates to take", "[1, inf)")
    model: Model = dataclasses.field(default_factory=Model)
    data: Data = dataclasses.field(default_factory=Data)
    rollout: Rollout = dataclasses.field(default_factory=Rollout)
    vllm: Vllm = dataclasses.field(default_factory=Vllm)
    reward: Reward = dataclasses.field(default_factory=Reward)
    advantage: Advantage = dataclasses.field(default_factory=Advantage)
    loss: Loss = dataclasses.field(default_factory=Loss)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    kl: KL = dataclasses.field(default_factory=KL)
    eval: Eval = dataclasses.field(default_factory=Eval)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)
    processes: Processes = dataclasses.field(default_factory=Processes)
