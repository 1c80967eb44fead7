"""The decoding loop of the sampler: one token per row and turn, all rows at once.

All rows in flight write their keys and values at the same slot of the cache, whatever their age: a key carries its own
position, and the mask says which slots are a row's own. So rows may start at any turn (`refill.py`). The slots of the
prompts come first, P of them; those of the completions, C, are a ring: a row that comes round to its own has ended.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.mesh import AxisTable, constrain, decoding_mesh
from logra_jax.models.cache import Cache
from logra_jax.models.decoder import CausalLM

SHORTEST_SPAN = 128  # completion slots up to which reading fewer is not worth another program
MOST_SPANS = 4


class Requests(NamedTuple):
    """B prompts, left-padded to P, and of their N = B * n rows the keys and the most tokens, at least 1."""

    tokens: Int[Array, "b p"]
    lengths: Int[Array, " b"]
    keys: Any
    limits: Int[Array, " n"]


class Rows(NamedTuple):
    """The rows in flight, S of them; C columns, of which `turn % C` gets the next tokens.

    turn: tokens that were drawn one after the other. done: ended, or no row at all. lengths: tokens so far.
    """

    turn: Int[Array, ""]
    newest: Int[Array, " s"]
    done: Bool[Array, " s"]
    keys: Any
    limits: Int[Array, " s"]
    lengths: Int[Array, " s"]
    tokens: Int[Array, "s c"]
    logprobs: Float[Array, "s c"]
    cache: Cache


@dataclass(frozen=True)
class Decoder:
    """What a turn takes. draw: hidden states [S, d] and keys [S] to tokens and their log-probabilities."""

    model: CausalLM
    params: Any
    draw: Callable[[Array, Any], tuple[Array, Array]]
    is_end: Callable[[Array], Array]
    pad_id: int
    width: int
    cache_dtype: str | None

    def together(self, requests: Requests, n: int) -> tuple[Array, Array]:
        """Tokens and log-probabilities [N, C], all rows side by side."""
        # The prompt runs once per prompt, through a cache of its own width: its attention then is P x P, not P x (P +
        # C).
        hidden, cache = self.prefill(requests.tokens, requests.lengths)
        rows = self.empty(len(requests.limits), requests.tokens.shape[1])
        rows = rows._replace(
            turn=jnp.int32(0),
            done=jnp.zeros_like(rows.done),
            keys=requests.keys,
            limits=requests.limits,
            cache=put_prompts(lambda axis, own, _: repeat(own, n, axis), rows.cache, cache),
        )
        rows = self._record(rows, repeat(hidden[:, -1], n, 0))
        for span in spans(self.width):
            rows = self._until(rows, span)
        return rows.tokens, rows.logprobs

    def prefill(
        self, tokens: Int[Array, "b p"], lengths: Int[Array, " b"], last: bool = True
    ) -> tuple[Float[Array, "b p d"], Cache]:
        """Hidden states and cache of prompts; without their last token if `last` is False."""
        batch, width = tokens.shape
        real = jnp.arange(width)[None, :] >= width - lengths[:, None]
        real = real if last else real.at[:, -1].set(False)
        return self.model.hidden(self.params, tokens, real, cache=self.empty_cache(batch, width))

    def empty_cache(self, rows: int, slots: int | tuple[int, ...]) -> Cache:
        """A cache of the sampler's number format."""
        return self.model.init_cache(rows, slots, self.cache_dtype, apart=True)

    def empty(self, places: int, prompt: int) -> Rows:
        """`places` without a row, and with a cache in parts, that end where the spans do."""
        ends = [prompt + span for span in spans(self.width)]
        parts = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        whole = lambda x: constrain(x, self.model.mesh, "batch", *(None for _ in x.shape[1:]))
        zeros = jnp.zeros((places,), jnp.int32)
        return Rows(
            turn=jnp.int32(1),
            newest=whole(zeros),
            done=whole(jnp.ones((places,), jnp.bool_)),
            keys=jax.vmap(jax.random.key)(zeros),
            limits=whole(zeros),
            lengths=whole(zeros),
            tokens=whole(jnp.full((places, self.width), self.pad_id, jnp.int32)),
            logprobs=whole(jnp.zeros((places, self.width), jnp.float32)),
            cache=self.empty_cache(places, parts),
        )

    def step(self, rows: Rows, span: int) -> Rows:
        """Feed the newest tokens and draw the next, reading the first `span` slots of the ring."""
        prompt = rows.cache.valid.shape[1] - self.width
        cache = rows.cache._replace(slot=prompt + (rows.turn - 1) % self.width)
        hidden, cache = self.model.hidden(self.params, rows.newest[:, None], cache=cache, reach=prompt + span)
        return self._record(rows._replace(cache=cache), hidden[:, 0])

    def _until(self, rows: Rows, span: int) -> Rows:
        """Turns until all rows have ended, or the next tokens lie behind the span."""
        going = lambda rows: ~jnp.all(rows.done) & (rows.turn <= span)
        return jax.lax.while_loop(going, lambda rows: self.step(rows, span), rows)

    def _record(self, rows: Rows, hidden: Float[Array, "s d"]) -> Rows:
        """Draw the next token of every row from the hidden states before it, and write it down."""
        # A token's place in its text is the number of tokens before it.
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.cache.lengths)
        token, logprob = self.draw(hidden, keys)
        lengths = jnp.where(rows.done, rows.lengths, rows.lengths + 1)
        column = rows.turn % self.width

        def write(to: Array, new: Array) -> Array:
            # What ended stays as it is until it is taken away.
            old = jax.lax.dynamic_slice_in_dim(to, column, 1, axis=1)
            new = jnp.where(rows.done[:, None], old, new[:, None])
            return jax.lax.dynamic_update_slice_in_dim(to, new, column, axis=1)

        return rows._replace(
            turn=rows.turn + 1,
            newest=token,
            done=rows.done | self.is_end(token) | (lengths >= rows.limits),
            lengths=lengths,
            tokens=write(rows.tokens, token),
            logprobs=write(rows.logprobs, logprob),
        )


