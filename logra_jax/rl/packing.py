"""Several answers in one row: which row each gets, decided on the host, and how a pass reads its rows on the devices.

An answer here is a prompt with its completion. Its last token is no input of the model, so it takes prompt +
completion - 1 slots. A pass takes one row on each device.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from logra_jax._shapes import Array, Bool, Float, Int


class Packing(NamedTuple):
    """What lies where in the packed rows of a batch; arrays of numpy or of jax.

    source: for every pass, device and slot the place of its token in the flattened padded tokens `[n, p + c]`, or -1.
    There are as many passes as could be needed, so that the shape does not depend on lengths. passes: how many of
    them hold anything, int32.
    """

    source: Int[Array, "most devices row"] | Int[np.ndarray, "most devices row"]
    passes: Int[Array, ""] | Int[np.ndarray, ""]


def row_width(budget: int, longest: int) -> int:
    """Slots of a row: those of the longest answers, of which as many are taken as the token budget has room for.

    A row of that width that has no room for one more answer holds at least as many answers, so that packed rows never
    have more slots than rows of their own, of `longest` slots each.
    """
    return budget // longest * longest


def first_fit(sizes: Int[np.ndarray, " n"], width: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """(row, first slot) of each item: the largest first, each into the first row with room for it.

    Equal sizes keep their order. Items of size 0 get row -1. Raises ValueError for an item larger than a row.
    """
    if sizes.size and sizes.max() > width:
        raise ValueError(f"{sizes.max()} tokens do not fit a row of {width}")
    rows, starts = np.full_like(sizes, -1), np.zeros_like(sizes)
    free = np.full(sizes.size, width)
    for item in np.argsort(-sizes, kind="stable"):
        size = sizes[item]
        if size:
            row = np.argmax(free >= size)
            rows[item], starts[item] = row, width - free[row]
            free[row] -= size
    return rows, starts


def pack(
    prompt_lengths: Int[np.ndarray, " n"],
    lengths: Int[np.ndarray, " n"],
    valid: Bool[np.ndarray, " n"],
    *,
    prompt_width: int,
    width: int,
    row: int,
    devices: int,
) -> Packing:
    """Packed rows for the answers of a batch, in numpy; the same for the same lengths.

    Answers that are not valid or have no token teach nothing and are left out. Passes are filled in order, one row
    per device; the last may leave devices without work.

    Args:
      prompt_lengths, lengths: tokens of prompts and completions.
      valid: rows that count.
      prompt_width: P, the width of the padded prompts.
      width: P + C, of prompts and completions.
      row: slots of a row; see `row_width`.
      devices: rows of a pass; must divide n.
    """
    count = len(lengths)
    sizes = np.where(valid & (lengths > 0), prompt_lengths + lengths - 1, 0).astype(np.int64)
    rows, starts = first_fit(sizes, row)
    source = np.full((count, row), -1, np.int32)
    for answer in np.flatnonzero(sizes):
        first, size = starts[answer], sizes[answer]
        begin = answer * width + prompt_width - prompt_lengths[answer]
        source[rows[answer], first : first + size] = np.arange(begin, begin + size)
    passes = -(-(int(rows.max(initial=-1)) + 1) // devices)
    return Packing(source.reshape(count // devices, devices, row), np.asarray(passes, np.int32))


class Slots(NamedTuple):
    """The slots of packed rows: which token each holds, and with it what belongs to the token that follows.

    real: holds a token; answer: its row in the padded batch, column: its column there, both 0 where there is none.
    learns: the next token is one of the completion, so it is predicted here and learnt from.
    """

    real: Bool[Array, "b s"]
    answer: Int[Array, "b s"]
    column: Int[Array, "b s"]
    learns: Bool[Array, "b s"]
    prompt_width: int

    @property
    def segments(self) -> Int[Array, "b s"]:
        """Numbers that tell the answers of a row apart, 0 at padding."""
        return jnp.where(self.real, self.answer + 1, 0)

    def of_answer(self, values: Array) -> Array:
        """The number, of `[n]`, that belongs to each slot's answer."""
        return values[self.answer]

    def of_completion(self, values: Array) -> Array:
        """The number, of `[n, c]`, of the token that follows; arbitrary where that is not in the completion."""
        return values[self.answer, jnp.maximum(self._following, 0)]

    def means(self, values: Float[Array, "b s"], mask: Bool[Array, "b s"], count: int) -> Float[Array, " n"]:
        """Means over the masked slots of each of `count` answers; 0 where there are none."""
        total = lambda x: jnp.zeros(count, jnp.float32).at[self.answer].add(jnp.where(mask, x, 0.0))
        return total(values) / jnp.maximum(total(jnp.ones(values.shape, jnp.float32)), 1.0)

    def put(self, values: Float[Array, "b s"], into: Float[Array, "n c"]) -> Float[Array, "n c"]:
        """The opposite of `of_completion`: `into` with the values of the tokens that are learnt from."""
        column = jnp.where(self.learns, self._following, into.shape[1])
        return into.at[self.answer, column].set(values, mode="drop")

    @property
    def _following(self) -> Int[Array, "b s"]:
        return self.column + 1 - self.prompt_width


def read_slots(source: Int[Array, "b s"], width: int, prompt_width: int) -> Slots:
    """The slots of one pass of a `Packing` for padded rows of P + C = `width` columns."""
    real = source >= 0
    answer, column = jnp.divmod(jnp.maximum(source, 0), width)
    return Slots(real, answer, column, real & (column + 1 >= prompt_width), prompt_width)
