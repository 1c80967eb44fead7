"""What turns rows into log-probabilities, and the program that does only that."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax._shapes import Array, Float, Int
from logra_jax.mesh import constrain
from logra_jax.optim import HiddenHead, merge
from logra_jax.rl.batch import Batch, row_fields, split_rows
from logra_jax.rl.loss import token_logprobs
from logra_jax.rl.packing import Slots, read_slots
from logra_jax.rl.rollout import attention_mask

Tree = Any


class Policy(NamedTuple):
    """What turns rows into log-probabilities. ``vocab_size`` ids exist; ids past it are padding of the table."""

    model: Any
    vocab_size: int
    temperature: float
    prompt_width: int

    def hidden_head(self, params: Tree, rows: Batch) -> HiddenHead:
        """Final hidden states that predict each completion token ``[n, c, d]`` and the output head ``[d, v]``."""
        start, width = self.prompt_width, rows.tokens.shape[1] - self.prompt_width
        mask = attention_mask(rows.prompt_lengths, rows.lengths, start, width)
        # The last token predicts nothing, but XLA cannot tile some products of, say, 2 x 4095 tokens for a GPU.
        hidden = self.model.hidden(params, rows.tokens, mask)[:, start - 1 : -1]
        return HiddenHead(hidden, self._head(params, hidden.dtype))

    def _head(self, params: Tree, dtype: Any) -> Float[Array, "d v"]:
        head = self.model.head(params)[:, : self.vocab_size].astype(dtype)
        return constrain(head, self.model.mesh, None, "logits")

    def logprobs(self, params: Tree, rows: Batch) -> tuple[Float[Array, "n c"], Float[Array, "n c"]]:
        """Log-probability at the sampling temperature and entropy (nats) of every completion position."""
        hidden, head = self.hidden_head(params, rows)
        return token_logprobs(hidden, head, rows.tokens[:, self.prompt_width :], self.temperature, mesh=self.model.mesh)

    def packed_logprobs(
        self, params: Tree, tokens: Int[Array, "n t"], slots: Slots
    ) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
        """The same for the token that follows each slot of packed rows; arbitrary where nothing is learnt from it."""
        inputs, targets = tokens[slots.answer, slots.column], tokens[slots.answer, slots.column + 1]
        hidden = self.model.hidden(params, inputs, segments=slots.segments, reach=tokens.shape[1] - 1)
        head = self._head(params, hidden.dtype)
        # What is learnt from comes first, so that the chunks of the rest are left out.
        order = jnp.argsort(~slots.learns, axis=1)
        sort = lambda x, order: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)
        found = token_logprobs(
            sort(hidden, order), head, sort(targets, order), self.temperature, mesh=self.model.mesh,
            wanted=sort(slots.learns, order),
        )  # fmt: skip
        logprobs, entropy = (sort(x, jnp.argsort(order, axis=1)) for x in found)
        return logprobs, entropy

    def everywhere(self, batch: Batch) -> Batch:
        """The batch with its rows on every device: packed rows are put together from all of them."""
        fields = row_fields(batch).items()
        rows: dict[str, Any] = {k: constrain(v, self.model.mesh, *(None,) * v.ndim) for k, v in fields}
        return batch._replace(**rows)

    def slots(self, batch: Batch, number: Int[Array, ""]) -> Slots:
        """The slots of a pass over packed rows."""
        assert batch.packing is not None
        source = constrain(batch.packing.source[number], self.model.mesh, "batch", None)
        return read_slots(source, batch.tokens.shape[1], self.prompt_width)


def make_score(policy: Policy, micro_batch: int) -> Callable[[Tree, Tree, Batch], Float[Array, "n c"]]:
    """Jitted ``score(train, frozen, batch)``: log-probabilities ``[n, c]`` of the rows under other weights."""

    def packed_score(params: Tree, batch: Batch) -> Float[Array, "n c"]:
        assert batch.packing is not None
        whole = policy.everywhere(batch)

        def body(number: Array, scored: Array) -> Array:
            slots = policy.slots(whole, number)
            return slots.put(policy.packed_logprobs(params, whole.tokens, slots)[0], scored)

        scored = jax.lax.fori_loop(0, batch.packing.passes, body, jnp.zeros_like(whole.rollout_logprobs))
        return constrain(scored, policy.model.mesh, "batch", None)

    def score(train: Tree, frozen: Tree, batch: Batch) -> Float[Array, "n c"]:
        params = merge(train, frozen)
        if batch.packing is not None:
            return packed_score(params, batch)
        split = split_rows(batch, micro_batch)
        scored = jax.lax.map(lambda rows: policy.logprobs(params, batch._replace(**rows))[0], split)
        return constrain(scored.swapaxes(0, 1).reshape(batch.rollout_logprobs.shape), policy.model.mesh, "batch", None)

    return jax.jit(score)
