"""The rows to learn from, and the passes that are made over them: some rows at a time, or packed rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.rl.packing import Packing
from logra_jax.rl.rollout import completion_mask

Tree = Any


class Batch(NamedTuple):
    """Rows to learn from; N = prompts x generations, P and C the widths of prompts and completions.

    ``old_logprobs`` is needed only when a batch serves several updates, ``ref_logprobs`` only with a reference KL.
    ``probe`` holds the row numbers whose responses predict the KL; ``check`` says whether it is also measured.
    ``packing`` says which answers share a row in the passes; without it each has its own.
    """

    tokens: Int[Array, "n t"]
    prompt_lengths: Int[Array, " n"]
    lengths: Int[Array, " n"]
    stopped: Bool[Array, " n"]
    valid: Bool[Array, " n"]
    advantages: Float[Array, " n"]
    rollout_logprobs: Float[Array, "n c"]
    probe: Int[Array, " r"]
    check: Bool[Array, ""]
    old_logprobs: Float[Array, "n c"] | None = None
    ref_logprobs: Float[Array, "n c"] | None = None
    packing: Packing | None = None


def valid_tokens(batch: Batch) -> Bool[Array, "n c"]:
    """The completion tokens that are learnt from."""
    return completion_mask(batch.lengths, batch.rollout_logprobs.shape[1]) & batch.valid[:, None]


def row_fields(batch: Batch) -> dict[str, Any]:
    """The arrays that have one entry per row, by name."""
    fields = batch._asdict()
    return {k: v for k, v in fields.items() if k not in ("probe", "check", "packing") and v is not None}


def take(batch: Batch, rows: Int[Array, " r"]) -> Batch:
    """The batch with these rows alone."""
    return batch._replace(**{k: v[rows] for k, v in row_fields(batch).items()})


def split_rows(batch: Batch, micro_batch: int) -> dict[str, Array]:
    """The fields of the rows, ``[micro-batches, rows of each, ...]``."""
    count = batch.tokens.shape[0] // micro_batch if micro_batch else 1
    # Row i goes to micro-batch i mod count, so that a batch split over devices stays split in every micro-batch.
    return {k: v.reshape(-1, count, *v.shape[1:]).swapaxes(0, 1) for k, v in row_fields(batch).items()}


def add_trees(one: Tree, other: Tree) -> Tree:
    """The sum of two trees, leaf by leaf."""
    return jax.tree.map(jnp.add, one, other)


def over_micro_batches(
    function: Callable, batch: Batch, micro_batch: int, initial: Tree, add: Callable = add_trees
) -> Tree:
    """Sum, by ``add``, of ``function(rows)`` over micro-batches, accumulated in place in the carry of a scan."""
    if micro_batch in (0, batch.tokens.shape[0]):
        return function(batch)
    split = split_rows(batch, micro_batch)

    def body(total: Tree, rows: dict[str, Any]) -> tuple[Tree, None]:
        return add(total, function(batch._replace(**rows))), None

    return jax.lax.scan(body, initial, split)[0]


def turn_size(rows: int, limit: int) -> int:
    """The largest number of rows per turn that divides ``rows`` and is at most ``limit`` (0: all at once)."""
    return max(size for size in range(1, min(limit or rows, rows) + 1) if rows % size == 0)


def over_packed_rows(function: Callable, batch: Batch, initial: Tree, add: Callable = add_trees) -> Tree:
    """Sum, by ``add``, of ``function(number)`` over the passes that hold anything: the others cost nothing."""
    assert batch.packing is not None

    def body(number: Array, total: Tree) -> Tree:
        return add(total, function(number))

    return jax.lax.fori_loop(0, batch.packing.passes, body, initial)


def padding_share(batch: Batch) -> Float[Array, ""]:
    """Share of the tokens put through the model that belong to no answer that counts."""
    used = jnp.where(batch.valid & (batch.lengths > 0), batch.prompt_lengths + batch.lengths - 1, 0)
    if batch.packing is None:
        slots = jnp.float32(batch.tokens.size)
    else:
        slots = batch.packing.passes.astype(jnp.float32) * batch.packing.source[0].size
    return 1.0 - jnp.sum(used, dtype=jnp.float32) / jnp.maximum(slots, 1.0)