def in_groups(model: CausalLM, params: Any, tensor: int) -> tuple[CausalLM, Any]:
    """The model on groups of `tensor` of its mesh's devices, and a copy of its parameters laid out for that.

    Each group has all weights, split by heads, MLP width and vocabulary, so that a pass puts none of them together; the
    matrices of its products are in the compute dtype. Groups share the rows.
    """
    assert model.mesh is not None
    table, mesh = AxisTable(), decoding_mesh(model.mesh, tensor)
    # Rows for columns within a group first, then the parts of all groups: the compiler finds no such way by itself, and
    # puts the whole stack together on each device.
    rows = ("tensor", "decode", "data")
    between = replace(table, embed="data", heads_in=rows, mlp_in=rows)

    def move(axes: tuple[str | None, ...], leaf: Any) -> Any:
        if table.spec(axes) != table.gathered.spec(axes):  # a matrix: cast before it travels
            leaf = constrain(leaf.astype(model.compute_dtype), model.mesh, *axes)
            leaf = constrain(leaf, mesh, *axes, table=between)
        return constrain(leaf, mesh, *axes)

    moved = jax.tree.map(move, model.logical_axes(), params, is_leaf=lambda node: isinstance(node, tuple))
    return model.replace(mesh=mesh), moved


def spans(width: int) -> list[int]:
    """How many slots of the ring are read, in turn: the last is all, each of the others about half of the next."""
    found = [width]
    while len(found) < MOST_SPANS and found[0] > SHORTEST_SPAN:
        found.insert(0, -(-found[0] // 128) * 64)
    return found


def put_prompts(change: Callable[[int, Array, Array], Array], cache: Cache, prompts: Cache) -> Cache:
    """`cache` with `change(axis of rows, prompts' array, cache's array)` where the prompts' slots are, and states."""

    def put(axis: int, old: Any, own: Any) -> Any:
        if isinstance(old, list):
            return [put(0, *each) for each in zip(old, own, strict=True)]
        if isinstance(old, tuple):
            return (put(axis, old[0], own), *old[1:])
        if old is None:
            return None
        part = tuple(slice(None if i == axis else extent) for i, extent in enumerate(own.shape))
        return old.at[part].set(change(axis, own, old[part]))

    axes = {"k": 1, "v": 1, "window": 1, "state": 1, "valid": 0, "lengths": 0}
    found = {name: put(axis, getattr(cache, name), getattr(prompts, name)) for name, axis in axes.items()}
    return cache._replace(**found)


def repeat(x: Array, n: int, axis: int) -> Array:
    """Each entry along `axis` n times in a row; a broadcast, so that rows stay on their devices."""
    wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], n, *x.shape[axis + 1 :]))
    return wide.reshape(*x.shape[:axis], x.shape[axis] * n, *x.shape[axis + 1 :])
