"""What a run is made of: a model with its held-out prompts (`Evaluator`), and what training adds (`Run`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax import build, models, optim
from logra_jax.config import Config, check_lengths, resolve_path
from logra_jax.errors import UserError
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models.hf import read_json
from logra_jax.rl import advantage
from logra_jax.rl.evaluate import Evaluation, Record, evaluate
from logra_jax.rl.kl import draw_probe
from logra_jax.rl.loss import LossSettings
from logra_jax.rl.prompts import PromptOrder, PromptSet, require_rows
from logra_jax.rl.reward import Grader
from logra_jax.rl.rollout import Rollout, Sampler
from logra_jax.rl.tokenizer import decode, load_tokenizer
from logra_jax.rl.update import Batch, Policy, TrainState, make_score, make_update

Tree = Any


class Evaluator:
    """A model with its tokenizer, devices, and held-out prompts (None without data.eval).

    The constructor makes the cheap checks; `load` reads the weights. after_batch: called between batches of
    answers, and may raise to stop.
    """

    model: models.CausalLM

    def __init__(self, config: Config, grader: Grader, after_batch: Callable[[], object]):
        self.config, self.grader, self._after_batch = config, grader, after_batch
        folder = resolve_path(config.model.path)
        self.tokenizer = load_tokenizer(folder)
        fsdp, tensor = config.mesh.fsdp, config.mesh.tensor
        self.mesh = make_mesh(fsdp or max(jax.device_count() // tensor, 1), tensor)
        self.rows_sharding = batch_sharding(self.mesh)
        file = folder / "config.json"
        self.shape = models.ModelConfig.from_hf(
            read_json(folder, file.name),
            where=str(file),
            rope_theta=config.model.rope_theta,
            max_position_embeddings=config.model.max_position_embeddings,
        )
        check_lengths(config, self.shape.max_position_embeddings)
        self.held_out: PromptSet | None = None
        if config.data.eval is not None:
            held_out, limit = self._read(config.data.eval), config.eval.max_prompts
            self.held_out = held_out.take(range(min(limit or len(held_out), len(held_out))))
        # The padded rows of the embedding have no token: neither sampled nor part of any distribution.
        self.vocab_size = min(len(self.tokenizer), self.shape.vocab_size)

    def _read(self, path: str) -> PromptSet:
        return build.read_prompts(self.config, path, self.tokenizer, self.shape.vocab_size)

    def load(self) -> Tree:
        """Read the weights; sets `model`, which everything below needs."""
        settings, empty = self.config.model, models.CausalLM(self.shape)
        model, weights = models.load_hf(
            resolve_path(settings.path),
            compute_dtype=settings.compute_dtype,
            shardings=shardings(self.mesh, empty.logical_axes(), empty.abstract_params()),
            rope_theta=settings.rope_theta,
            max_position_embeddings=settings.max_position_embeddings,
        )
        self.model = model.replace(remat=settings.remat)
        return weights

    def make_sampler(self, temperature: float, top_p: float, top_k: int = 0) -> Sampler:
        """A sampler of the model, with the end tokens and the vocabulary that all samplers of a run share."""
        return Sampler(
            self.model,
            max_new_tokens=self.config.rollout.max_new_tokens,
            end_ids=self.model.end_ids,
            vocab_size=self.vocab_size,
            pad_id=self.model.pad_id,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )

    def evaluate(self, params: Tree) -> Evaluation:
        """Accuracy and its kin on the held-out prompts, under the same noise at every call."""
        assert self.held_out is not None
        settings, count = self.config.eval, len(self.held_out)
        # As many answers at a time as an update takes, in a number of prompts that the devices divide.
        fsdp, wanted = self.mesh.shape["fsdp"], max(self.config.rollout.rows // settings.samples, 1)
        powers = [2**i for i in range(settings.samples.bit_length())]
        return evaluate(
            self.make_sampler(settings.temperature, settings.top_p),
            params,
            self.held_out,
            self.grader,
            decode=partial(decode, self.tokenizer),
            batch=-(-min(wanted, count) // fsdp) * fsdp,
            samples=settings.samples,
            ks=sorted({*powers, settings.samples}) if settings.samples > 1 else (),
            seed=self.config.seed,
            place=partial(jax.device_put, device=self.rows_sharding),
            after_batch=self._after_batch,
        )

    def samples(self, evaluation: Evaluation) -> list[Record]:
        """The answers to show to people: log.samples of them, spread evenly over the held-out prompts."""
        last, count = len(evaluation.records) - 1, min(self.config.log.samples, len(evaluation.records))
        return [evaluation.records[round(i)] for i in np.linspace(0, last, count)]

    def summary(self) -> str:
        """What is about to run, for people."""
        config, shape, mesh = self.config, self.shape, self.mesh
        held_out = "none" if self.held_out is None else f"{len(self.held_out)} prompts of {config.data.eval}"
        return (
            f"model      {config.model.path}: {shape.model_type}, {shape.num_hidden_layers} layers, "
            f"hidden {shape.hidden_size}, {config.model.compute_dtype} compute\n"
            f"held out   {held_out}\n"
            f"devices    {mesh.devices.size} x {mesh.devices.flat[0].device_kind}, "
            f"mesh fsdp={mesh.shape['fsdp']} tensor={mesh.shape['tensor']}"
        )


class Run(Evaluator):
    """Everything that training takes. The state of training itself is passed in and out of the methods."""

    def __init__(self, config: Config, grader: Grader, after_batch: Callable[[], object]):
        super().__init__(config, grader, after_batch)
        self._check_batches()
        self.prompts = self._read(config.data.train)
        require_rows(self.prompts, config.rollout.prompts)
        self.order = PromptOrder(len(self.prompts), config.seed)
        empty = models.CausalLM(self.shape)
        self.spec = build.make_spec(config, empty)
        self.spec.matrices(empty.abstract_params())  # refuses targets and ranks that do not fit
        self.weights = self.load()
        self._build()

    def _check_batches(self) -> None:
        fsdp, rollout, loss = self.mesh.shape["fsdp"], self.config.rollout, self.config.loss
        for name, count in (("rollout.prompts", rollout.prompts), ("loss.micro_batch", loss.micro_batch)):
            if count % fsdp:
                raise UserError(
                    f"{name}={count} cannot be split over mesh.fsdp={fsdp} devices: use a multiple of {fsdp}"
                )

    def _build(self) -> None:
        """State layout, sampler and jitted programs."""
        config, rollout, loss = self.config, self.config.rollout, self.config.loss
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.weights
        )
        train, self.frozen = self._split(self.shapes)
        self.tx = build.make_optimizer(config, self.spec)
        self.everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        places: tuple[Any, Any, Any] = (
            jax.tree.map(lambda leaf: leaf.sharding, train),
            optim.state_shardings(self.tx, train),
            self.everywhere,
        )
        self.state_shardings = TrainState(*places)
        # The reference is copied because the first update writes over the weights that it would share.
        self.reference = jax.tree.map(jnp.copy, self._split(self.weights)[0]) if loss.reference_kl else None
        self.sampler = self.make_sampler(rollout.temperature, rollout.top_p, rollout.top_k)
        on_mesh = self.model.replace(mesh=self.mesh)
        policy = Policy(on_mesh, self.vocab_size, rollout.temperature, self.prompts.tokens.shape[1])
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

    @property
    def _dense(self) -> tuple[str, ...]:
        return (r".*",) if self.config.optimizer.others == "adamw" else ()

    def _split(self, params: Tree) -> tuple[Tree, Tree]:
        return self.spec.split(params, dense=self._dense)

    def initial_state(self) -> TrainState:
        """The state before the first update. Takes over the loaded weights: call it once."""
        train, self.frozen = self._split(self.weights)
        self.weights = None  # the first update writes over them
        opt_state = jax.jit(self.tx.init, out_shardings=self.state_shardings.opt_state)(train)
        return TrainState(train, opt_state, jax.device_put(jnp.zeros(()), self.everywhere))

    def pack(self, state: TrainState) -> dict[str, Tree]:
        """The state as a checkpoint holds it: all parameters, trained or not, in one tree."""
        return {"params": self.params(state), "opt_state": state.opt_state, "mismatch": state.mismatch}

    def abstract_checkpoint(self) -> dict[str, Tree]:
        """Shapes, dtypes, shardings of `pack`. Lets go of the loaded weights: the checkpoint has its own."""
        self.weights = None
        train, _ = self._split(self.shapes)
        opt_state = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            jax.eval_shape(self.tx.init, train),
            self.state_shardings.opt_state,
        )
        mismatch = jax.ShapeDtypeStruct((), jnp.float32, sharding=self.everywhere)
        return {"params": self.shapes, "opt_state": opt_state, "mismatch": mismatch}

    def unpack(self, saved: dict[str, Tree]) -> TrainState:
        """The state from a checkpoint."""
        train, self.frozen = self._split(saved["params"])
        return TrainState(train, saved["opt_state"], saved["mismatch"])

    def params(self, state: TrainState) -> Tree:
        """All parameters of the policy."""
        return optim.merge(state.train, self.frozen)

    def sample(self, state: TrainState, prompts: PromptSet, update: int) -> Rollout:
        """Answers to a batch of prompts under the present policy, N = prompts x generations rows."""
        place = partial(jax.device_put, device=self.rows_sharding)
        return self.sampler.generate(
            self.params(state),
            place(prompts.tokens),
            place(prompts.lengths),
            place(prompts.ids),
            n=self.config.rollout.generations,
            seed=self.config.seed,
            update=update,
        )

    def grade(self, prompts: PromptSet, rollout: Rollout) -> np.ndarray:
        """Rewards, float32 ``[prompts, generations]``; NaN where a row has to be dropped."""
        n, start = self.config.rollout.generations, prompts.tokens.shape[1]
        answers, lengths, stopped = jax.device_get((rollout.tokens, rollout.lengths, rollout.stopped))
        # The end token is no part of the text, be it a special token or not.
        texts = [
            decode(self.tokenizer, row[start : start + length - ended])
            for row, length, ended in zip(answers, lengths, stopped.astype(int), strict=True)
        ]
        repeated = prompts.take(np.repeat(np.arange(len(prompts)), n))
        return self.grader.grade(repeated.texts, texts, repeated.columns).reshape(len(prompts), n)

    def advantages(self, rewards: np.ndarray, baseline: float) -> tuple[advantage.Advantages, float]:
        """Advantages, and the running baseline after these rewards (unchanged by the other estimators)."""
        settings = self.config.advantage
        if settings.estimator == "running_baseline":
            return advantage.running_baseline(
                rewards, baseline, weight=settings.baseline_weight, failure_reward=settings.failure_reward
            )
        if settings.estimator == "leave_one_out":
            return advantage.leave_one_out(rewards), baseline
        return advantage.grpo(rewards, std=settings.normalize_std, eps=settings.eps), baseline

    def batch(self, rollout: Rollout, advantages: advantage.Advantages, state: TrainState) -> Batch:
        """The rows to learn from, with log-probabilities if several updates or a reference KL need them."""
        place = partial(jax.device_put, device=self.rows_sharding)
        batch = Batch(
            tokens=rollout.tokens,
            prompt_lengths=rollout.prompt_lengths,
            lengths=rollout.lengths,
            stopped=rollout.stopped,
            valid=place(advantages.valid.reshape(-1)),
            advantages=place(advantages.values.reshape(-1)),
            rollout_logprobs=rollout.logprobs,
            probe=jax.device_put(np.zeros(0, np.int32), self.everywhere),
            check=jax.device_put(np.zeros((), bool), self.everywhere),
        )
        if self.config.loss.updates_per_batch > 1:
            batch = batch._replace(old_logprobs=self._score(state.train, self.frozen, batch))
        if self.reference is not None:
            batch = batch._replace(ref_logprobs=self._score(self.reference, self.frozen, batch))
        return batch

    def update(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, dict[str, Any]]:
        """One update; waits for it and returns its metrics as Python numbers. Consumes ``state``."""
        rollout, kl = self.config.rollout, self.config.kl
        probe = draw_probe(self.config.seed, step, rollout.prompts, rollout.generations, kl.probe_responses)
        check = bool(kl.check_every) and step % kl.check_every == 0
        batch = batch._replace(
            probe=jax.device_put(probe, self.everywhere),
            check=jax.device_put(np.array(check), self.everywhere),
        )
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

    def export(self, state: TrainState, folder: Any) -> None:
        """Write the policy as a Hugging Face folder."""
        models.save_hf(self.model, self.params(state), folder, overwrite=True)

    def summary(self) -> str:
        """What is about to run, for people."""
        config, settings = self.config, self.config.optimizer
        kinds: dict[str, list[int]] = {}
        for _, kind, _, size in self.spec.summary(self.shapes, self._dense):
            trained_as = "dense" if kind == "sketched" and settings.name != "logra" else kind
            kinds.setdefault(trained_as, []).append(size)
        weights = ", ".join(f"{sum(sizes):,} {kind} ({len(sizes)} tensors)" for kind, sizes in kinds.items())
        step = f"ratio {settings.update_ratio}" if settings.update_ratio else f"learning rate {settings.learning_rate}"
        kl = config.kl
        control = f"KL budget {kl.budget_start} to {kl.budget_end}" if kl.control else "no KL control"
        rank = f" rank {settings.rank}" if settings.name == "logra" else ""
        rollout, prompts = config.rollout, self.prompts
        return (
            f"{super().summary()}\n"
            f"weights    {weights}\n"
            f"optimizer  {settings.name}{rank}, {step}, {control}\n"
            f"data       {len(prompts)} prompts of {config.data.train} ({prompts.read} rows, "
            f"{prompts.dropped} too long, {prompts.truncated} truncated)\n"
            f"update     {rollout.prompts} prompts x {rollout.generations} answers, up to "
            f"{rollout.max_new_tokens} tokens, reward {config.reward.kind}"
        )
