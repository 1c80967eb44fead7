"""Sampling with fewer places than rows: when a row ends, the next one that waits takes its place.

Prompts run through the model in groups of as many as fill all places, each once: the n rows of a prompt start from the
same cache. All but its last token, that is, which is the first one fed to the decoding loop. The places of each device
that rows are split over, a lane, serve its own prompts, so that no cache goes from device to device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax._shapes import Array, Float, Int
from logra_jax.models.cache import Cache
from logra_jax.rl.decoding import Decoder, Requests, Rows, put_prompts, spans

EMPTY_SHARE = 16  # of so many places one is empty before waiting rows are let in, all in one go


class Waiting(NamedTuple):
    """Rows in flight and the queues. number: of the row in a place, in its lane's order; the lane's count for none.

    start: turn of a place's row at its first token. upcoming: the number that comes next. prefilled: groups of prompts
    so far; prompts: cache of the newest. tokens, logprobs: of the rows that ended.
    """

    rows: Rows
    number: Int[Array, "lanes places"]
    start: Int[Array, " s"]
    upcoming: Int[Array, " lanes"]
    prefilled: Int[Array, ""]
    prompts: Cache
    tokens: Int[Array, "lanes n c"]
    logprobs: Float[Array, "lanes n c"]


def refill_group(places: int, prompts: int, n: int) -> int:
    """How many of the prompts run at once: as many as fill all places with n rows each."""
    return min(-(-places // n), prompts)


@dataclass(frozen=True)
class Refill:
    """The loop for `places` rows at a time, of n per prompt; lanes divides places and prompts."""

    decoder: Decoder
    requests: Requests
    n: int
    places: int
    lanes: int

    @property
    def _group(self) -> int:
        """Prompts of a lane that run at once."""
        return refill_group(self.places // self.lanes, self._prompts, self.n)

    @property
    def _prompts(self) -> int:
        return len(self.requests.lengths) // self.lanes

    @property
    def _count(self) -> int:
        """Rows of a lane."""
        return self._prompts * self.n

    @property
    def _groups(self) -> int:
        return -(-self._prompts // self._group)

    def run(self) -> tuple[Array, Array]:
        """Tokens and log-probabilities [N, C]."""
        decoder, (_, width) = self.decoder, self.requests.tokens.shape
        shape = (self.lanes, self._count, decoder.width)
        state = Waiting(
            rows=decoder.empty(self.places, width),
            number=jnp.full((self.lanes, self.places // self.lanes), self._count),
            start=jnp.zeros((self.places,), jnp.int32),
            upcoming=jnp.zeros((self.lanes,), jnp.int32),
            prefilled=jnp.int32(0),
            prompts=decoder.empty_cache(self.lanes * self._group, width),
            tokens=jnp.full(shape, decoder.pad_id, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
        )
        # One loop after the other: a branch within a loop would copy the cache.
        for span in spans(decoder.width):
            state = self._rounds(state, span)
        return state.tokens.reshape(-1, decoder.width), state.logprobs.reshape(-1, decoder.width)

    def _rounds(self, state: Waiting, span: int) -> Waiting:
        """Rows go, others come, and all are decoded until others can; to the end, or to the end of the span."""
        last = span == self.decoder.width

        def unfinished(state: Waiting) -> Array:
            waits = jnp.any(state.number < self._count) | jnp.any(state.upcoming < self._count)
            return waits if last else waits & (state.rows.turn <= span)

        def one(state: Waiting) -> Waiting:
            state = self._retire(state)
            known = state.prefilled, state.prompts
            prefilled, prompts = jax.lax.cond(self._exhausted(state), self._prefill, lambda *known: known, *known)
            return self._decode(self._admit(state._replace(prefilled=prefilled, prompts=prompts)), span)

        return jax.lax.while_loop(unfinished, one, state)

    def _lanes(self, x: Array) -> Array:
        return x.reshape(self.lanes, -1, *x.shape[1:])

    def _known(self, state: Waiting) -> Array:
        """Rows of a lane whose prompts ran."""
        return jnp.minimum(state.prefilled * (self._group * self.n), self._count)

    def _exhausted(self, state: Waiting) -> Array:
        """Whether the next group of prompts may take the place of the newest."""
        return (state.prefilled < self._groups) & jnp.all(state.upcoming >= self._known(state))

    def _prefill(self, prefilled: Array, _old: Cache) -> tuple[Array, Cache]:
        """The next group of prompts through the model."""

        def cut(x: Array) -> Array:
            # Filled up with copies of the last prompt, so that all groups are of one size.
            extra = self._groups * self._group - self._prompts
            x = jnp.pad(self._lanes(x), ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 1)), mode="edge")
            x = jax.lax.dynamic_slice_in_dim(x, prefilled * self._group, self._group, 1)
            return x.reshape(-1, *x.shape[2:])

        tokens, lengths = cut(self.requests.tokens), cut(self.requests.lengths)
        cache = self.decoder.prefill(tokens, lengths, last=False)[1]
        return prefilled + 1, cache

    def _admit(self, state: Waiting) -> Waiting:
        """Rows that wait into empty places, as far as both go."""
        rows, requests, free = state.rows, self.requests, self._lanes(state.rows.done)
        chosen = state.upcoming[:, None] + jnp.cumsum(free, axis=1, dtype=jnp.int32) - 1
        taken = free & (chosen < self._known(state))
        new, row = taken.reshape(-1), jnp.minimum(chosen, self._count - 1)
        prompt = row // self.n
        in_group = jnp.clip(prompt - (state.prefilled - 1) * self._group, 0, self._group - 1)

        def where_new(axis: int, found: Array, old: Array) -> Array:
            shape = [1] * old.ndim
            shape[axis] = -1
            return jnp.where(new.reshape(shape), found, old)

        def pick(axis: int, x: Array, index: Array) -> Array:
            """For each place what its lane's part of `x` has at `index`."""
            before, after = x.shape[:axis], x.shape[axis + 1 :]
            own = x.reshape(*before, self.lanes, -1, *after)
            take = jax.vmap(lambda own, at: jnp.take(own, at, axis=axis), in_axes=(axis, 0), out_axes=axis)
            return take(own, index).reshape(*before, -1, *after)

        cache = rows.cache._replace(valid=rows.cache.valid & ~new[:, None])
        keys = where_new(0, pick(0, jax.random.key_data(requests.keys), row), jax.random.key_data(rows.keys))
        rows = rows._replace(
            newest=where_new(0, pick(0, requests.tokens[:, -1], prompt), rows.newest),
            done=rows.done & ~new,
            keys=jax.random.wrap_key_data(keys),
            limits=where_new(0, pick(0, requests.limits, row), rows.limits),
            lengths=jnp.where(new, 0, rows.lengths),
            cache=put_prompts(
                lambda axis, own, old: where_new(axis, pick(axis, own, in_group), old), cache, state.prompts
            ),
        )
        return state._replace(
            rows=rows,
            number=jnp.where(taken, chosen, state.number),
            start=jnp.where(new, rows.turn, state.start),
            upcoming=state.upcoming + jnp.sum(taken, axis=1, dtype=jnp.int32),
        )

    def _retire(self, state: Waiting) -> Waiting:
        """Write down the rows that ended, from their first token on."""
        rows, width, done = state.rows, self.decoder.width, self._lanes(state.rows.done)
        columns = jnp.arange(width)[None]
        turned, own = (state.start[:, None] + columns) % width, columns < rows.lengths[:, None]
        index = jnp.where(done, state.number, self._count)  # places whose row goes on write nothing

        def put(to: Array, found: Array, fill: Any) -> Array:
            found = self._lanes(jnp.where(own, jnp.take_along_axis(found, turned, axis=1), fill))
            return jax.vmap(lambda to, i, x: to.at[i].set(x, mode="drop"))(to, index, found)

        return state._replace(
            number=jnp.where(done, self._count, state.number),
            tokens=put(state.tokens, rows.tokens, self.decoder.pad_id),
            logprobs=put(state.logprobs, rows.logprobs, 0.0),
        )

    def _decode(self, state: Waiting, span: int) -> Waiting:
        """Turns until rows can be let in, all have ended, or the next tokens lie behind the span."""
        patience = max(self.places // self.lanes // EMPTY_SHARE, 1)

        def going(rows: Rows) -> Array:
            ready = self._known(state) - state.upcoming
            ready = jnp.where(self._exhausted(state), self._count - self._known(state), ready)
            free = jnp.sum(self._lanes(rows.done), axis=1, dtype=jnp.int32)
            admits = jnp.any((ready > 0) & (free >= jnp.minimum(patience, ready)))
            going = ~jnp.all(rows.done) & ~admits
            return going if span == self.decoder.width else going & (rows.turn <= span)

        return state._replace(rows=jax.lax.while_loop(going, lambda rows: self.decoder.step(rows, span), state.rows))
