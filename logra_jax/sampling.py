"""What a run asks of the built-in sampler, and where the weights lie meanwhile.

While training, each device stores a part of every weight and the parts are put together where they are used. That is
little beside an update, but every token of a rollout takes a pass of its own. So the sampler may take a copy that is
laid out for it, once per batch of answers: `logra_jax.rl.decoding.in_groups`.
"""

from math import gcd, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from logra_jax.config import Config
from logra_jax.errors import UserError
from logra_jax.mesh import AxisTable, decoding_mesh, ways
from logra_jax.models import CausalLM, ModelConfig


class Sampling(NamedTuple):
    """One batch of answers: of so many prompts, so many each, drawn like this."""

    prompts: int
    samples: int
    temperature: float
    top_p: float
    top_k: int

    @property
    def rows(self) -> int:
        """Answers."""
        return self.prompts * self.samples


def evaluation(config: Config, fsdp: int, count: int | None = None) -> Sampling:
    """A batch of the evaluation of `count` prompts (None: of many): as many answers as an update takes, of a number of
    prompts that the devices divide.
    """
    settings = config.eval
    wanted = max(config.rollout.rows // settings.samples, 1)
    prompts = min([wanted, *(limit for limit in (settings.max_prompts, count) if limit)])
    return Sampling(-(-prompts // fsdp) * fsdp, settings.samples, settings.temperature, settings.top_p, 0)


def sampled_here(config: Config, fsdp: int) -> Sampling | None:
    """The largest batch that the devices which train sample themselves; None if all answers come from servers."""
    rollout = config.rollout
    if rollout.engine == "jax":
        return Sampling(rollout.prompts, rollout.generations, rollout.temperature, rollout.top_p, rollout.top_k)
    return None if config.data.eval is None else evaluation(config, fsdp)


def groups(config: Config, shape: ModelConfig, mesh: Mesh) -> list[int]:
    """Sizes of the groups of devices that may share the products of sampling, the best one first; 0: as in training.

    `rollout.layout=auto` takes the one that moves fewer bytes between devices, and names the other one as well if that
    needs less memory. Raises UserError for a layout that is asked for in vain.
    """
    layout, asked = config.rollout.layout, sampled_here(config, mesh.shape["fsdp"])
    size = _group(shape, mesh)
    if layout == "tensor" and not size:
        raise UserError(
            f"rollout.layout=tensor: {mesh.size} device(s) with mesh.tensor={mesh.shape['tensor']} have no other "
            f"layout for a model with {shape.num_key_value_heads} heads of keys and values: leave it out"
        )
    if layout == "train" or not size or asked is None:
        return [0]
    if layout == "tensor":
        return [size]
    return [size, 0] if bytes_moved(config, shape, mesh, asked, size) < bytes_moved(config, shape, mesh, asked) else [0]


def _group(shape: ModelConfig, mesh: Mesh) -> int:
    """The most devices that heads and MLP width can be split over, a multiple of mesh.tensor; 0: as it is anyway."""
    linear, tensor = shape.linear_attention, mesh.shape["tensor"]
    heads = [] if linear is None else [linear.key_heads, linear.value_heads]
    most = gcd(mesh.size, shape.num_attention_heads, shape.num_key_value_heads, shape.intermediate_size, *heads)
    return most if most % tensor == 0 and mesh.size > tensor else 0


def bytes_moved(config: Config, shape: ModelConfig, mesh: Mesh, asked: Sampling, group: int = 0) -> float:
    """An estimate of the bytes that reach each device while a batch is sampled, all answers at full length.

    As in training (0): every pass through the layers brings all that other devices store. In groups: everything once.
    Both: two sums per layer and token of vectors of the hidden size, over the devices that share a product.
    """
    fsdp, tensor, width = mesh.shape["fsdp"], mesh.shape["tensor"], jnp.dtype(config.model.compute_dtype).itemsize
    prompt, answer = config.data.max_prompt_length, config.rollout.max_new_tokens
    passes = (1 + answer) * -(-asked.rows // (config.rollout.slots or asked.rows))
    shapes = CausalLM(shape).abstract_params()["layers"]
    weights = sum(prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) * width
    together = group or tensor
    tokens = (asked.prompts * prompt + asked.rows * answer) * together / mesh.size
    sums = 2 * shape.num_hidden_layers * tokens * shape.hidden_size * width * 2 * (together - 1) / together
    return sums + (weights / group if group else passes * weights / tensor * (fsdp - 1) / fsdp)


def copy_bytes(model: CausalLM, group: int) -> int:
    """Bytes per device of the weights that are laid out for sampling; the rest is so few that it is not counted."""
    assert model.mesh is not None
    table, mesh, width = AxisTable(), decoding_mesh(model.mesh, group), jnp.dtype(model.compute_dtype).itemsize
    found = 0
    is_names = lambda node: isinstance(node, tuple)
    for axes, leaf in zip(
        jax.tree.leaves(model.logical_axes(), is_leaf=is_names), jax.tree.leaves(model.abstract_params()), strict=True
    ):
        spec = table.spec(axes)
        if spec != table.gathered.spec(axes):
            found += width * prod(-(-size // ways(mesh, on)) for size, on in zip(leaf.shape, spec, strict=True))
    return found
