"""From the settings of a run to its parts: model, prompts, grader, optimizer, samplers. Used by the commands alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import models, optim
from logra_jax.config import Config, check_lengths, check_paths, resolve_path
from logra_jax.errors import UserError
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models.hf import read_json
from logra_jax.rl import advantage
from logra_jax.rl.evaluate import Evaluation, evaluate
from logra_jax.rl.kl import draw_probe
from logra_jax.rl.loss import LossSettings
from logra_jax.rl.prompts import PromptOrder, PromptSet, check_columns, load_prompts, require_rows
from logra_jax.rl.reward import make_reward
from logra_jax.rl.rollout import Rollout, Sampler
from logra_jax.rl.tokenizer import decode, load_tokenizer
from logra_jax.rl.update import Batch, Policy, TrainState, make_score, make_update
from logra_jax.signals import StopFlag

Tree = Any


def learning_rate(config: Config) -> optax.Schedule:
    """The size of an update over the updates: linear warm-up, then constant or cosine (a ratio or a learning rate)."""
    settings = config.optimizer
    peak = settings.update_ratio if settings.learning_rate is None else settings.learning_rate
    assert peak is not None  # one of the two is set: checked with the configuration
    if settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(config.steps - settings.warmup, 1), settings.final_fraction)
    else:
        after = optax.constant_schedule(peak)
    if not settings.warmup:
        return after
    # Counting from 1, so that the first update is not lost on a step size of zero.
    rise = optax.linear_schedule(peak / settings.warmup, peak, settings.warmup - 1)
    return optax.join_schedules([rise, after], [settings.warmup])


def make_spec(config: Config, model: models.CausalLM) -> optim.SketchSpec:
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
    """The update rule, its KL control outermost, and a guard that turns a step that is not finite into none."""
    settings, kl = config.optimizer, config.kl
    budget = optim.cosine_budget(kl.budget_start, kl.budget_end, kl.budget_steps) if kl.control else None
    schedule = learning_rate(config)
    clip = optax.identity() if settings.max_grad_norm is None else optax.clip_by_global_norm(settings.max_grad_norm)
    if settings.name == "adamw":
        b1 = 0.9 if settings.b1 is None else settings.b1
        tx = optax.adamw(schedule, b1, settings.b2, settings.eps, weight_decay=settings.weight_decay)
        link = optax.identity() if budget is None else optim.scale_by_predicted_kl(budget, kl.alpha_max)
        return optim.guard_nonfinite(optax.chain(clip, tx, link))
    dense = None
    if settings.others == "adamw":
        rate = settings.others_learning_rate
        dense = optax.adamw(schedule if rate is None else rate, 0.9, settings.b2, settings.eps)
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


class Run:
    """Everything a run is made of. A context manager: leaving it ends the grading processes.

    Cheap checks come first: files and columns before the tokenizer, the tokenizer before the model.
    """

    def __init__(self, config: Config, stop: StopFlag):
        self.config, self.stop = config, stop
        check_paths(config)
        data = config.data
        files = [resolve_path(path) for path in (data.train, data.eval) if path]
        for path in files:
            check_columns(path, [data.prompt_column, data.answer_column])
        folder = resolve_path(config.model.path)
        self.tokenizer = load_tokenizer(folder)
        self.mesh = make_mesh(
            config.mesh.fsdp or max(jax.device_count() // config.mesh.tensor, 1), config.mesh.tensor
        )
        self._check_devices()
        self.model, params = self._load_model(folder)
        check_lengths(config, self.model.config.max_position_embeddings)
        # The padded rows of the embedding have no token: neither sampled nor part of any distribution.
        self.vocab_size = min(len(self.tokenizer), self.model.config.vocab_size)
        sets = [self._load_prompts(path) for path in files]
        self.prompts = sets[0]
        self.held_out = self._held_out(sets[1]) if data.eval else None
        require_rows(self.prompts, config.rollout.prompts)
        self.order = PromptOrder(len(self.prompts), config.seed)
        self._build_training(params)
        self._build_sampling()
        self.grader = make_reward(
            config.reward.kind,
            answer_column=data.answer_column,
            timeout_s=config.reward.timeout_s,
            workers=config.reward.workers,
            pattern=config.reward.pattern,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc: object) -> None:
        self.grader.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _check_devices(self) -> None:
        rows, prompts = self.config.loss.micro_batch or self.config.rollout.rows, self.config.rollout.prompts
        fsdp = self.mesh.shape["fsdp"]
        for name, count in (("rollout.prompts", prompts), ("answers of a micro-batch (loss.micro_batch)", rows)):
            if count % fsdp:
                raise UserError(f"{name} = {count} cannot be split over mesh.fsdp = {fsdp} devices: use a multiple of it")

    def _load_model(self, folder: Any) -> tuple[models.CausalLM, Tree]:
        settings = self.config.model
        raw = read_json(folder, "config.json")
        shapes = models.CausalLM(models.ModelConfig.from_hf(raw, where=str(folder / "config.json")))
        model, params = models.load_hf(
            folder,
            compute_dtype=settings.compute_dtype,
            shardings=shardings(self.mesh, shapes.logical_axes(), shapes.abstract_params()),
            rope_theta=settings.rope_theta,
            max_position_embeddings=settings.max_position_embeddings,
        )
        return model.replace(remat=settings.remat), params

    def _load_prompts(self, path: Any) -> PromptSet:
        data = self.config.data
        return load_prompts(
            path,
            self.tokenizer,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
            template=data.template,
            prompt_format=data.prompt_format,
            system=data.system,
            max_prompt_length=data.max_prompt_length,
            overlong=data.overlong,
            vocab_size=self.model.config.vocab_size,
        )

    def _held_out(self, prompts: PromptSet) -> PromptSet:
        limit = self.config.eval.max_prompts
        return prompts if limit is None else prompts.take(range(min(limit, len(prompts))))

    def _build_training(self, params: Tree) -> None:
        config = self.config
        self.spec = make_spec(config, self.model)
        everything = (r".*",) if config.optimizer.others == "adamw" else ()
        self.initial, self.frozen = self.spec.split(params, dense=everything)
        self.tx = make_optimizer(config, self.spec)
        self.reference = jax.tree.map(jnp.copy, self.initial) if config.loss.reference_kl else None
        policy = Policy(
            self.model, self.vocab_size, config.rollout.temperature, self.prompts.tokens.shape[1]
        )
        loss = config.loss
        self.state_shardings = TrainState(
            jax.tree.map(lambda leaf: leaf.sharding, self.initial),
            optim.state_shardings(self.tx, self.initial),
            jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec()),
        )
        self._score = make_score(policy, loss.micro_batch)
        self._update = make_update(
            policy,
            self.tx,
            self.spec,
            LossSettings(
                aggregation=loss.aggregation,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                importance_cap=loss.importance_cap,
                reference_kl=loss.reference_kl,
            ),
            sketched=config.optimizer.name == "logra",
            kl_control=config.kl.control,
            micro_batch=loss.micro_batch,
            mismatch=config.kl.mismatch,
            probe_tokens=config.kl.probe_tokens,
            check_responses=config.kl.check_responses if config.kl.check_every else 0,
            state_shardings=self.state_shardings,
        )

    def _build_sampling(self) -> None:
        rollout, held_out = self.config.rollout, self.config.eval
        shared = {
            "max_new_tokens": rollout.max_new_tokens,
            "end_ids": self.model.end_ids,
            "vocab_size": self.vocab_size,
            "pad_id": self.model.pad_id,
        }
        self.sampler = Sampler(
            self.model, **shared, temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p
        )
        self.eval_sampler = Sampler(
            self.model, **shared, temperature=held_out.temperature, top_p=held_out.top_p
        )

    # -- state ---------------------------------------------------------------------------------------------------

    def initial_state(self) -> TrainState:
        """The state before the first update. Takes over the loaded weights: call it once."""
        opt_state = jax.jit(self.tx.init, out_shardings=self.state_shardings.opt_state)(self.initial)
        mismatch = jax.device_put(jnp.zeros(()), self.state_shardings.mismatch)
        return TrainState(self.initial, opt_state, mismatch)

    def pack(self, state: TrainState) -> dict[str, Tree]:
        """The state as a checkpoint holds it: all parameters, trained or not, in one tree."""
        return {
            "params": optim.merge(state.train, self.frozen),
            "opt_state": state.opt_state,
            "mismatch": state.mismatch,
        }

    def abstract_checkpoint(self) -> dict[str, Tree]:
        """Shapes, dtypes and shardings of :meth:`pack`."""
        shapes = jax.eval_shape(lambda train: self.pack(TrainState(train, self.tx.init(train), jnp.zeros(()))), self.initial)
        places = self.pack(self.state_shardings)
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(place, "sharding", place)),
            shapes,
            places,
        )

    def unpack(self, saved: dict[str, Tree]) -> TrainState:
        """The state from a checkpoint; its weights replace the loaded ones."""
        everything = (r".*",) if self.config.optimizer.others == "adamw" else ()
        train, self.frozen = self.spec.split(saved["params"], dense=everything)
        return TrainState(train, saved["opt_state"], saved["mismatch"])

    def export(self, state: TrainState, folder: Any) -> None:
        """Write the policy as a Hugging Face folder."""
        models.save_hf(self.model, optim.merge(state.train, self.frozen), folder, overwrite=True)

    # -- one batch -----------------------------------------------------------------------------------------------

    def sample(self, state: TrainState, prompts: PromptSet, update: int) -> Rollout:
        """Answers to a batch of prompts under the present policy, N = prompts x generations rows."""
        rows = batch_sharding(self.mesh)
        return self.sampler.generate(
            optim.merge(state.train, self.frozen),
            jax.device_put(prompts.tokens, rows),
            jax.device_put(prompts.lengths, rows),
            jax.device_put(prompts.ids, rows),
            n=self.config.rollout.generations,
            seed=self.config.seed,
            update=update,
        )

    def texts(self, rollout: Rollout) -> list[str]:
        """Decoded answers; the end token is a special token and not part of the text."""
        start = rollout.tokens.shape[1] - self.config.rollout.max_new_tokens
        tokens, lengths = np.asarray(rollout.tokens)[:, start:], np.asarray(rollout.lengths)
        return [decode(self.tokenizer, row[:n]) for row, n in zip(tokens, lengths, strict=True)]

    def grade(self, prompts: PromptSet, texts: list[str]) -> np.ndarray:
        """Rewards, float32 ``[prompts, generations]``; NaN where a row has to be dropped."""
        n = self.config.rollout.generations
        repeated = prompts.take(np.repeat(np.arange(len(prompts)), n))
        return self.grader.grade(repeated.texts, texts, repeated.columns).reshape(len(prompts), n)

    def advantages(self, rewards: np.ndarray, baseline: float) -> tuple[advantage.Advantages, float]:
        """Advantages of the rewards, and the running baseline after them (unchanged by the other estimators)."""
        settings = self.config.advantage
        if settings.estimator == "running_baseline":
            return advantage.running_baseline(
                rewards, baseline, weight=settings.baseline_weight, failure_reward=settings.failure_reward
            )
        if settings.estimator == "leave_one_out":
            return advantage.leave_one_out(rewards), baseline
        return advantage.grpo(rewards, std=settings.normalize_std, eps=settings.eps), baseline

    def batch(self, rollout: Rollout, advantages: advantage.Advantages, state: TrainState) -> Batch:
        """The rows to learn from, with the log-probabilities that several updates or a reference KL ask for."""
        place = partial(jax.device_put, device=batch_sharding(self.mesh))
        everywhere = partial(jax.device_put, device=self.state_shardings.mismatch)
        batch = Batch(
            tokens=rollout.tokens,
            prompt_lengths=rollout.prompt_lengths,
            lengths=rollout.lengths,
            stopped=rollout.stopped,
            valid=place(advantages.valid.reshape(-1)),
            advantages=place(advantages.values.reshape(-1)),
            rollout_logprobs=rollout.logprobs,
            probe=everywhere(np.zeros(0, np.int32)),
            check=everywhere(np.zeros((), bool)),
        )
        if self.config.loss.updates_per_batch > 1:
            batch = batch._replace(old_logprobs=self._score(state.train, self.frozen, batch))
        if self.reference is not None:
            batch = batch._replace(ref_logprobs=self._score(self.reference, self.frozen, batch))
        return batch

    def update(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, dict[str, float]]:
        """One update; waits for it and returns its metrics as Python numbers. Consumes ``state``."""
        rollout, kl = self.config.rollout, self.config.kl
        probe = draw_probe(self.config.seed, step, rollout.prompts, rollout.generations, kl.probe_responses)
        everywhere = partial(jax.device_put, device=self.state_shardings.mismatch)
        check = bool(kl.check_every) and step % kl.check_every == 0
        batch = batch._replace(probe=everywhere(probe), check=everywhere(np.array(check)))
        state, metrics = self._update(state, self.frozen, batch)
        if not check:
            metrics.pop("kl/realized", None)  # measured now and then only
        return state, {name: value.item() for name, value in jax.device_get(metrics).items()}

    def rollout_metrics(
        self, rollout: Rollout, rewards: np.ndarray, advantages: advantage.Advantages
    ) -> dict[str, float]:
        """What there is to say of a batch of answers before anything is learnt from it."""
        lengths, graded = np.asarray(rollout.lengths), rewards[advantages.valid]
        return {
            "reward/mean": float(graded.mean()),
            "reward/std": float(graded.std()),
            "response/length": float(lengths.mean()),
            "response/cut_off": float(1.0 - np.asarray(rollout.stopped).mean()),
            "advantage/zero_share": advantage.zero_share(advantages),
            "rows/dropped": int(np.size(rewards) - graded.size),
        }

    def evaluate(self, state: TrainState) -> Evaluation:
        """Accuracy and its kin on the held-out prompts, under the same noise at every call."""
        assert self.held_out is not None
        settings = self.config.eval
        return evaluate(
            self.eval_sampler,
            optim.merge(state.train, self.frozen),
            self.held_out,
            self.grader,
            decode=partial(decode, self.tokenizer),
            batch=self._eval_batch(len(self.held_out)),
            samples=settings.samples,
            ks=[k for k in (1, 2, 4, 8, 16, 32, 64) if k <= settings.samples] if settings.samples > 1 else (),
            seed=self.config.seed,
            place=partial(jax.device_put, device=batch_sharding(self.mesh)),
            after_batch=self.stop.check,
        )

    def _eval_batch(self, prompts: int) -> int:
        """Prompts per call: as many answers at a time as an update takes, a multiple of the fsdp devices."""
        fsdp = self.mesh.shape["fsdp"]
        wanted = min(max(self.config.rollout.rows // self.config.eval.samples, 1), prompts)
        return -(-wanted // fsdp) * fsdp

    def summary(self) -> str:
        """What is about to run, for people."""
        config, settings = self.config, self.config.optimizer
        dense = (r".*",) if settings.others == "adamw" else ()
        kinds: dict[str, list[int]] = {}
        for _, kind, _, size in self.spec.summary(optim.merge(self.initial, self.frozen), dense):
            if settings.name != "logra" and kind == "sketched":
                kind = "dense"
            kinds.setdefault(kind, []).append(size)
        shown = self.model.config
        weights = ", ".join(f"{sum(sizes):,} {kind} ({len(sizes)} tensors)" for kind, sizes in kinds.items())
        held_out = "none" if self.held_out is None else f"{len(self.held_out)} prompts of {config.data.eval}"
        step = (
            f"ratio {settings.update_ratio}" if settings.update_ratio else f"learning rate {settings.learning_rate}"
        )
        control = f"KL budget {config.kl.budget_start} to {config.kl.budget_end}" if config.kl.control else "no KL control"
        rank = f" rank {settings.rank}" if settings.name == "logra" else ""
        return "\n".join(
            [
                f"model      {config.model.path}: {shown.model_type}, {shown.num_hidden_layers} layers, "
                f"hidden {shown.hidden_size}, {config.model.compute_dtype} compute",
                f"weights    {weights}",
                f"optimizer  {settings.name}{rank}, {step}, {control}",
                f"data       {len(self.prompts)} prompts of {config.data.train} ({self.prompts.read} rows, "
                f"{self.prompts.dropped} too long, {self.prompts.truncated} truncated)",
                f"held out   {held_out}",
                f"update     {config.rollout.prompts} prompts x {config.rollout.generations} answers, up to "
                f"{config.rollout.max_new_tokens} tokens, reward {config.reward.kind}",
                f"devices    {self.mesh.devices.size} x {self.mesh.devices.flat[0].device_kind}, "
                f"mesh fsdp={self.mesh.shape['fsdp']} tensor={self.mesh.shape['tensor']}",
            ]
        )
