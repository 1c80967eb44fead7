"""Device memory of a training run, from the compiler, with shapes alone: no weights, no GPU.

The programs are those of the trainer (`build.py`), lowered for devices that may be mere descriptions. All
figures are bytes per device.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from logra_jax import build, optim, sampling
from logra_jax.config import Config, check_lengths
from logra_jax.errors import UserError
from logra_jax.gpus import Target
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models import CausalLM, ModelConfig
from logra_jax.rl.batch import Batch
from logra_jax.rl.policy import Policy
from logra_jax.rl.refill import refill_group
from logra_jax.rules import idle, reset

Tree = Any


@dataclass(frozen=True)
class Footprint:
    """Bytes per device. `update` and `rollout` are compiled totals: arguments + outputs - aliased + temporaries.

    gradients: float32 sketches, or dense gradients, of the targets if split evenly over the devices; computed,
    and part of temporaries. kv_cache: computed, and part of rollout. reference: copy of the trained weights
    that a reference KL keeps, which is an argument of neither program. group: devices that share a product of the
    rollout, 0 if that is as in the update; copy: of the weights for that, computed, and part of rollout. Where servers
    sample the rollouts, `rollout` is the evaluation, or 0 without one.
    """

    weights: int
    optimizer: int
    gradients: int
    temporaries: int
    kv_cache: int
    update: int
    rollout: int
    reference: int
    group: int = 0
    copy: int = 0

    @property
    def peak(self) -> int:
        """The larger of the two phases; the optimizer state stays where it is during the rollout."""
        return max(self.update, self.rollout + self.optimizer) + self.reference


def absent_gpus(target: Target, count: int) -> Sequence[Any]:
    """Devices that can be compiled for, but not run on. Raises UserError if the compiler refuses."""
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target.proto, topology=f"1x1x{count}", topology_name=target.name
        )
    except Exception as error:  # the plugin raises whatever it likes
        raise UserError(f"cannot compile for {target.name}: {str(error).splitlines()[0]}") from error
    return found.devices


def measure(
    config: Config,
    shape: ModelConfig,
    vocab_size: int,
    devices: Sequence[Any],
    *,
    room: float | None = None,
    sampled: dict[int, int] | None = None,
    rollout: bool = True,
) -> Footprint:
    """Compile the update and, unless told otherwise, the rollout of `config` for `devices`.

    vocab_size: tokens of the tokenizer. room: bytes there are; where the rollout does not fit in one layout of the
    weights, and there is another one to choose, it is measured in that. sampled: totals of the rollout by layout, which
    are taken from there, and put there. Raises UserError for a mesh that does not divide the model or the rows.
    """
    check_lengths(config, shape.max_position_embeddings)
    parts, sampled = Parts(config, shape, vocab_size, devices), {} if sampled is None else sampled
    updated = parts.update().memory_analysis()
    found = Footprint(
        weights=_bytes(parts.train) + _bytes(parts.frozen),
        optimizer=_bytes(parts.state.opt_state),
        gradients=parts.gradients(),
        temporaries=updated.temp_size_in_bytes,
        kv_cache=parts.kv_cache(),
        update=total(updated),
        rollout=0,
        reference=_bytes(parts.train) if config.loss.reference_kl else 0,
    )
    for group in parts.groups if rollout and parts.sampling is not None else ():
        if group not in sampled:
            sampled[group] = total(parts.rollout(group).memory_analysis())
        copy = sampling.copy_bytes(parts.model, group) if group else 0
        found = dataclasses.replace(found, rollout=sampled[group], group=group, copy=copy)
        if room is None or found.peak <= room:
            break
    return found


class Parts:
    """The abstract counterparts of what a `Run` holds: shapes with shardings, and the programs they go into."""

    def __init__(self, config: Config, shape: ModelConfig, vocab_size: int, devices: Sequence[Any]):
        self.config, self.vocab_size = config, vocab_size
        settings, mesh = config.model, config.mesh
        self.mesh = make_mesh(mesh.fsdp or max(len(devices) // mesh.tensor, 1), mesh.tensor, devices)
        self.rows = batch_sharding(self.mesh)
        self.sampling = sampling.sampled_here(config, self.mesh.shape["fsdp"])
        self.groups = sampling.groups(config, shape, self.mesh)
        self.everywhere = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        # Short stacks are unrolled on a CPU only, which these devices are not meant to be.
        self.model = CausalLM(
            shape,
            settings.compute_dtype,
            settings.remat,
            build.choose_attention(config, shape, devices[0]),
            scan_unroll=1,
            mesh=self.mesh,
        )
        shapes = self.model.abstract_params()
        places = shardings(self.mesh, self.model.logical_axes(), shapes)
        build.check_split(config, self.mesh.shape["fsdp"])
        params = jax.tree.map(lambda x, place: self._array(x.shape, x.dtype, place), shapes, places)
        self.spec = build.make_spec(config, self.model)
        train, frozen = build.split(config, self.spec, params)
        self.train = jax.tree.map(lambda x: self._array(x.shape, settings.param_dtype, x.sharding), train)
        # Weights that never change are kept in the precision they are computed with.
        self.frozen = jax.tree.map(lambda x: self._array(x.shape, settings.compute_dtype, x.sharding), frozen)
        if config.optimizer.name == "lora":
            adapted = optim.adapter_shapes(optim.merge(self.train, self.frozen), self.spec)
            self.train, self.frozen = build.split(config, self.spec, adapted)
        self.tx = build.make_optimizer(config, self.spec)
        self.state, self.state_shardings = build.state_layout(
            self.tx, self.train, self.everywhere, build.rounding(config)
        )

    @staticmethod
    def _array(shape: tuple[int, ...], dtype: Any, place: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place)

    @property
    def _widths(self) -> tuple[int, int]:
        """Widths of prompts, at their longest, and of answers."""
        return self.config.data.max_prompt_length, self.config.rollout.max_new_tokens

    def batch(self) -> Batch:
        """The rows of one update, at full length."""
        config, array, rows = self.config, self._array, self.rows
        count, (prompt, answer) = config.rollout.rows, self._widths
        logprobs = array((count, answer), "float32", rows)
        return Batch(
            tokens=array((count, prompt + answer), "int32", rows),
            prompt_lengths=array((count,), "int32", rows),
            lengths=array((count,), "int32", rows),
            stopped=array((count,), "bool", rows),
            valid=array((count,), "bool", rows),
            advantages=array((count,), "float32", rows),
            rollout_logprobs=logprobs,
            probe=array((min(config.kl.probe_responses, count),), "int32", self.everywhere),
            check=array((), "bool", self.everywhere),
            old_logprobs=logprobs if config.loss.updates_per_batch > 1 else None,
            ref_logprobs=logprobs if config.loss.reference_kl else None,
            packing=build.abstract_packing(config, self.mesh, prompt),
        )

    def update(self) -> Any:
        """The compiled update."""
        config = self.config
        policy = Policy(self.model, self.vocab_size, config.rollout.temperature, self._widths[0])
        update = build.make_policy_update(config, policy, self.tx, self.spec, self.state_shardings)
        return _compile(update, self.state, self.frozen, self.batch())

    def rollout(self, group: int | None = None) -> Any:
        """The compiled sampling of one batch of answers, by groups of so many devices (None: of the best size)."""
        assert self.sampling is not None
        prompts, samples, temperature, top_p, top_k = self.sampling
        group = self.groups[0] if group is None else group
        sampler = build.make_sampler(self.config, self.model, self.vocab_size, temperature, top_p, top_k, group)

        def generate(params: Tree, tokens: Any, lengths: Any, ids: Any) -> Any:
            return sampler.generate(params, tokens, lengths, ids, n=samples, seed=0, update=0)

        prompt, _ = self._widths
        params = optim.merge(self.train, self.frozen)
        tokens = self._array((prompts, prompt), "int32", self.rows)
        numbers = self._array((prompts,), "int32", self.rows)
        return _compile(jax.jit(generate), params, tokens, numbers, numbers)

    def gradients(self) -> int:
        """Bytes of all sketches, or of all dense gradients, over the number of devices."""
        numbers = sum(leaf.size for leaf in jax.tree.leaves(self.train))
        if self.config.optimizer.name == "logra":
            matrices = self.spec.matrices(self.train)
            sketched = sum(prod(m.sketch_shape(self.spec.rank)) for m in matrices.values())
            numbers += sketched - sum(prod(m.shape) for m in matrices.values())
        return 4 * numbers // self.mesh.size

    def kv_cache(self) -> int:
        """Bytes of the keys and values of one device's rows in flight at full length, and of prompts that wait."""
        if self.sampling is None:
            return 0
        settings, fsdp, (prompt, answer) = self.config.rollout, self.mesh.shape["fsdp"], self._widths
        refilled = 0 < settings.slots < self.sampling.rows
        rows = (settings.slots if refilled else self.sampling.rows) // fsdp

        def size(rows: int, slots: int) -> int:
            cache = jax.eval_shape(lambda: self.model.init_cache(rows, slots, settings.cache_dtype))
            return sum(leaf.size * leaf.dtype.itemsize for leaf in (cache.k, cache.v))

        waiting = refill_group(rows, self.sampling.prompts // fsdp, self.sampling.samples) if refilled else 0
        return (size(rows, prompt + answer) + size(waiting, prompt)) // self.mesh.shape["tensor"]


def attention_workspace(config: Config, shape: ModelConfig, fsdp: int) -> int:
    """Bytes per device, an estimate: cuDNN's backward pass adds up the gradient of the queries in float32."""
    rows = (config.loss.micro_batch or config.rollout.rows) // fsdp
    tokens = config.data.max_prompt_length + config.rollout.max_new_tokens
    return 4 * rows * tokens * shape.q_size // config.mesh.tensor


def _compile(function: Any, *arguments: Any) -> Any:
    lowered = function.lower(*arguments)
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:  # some sizes are beyond XLA
        raise UserError(
            f"XLA cannot compile a program of these sizes: {str(error).splitlines()[0][:200]}. Another "
            "loss.micro_batch, data.max_prompt_length or rollout.max_new_tokens may do"
        ) from error


def total(memory: Any) -> int:
    """Bytes per device of a compiled program, from its `memory_analysis()`."""
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return sizes - memory.alias_size_in_bytes


def _bytes(tree: Tree) -> int:
    """Bytes that one device holds of abstract arrays with shardings."""
    leaves = jax.tree.leaves(tree)
    return sum(prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def with_optimizer(config: Config, name: str) -> Config:
    """The run as configured if that is its optimizer, else another one on the same weights.

    LoGRA takes steps of 6e-5 of the weights, the others have a learning rate and no KL control. LoRA's weights
    are frozen, and so not kept as model.param_dtype says.
    """
    if config.optimizer.name == name:
        return config
    change = functools.partial(dataclasses.replace, config.optimizer, name=name, b1=None)
    if name == "logra":
        dense_rate = config.optimizer.learning_rate if config.optimizer.others == "adamw" else None
        optimizer = change(update_ratio=6e-5, learning_rate=None, others_learning_rate=dense_rate)
        changed = dataclasses.replace(config, optimizer=optimizer)
        return reset(changed, idle(changed))
    optimizer, model = change(learning_rate=1e-6, others_learning_rate=None), config.model
    if model.remat == "projected":
        model = dataclasses.replace(model, remat="full")
    if name == "lora":
        optimizer = dataclasses.replace(optimizer, others="frozen")
        model = dataclasses.replace(model, param_dtype="float32")
    kl = dataclasses.replace(config.kl, control=False, check_every=0)
    changed = dataclasses.replace(config, optimizer=optimizer, model=model, kl=kl)
    return reset(changed, idle(changed))
