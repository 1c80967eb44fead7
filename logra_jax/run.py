"""What a run is made of: a model with its held-out prompts (`Evaluator`), and what training adds (`Run`)."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax import build, distributed, fit, models, optim, sampling, servers
from logra_jax.config import Config, check_lengths, resolve_path
from logra_jax.mesh import batch_sharding, fetch, make_mesh, place_array, shardings
from logra_jax.optim.spec import leaves_with_paths
from logra_jax.rl import advantage
from logra_jax.rl.ahead import Ahead, Drawn
from logra_jax.rl.batch import Batch
from logra_jax.rl.engine import Engine, JaxEngine
from logra_jax.rl.evaluate import Evaluation, Record, evaluate, means_by_task
from logra_jax.rl.following import Following, Probe
from logra_jax.rl.kl import draw_probe
from logra_jax.rl.packing import Packing, pack
from logra_jax.rl.policy import Policy, make_score
from logra_jax.rl.prompts import PromptOrder, PromptSet, require_rows
from logra_jax.rl.reward import Grader, RewardCounts
from logra_jax.rl.rollout import Rollout, Sampler
from logra_jax.rl.shared_engine import SharedEngine
from logra_jax.rl.tokenizer import decode, load_tokenizer
from logra_jax.rl.update import TrainState
from logra_jax.rl.vllm_engine import VllmEngine
from logra_jax.settings import LOW_RANK

Tree = Any

PROBE_PROMPTS = 8  # by which servers are compared with the trainer


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
        self.shape = build.read_model_config(config)
        check_lengths(config, self.shape.max_position_embeddings)
        self.group = sampling.groups(config, self.shape, self.mesh)[0]
        self.held_out: PromptSet | None = None
        if config.data.eval is not None:
            held_out, limit = self._read("eval"), config.eval.max_prompts
            self.held_out = held_out.take(range(min(limit or len(held_out), len(held_out))))
        # The padded rows of the embedding have no token: neither sampled nor part of any distribution.
        self.vocab_size = min(len(self.tokenizer), self.shape.vocab_size)

    def _read(self, key: Literal["train", "eval"]) -> PromptSet:
        found = build.read_prompts(self.config, key, self.tokenizer, self.shape.vocab_size)
        return build.gradable(self.config, key, found, self.grader)

    def load(self, dtypes: Mapping[str, str] | None = None) -> Tree:
        """Read the weights; sets `model`, which everything below needs.

        dtypes: by parameter path; parameters that are not in it keep the dtype of the folder.
        """
        settings, empty = self.config.model, models.CausalLM(self.shape)
        attention = build.choose_attention(self.config, self.shape, self.mesh.local_devices[0])
        model, weights = models.load_hf(
            resolve_path(settings.path),
            dtypes or {},
            compute_dtype=settings.compute_dtype,
            shardings=shardings(self.mesh, empty.logical_axes(), empty.abstract_params()),
            rope_theta=settings.rope_theta,
            max_position_embeddings=settings.max_position_embeddings,
        )
        self.model = model.replace(remat=settings.remat, attention=attention)
        return weights

    def make_sampler(self, temperature: float, top_p: float, top_k: int = 0) -> Sampler:
        """A sampler of the model, with the end tokens and the vocabulary that all samplers of a run share."""
        on_mesh = self.model.replace(mesh=self.mesh)
        return build.make_sampler(self.config, on_mesh, self.vocab_size, temperature, top_p, top_k, self.group)

    def evaluate(self, params: Tree) -> Evaluation:
        """Accuracy and its kin on the held-out prompts, under the same noise at every call."""
        assert self.held_out is not None
        settings = self.config.eval
        powers = [2**i for i in range(settings.samples.bit_length())]
        return evaluate(
            self.make_sampler(settings.temperature, settings.top_p),
            params,
            self.held_out,
            self.grader,
            decode=partial(decode, self.tokenizer),
            batch=sampling.evaluation(self.config, self.mesh.shape["fsdp"], len(self.held_out)).prompts,
            samples=settings.samples,
            ks=sorted({*powers, settings.samples}) if settings.samples > 1 else (),
            tasks=build.tasks_of(self.config, "eval", self.held_out),
            seed=self.config.seed,
            place=partial(place_array, sharding=self.rows_sharding),
            fetch=fetch,
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
            f"{f', sampling in groups of {self.group}' if self.group else ''}"
        )


class Run(Evaluator):
    """Everything that training takes. The state of training itself is passed in and out of the methods."""

    def __init__(self, config: Config, grader: Grader, after_batch: Callable[[], object]):
        super().__init__(config, grader, after_batch)
        build.check_split(config, self.mesh.shape["fsdp"])
        self.prompts = self._read("train")
        require_rows(self.prompts, config.rollout.prompts)
        self.order = PromptOrder(len(self.prompts), config.seed)
        empty = models.CausalLM(self.shape)
        self.spec = build.make_spec(config, empty)
        trained, _ = self._split(empty.abstract_params())  # refuses targets and ranks that do not fit
        paths = [path for path, _ in leaves_with_paths(trained)]
        width, devices = self.prompts.tokens.shape[1], list(self.mesh.devices.flat)
        found = fit.check(config, self.shape, self.vocab_size, width, devices)
        self.group = self.group if found is None else found
        distributed.on_first(lambda: servers.check(config, self.shape, width))
        self.weights = self.load(dict.fromkeys(paths, config.model.param_dtype))
        if config.optimizer.name == "lora":
            self.weights = optim.add_adapters(self.weights, self.spec, config.optimizer.lora_alpha)
        self._build()

    def _build(self) -> None:
        """State layout, sampler and jitted programs."""
        config, rollout, loss = self.config, self.config.rollout, self.config.loss
        self.shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.weights
        )
        train, self.frozen = self._split(self.shapes)
        self.tx = build.make_optimizer(config, self.spec)
        self.rounding = build.rounding(config)
        self.everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        self.abstract_state, self.state_shardings = build.state_layout(self.tx, train, self.everywhere, self.rounding)
        # The reference is copied because the first update writes over the weights that it would share.
        self.reference = jax.tree.map(jnp.copy, self._split(self.weights)[0]) if loss.reference_kl else None
        sampler = self.make_sampler(rollout.temperature, rollout.top_p, rollout.top_k)
        self.engine: Engine = JaxEngine(sampler)
        if rollout.engine == "vllm":
            shapes = {path: leaf.shape for path, leaf in leaves_with_paths(train)}
            width = self.prompts.tokens.shape[1]
            self.engine = servers.make_engine(
                config, sampler, width, shapes, self._write, self.place, self._after_batch
            )
        self.ahead = Ahead()
        on_mesh = self.model.replace(mesh=self.mesh)
        policy = Policy(on_mesh, self.vocab_size, rollout.temperature, self.prompts.tokens.shape[1])
        self._servers = self._following(policy)
        self._score = make_score(policy, loss.micro_batch)
        self._update = build.make_policy_update(config, policy, self.tx, self.spec, self.state_shardings)

    def _following(self, policy: Policy) -> Following | None:
        if not isinstance(self.engine, VllmEngine | SharedEngine):
            return None
        every, fsdp = self.config.vllm.drift_every, self.mesh.shape["fsdp"]
        probe = None
        if every:  # a number of prompts that the devices divide, some of them twice if there are too few
            fixed = self.prompts.take(np.arange(-(-PROBE_PROMPTS // fsdp) * fsdp) % len(self.prompts))
            everywhere = partial(place_array, sharding=self.everywhere)
            probe = Probe(policy, fixed.tokens, fixed.lengths, self.place, everywhere)
        return Following(self.engine, self.spec, probe, every)

    def place(self, rows: np.ndarray) -> jax.Array:
        """Rows of a batch, on the devices."""
        return place_array(rows, self.rows_sharding)

    def _split(self, params: Tree) -> tuple[Tree, Tree]:
        return build.split(self.config, self.spec, params)

    def initial_state(self) -> TrainState:
        """The state before the first update. Takes over the loaded weights: call it once."""
        train, self.frozen = self._split(self.weights)
        self.weights = None  # the first update writes over them
        opt_state = jax.jit(self.tx.init, out_shardings=self.state_shardings.opt_state)(train)
        residual = None
        if self.rounding == "residual":
            residual = jax.jit(optim.init_residual, out_shardings=self.state_shardings.residual)(train)
        return TrainState(train, opt_state, place_array(np.zeros((), np.float32), self.everywhere), residual)

    def pack(self, state: TrainState) -> dict[str, Tree]:
        """The state as a checkpoint holds it: all parameters, trained or not, in one tree."""
        packed = {"params": self.params(state), "opt_state": state.opt_state, "mismatch": state.mismatch}
        return packed if state.residual is None else packed | {"residual": state.residual}

    def abstract_checkpoint(self) -> dict[str, Tree]:
        """Shapes, dtypes, shardings of `pack`. Lets go of the loaded weights: the checkpoint has its own."""
        self.weights = None
        state = self.abstract_state
        packed = {"params": self.shapes, "opt_state": state.opt_state, "mismatch": state.mismatch}
        return packed | {"residual": state.residual} if self.rounding == "residual" else packed

    def unpack(self, saved: dict[str, Tree]) -> TrainState:
        """The state from a checkpoint. Raises UserError for adapters that this run would count otherwise."""
        build.check_adapters(self.config, saved["params"])
        train, self.frozen = self._split(saved["params"])
        residual = saved["residual"] if self.rounding == "residual" else None
        return TrainState(train, saved["opt_state"], saved["mismatch"], residual)

    def params(self, state: TrainState) -> Tree:
        """All parameters of the policy."""
        return optim.merge(state.train, self.frozen)

    def follow(self, state: TrainState, step: int) -> dict[str, Any]:
        """Bring the engine, which is drawing nothing, to the weights after `step` updates. Returns metrics.

        Starts servers if there are any to start and none run.
        """
        if self._servers is not None:
            return self._servers.follow(state, self.frozen, self.params(state), step)
        self.engine.sync(self.params(state), version=step)
        return {}

    def draw_ahead(self, update: int, draw: Callable[[], Drawn]) -> None:
        """Begin to draw the answers for an update, from `generate` and `grade`, in the background."""
        assert isinstance(self.engine, VllmEngine)
        self.engine.let_go()
        self.ahead.start(update, draw)

    def generate(self, prompts: PromptSet, update: int) -> Rollout:
        """Answers to a batch of prompts under the engine's weights, N = prompts x generations rows."""
        return self.engine.generate(
            self.place(prompts.tokens),
            self.place(prompts.lengths),
            self.place(prompts.ids),
            n=self.config.rollout.generations,
            seed=self.config.seed,
            update=update,
        )

    def grade(self, prompts: PromptSet, rollout: Rollout) -> tuple[np.ndarray, RewardCounts]:
        """Rewards, float32 ``[prompts, generations]``, NaN where a row has to be dropped; what failed, how often."""
        n, start = self.config.rollout.generations, prompts.tokens.shape[1]
        answers, lengths, stopped = fetch((rollout.tokens, rollout.lengths, rollout.stopped))
        # The end token is no part of the text, be it a special token or not.
        texts = [
            decode(self.tokenizer, row[start : start + length - ended])
            for row, length, ended in zip(answers, lengths, stopped.astype(int), strict=True)
        ]
        repeated = prompts.take(np.repeat(np.arange(len(prompts)), n))
        rewards, counts = self.grader.grade_counted(repeated.texts, texts, repeated.columns)
        return rewards.reshape(len(prompts), n), counts

    def advantages(self, rollout: Rollout, rewards: np.ndarray, baseline: float) -> tuple[advantage.Advantages, float]:
        """Advantages, and the running baseline after these rewards (unchanged by the other estimators)."""
        settings, span = self.config.advantage, self.config.reward.overlong_tokens
        lengths = fetch(rollout.lengths).reshape(rewards.shape)
        rewards = rewards + advantage.overlong_penalty(lengths, self.config.rollout.max_new_tokens, span)
        if settings.estimator == "running_baseline":
            return advantage.running_baseline(
                rewards, baseline, weight=settings.baseline_weight, failure_reward=settings.failure_reward
            )
        if settings.estimator == "leave_one_out":
            return advantage.leave_one_out(rewards), baseline
        return advantage.grpo(rewards, std=settings.normalize_std, eps=settings.eps), baseline

    def batch(self, rollout: Rollout, advantages: advantage.Advantages, state: TrainState) -> Batch:
        """The rows to learn from, with log-probabilities if several updates or a reference KL need them."""
        valid = advantages.valid.reshape(-1)
        if self.config.loss.skip_cut_off:
            valid = valid & fetch(rollout.stopped)
        batch = Batch(
            tokens=rollout.tokens,
            prompt_lengths=rollout.prompt_lengths,
            lengths=rollout.lengths,
            stopped=rollout.stopped,
            valid=self.place(valid),
            advantages=self.place(advantages.values.reshape(-1)),
            rollout_logprobs=rollout.logprobs,
            probe=place_array(np.zeros(0, np.int32), self.everywhere),
            check=place_array(np.zeros((), bool), self.everywhere),
            packing=self._pack(rollout, valid),
        )
        if self.config.loss.updates_per_batch > 1:
            batch = batch._replace(old_logprobs=self._score(state.train, self.frozen, batch))
        if self.reference is not None:
            batch = batch._replace(ref_logprobs=self._score(self.reference, self.frozen, batch))
        return batch

    def _pack(self, rollout: Rollout, valid: np.ndarray) -> Packing | None:
        """Which answers share a row; None where each has its own."""
        prompt_width = self.prompts.tokens.shape[1]
        layout = build.abstract_packing(self.config, self.mesh, prompt_width)
        if layout is None:
            return None
        prompt_lengths, lengths = fetch((rollout.prompt_lengths, rollout.lengths))
        found = pack(
            prompt_lengths, lengths, valid,
            prompt_width=prompt_width, width=rollout.tokens.shape[1],
            row=layout.source.shape[2], devices=self.mesh.shape["fsdp"],
        )  # fmt: skip
        return jax.tree.map(lambda array, leaf: place_array(np.asarray(array), leaf.sharding), found, layout)

    def update(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, dict[str, Any]]:
        """One update, also of the servers' weights if there are any and they are drawing nothing.

        Waits for it and returns its metrics as Python numbers. Consumes ``state``.
        """
        rollout, kl = self.config.rollout, self.config.kl
        probe = draw_probe(self.config.seed, step, rollout.prompts, rollout.generations, kl.probe_responses)
        check = bool(kl.check_every) and step % kl.check_every == 0
        batch = batch._replace(
            probe=place_array(probe, self.everywhere),
            check=place_array(np.array(check), self.everywhere),
        )
        state, metrics, *sent = self._update(state, self.frozen, batch)
        if not check:
            metrics.pop("kl/realized", None)  # measured now and then only
        found = {name: value.item() for name, value in fetch(metrics).items()}
        if self._servers is not None and sent and found["ok"]:
            found |= self._servers.give(state, step + 1, fetch(sent[0]), later=self.ahead.update is not None)
        return state, found

    def rollout_metrics(
        self, prompts: PromptSet, rollout: Rollout, rewards: np.ndarray, advantages: advantage.Advantages
    ) -> dict[str, float]:
        """What there is to say of a batch of answers before anything is learnt from it."""
        (lengths, stopped), graded = fetch((rollout.lengths, rollout.stopped)), rewards[advantages.valid]
        tasks = build.tasks_of(self.config, "train", prompts)
        by_task = {} if tasks is None else means_by_task(tasks, rewards, advantages.valid)
        found = {f"reward/{task}": mean for task, mean in by_task.items()}
        if span := self.config.reward.overlong_tokens:
            penalty = advantage.overlong_penalty(lengths, self.config.rollout.max_new_tokens, span)
            found["reward/overlong"] = float(penalty.mean())
        return found | {
            "reward/mean": float(graded.mean()),
            "reward/std": float(graded.std()),
            "response/length": float(lengths.mean()),
            "response/cut_off": float(1.0 - stopped.mean()),
            "advantage/zero_share": advantage.zero_share(advantages),
            "rows/dropped": int(np.size(rewards) - graded.size),
        }

    def export(self, state: TrainState, folder: Any) -> None:
        """Write the policy as a Hugging Face folder."""
        plain, writes = optim.merge_adapters(self.params(state)), distributed.first()
        models.save_hf(self.model, plain, folder, overwrite=True, residual=state.residual, write=writes)

    def _write(self, params: Tree, folder: Path) -> None:
        """All weights for servers to load, no less exact than they are here."""
        dtype = "float32" if self.config.model.param_dtype == "float32" else None
        plain, writes = optim.merge_adapters(params), distributed.first()
        models.save_hf(self.model, plain, folder, overwrite=True, dtype=dtype, write=writes)

    def _kinds(self) -> dict[str, list[int]]:
        """Numbers in each parameter, by what is done with it."""
        name, kinds = self.config.optimizer.name, dict[str, list[int]]()
        targets = {"logra": "sketched", "galore": "projected", "lora": "frozen"}.get(name, "dense")
        if name == "lora":
            kinds["in adapters"] = [leaf.size for leaf in jax.tree.leaves(self._split(self.shapes)[0])]
        for _, kind, _, size in self.spec.summary(self.model.abstract_params(), build.densely_trained(self.config)):
            kinds.setdefault(targets if kind == "sketched" else kind, []).append(size)
        return kinds

    def summary(self) -> str:
        """What is about to run, for people."""
        config, settings, kinds = self.config, self.config.optimizer, self._kinds()
        weights = ", ".join(f"{sum(sizes):,} {kind} ({len(sizes)} tensors)" for kind, sizes in kinds.items())
        step = f"ratio {settings.update_ratio}" if settings.update_ratio else f"learning rate {settings.learning_rate}"
        kl = config.kl
        control = f"KL budget {kl.budget_start} to {kl.budget_end}" if kl.control else "no KL control"
        rank = f" rank {settings.rank}" if settings.name in LOW_RANK else ""
        rank += f", b1 {settings.b1}" if settings.name == "logra" and settings.b1 else ""
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
