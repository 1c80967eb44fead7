"""Sampling: prompts in, tokens with their exact log-probabilities out, as one jitted program.

A batch of N = prompts * n rows has row = prompt * n + sample. Prompts are left-padded to P, completions
right-padded to C, and every mask follows from lengths: padding is never found by comparing ids, because a pad
id may be an end token or an ordinary one.
"""

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.errors import UserError
from logra_jax.mesh import AxisTable, constrain, ways
from logra_jax.models.decoder import CausalLM, check_dtype
from logra_jax.rl.decoding import Decoder, Requests, in_groups, repeat
from logra_jax.rl.loss import LOGIT_FLOOR, scaled_logits
from logra_jax.rl.refill import Refill

TOP_P_ROUNDING = 1e-6  # a float32 sum this close below top_p has reached it


class Rollout(NamedTuple):
    """What was sampled; N rows, P + C columns.

    tokens: int32 [N, P + C], pad id outside the real tokens; prompt_lengths, lengths: int32 [N], the latter
    counting the first end token; logprobs: float32 [N, C], nats, of softmax(logits / temperature) before
    top-k and top-p, 0 past the length; stopped: bool [N], ended by an end token rather than cut off; versions:
    int32 [N], updates before the weights that gave the answers, where whoever sampled them knows that.
    """

    tokens: Int[Array, "n t"]
    prompt_lengths: Int[Array, " n"]
    lengths: Int[Array, " n"]
    logprobs: Float[Array, "n c"]
    stopped: Bool[Array, " n"]
    versions: Int[Array, " n"] | None = None


def completion_mask(lengths: Int[Array, " n"], width: int) -> Bool[Array, "n c"]:
    """True at the first `lengths` of `width` completion columns: the tokens that are trained on."""
    return jnp.arange(width)[None, :] < lengths[:, None]


def attention_mask(
    prompt_lengths: Int[Array, " n"], lengths: Int[Array, " n"], prompt_width: int, width: int
) -> Bool[Array, "n t"]:
    """True at the real tokens of [N, prompt_width + width]: left-padded prompt, right-padded completion."""
    prompt = jnp.arange(prompt_width)[None, :] >= prompt_width - prompt_lengths[:, None]
    return jnp.concatenate([prompt, completion_mask(lengths, width)], axis=1)


def completion_lengths(
    completions: Int[Array, "n c"], end_ids: tuple[int, ...]
) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """(tokens up to and with the first of `end_ids`, else C; whether there was one), int32 and bool [N]."""
    ends = _is_end(completions, end_ids)
    stopped = jnp.any(ends, axis=1)
    first = jnp.argmax(ends, axis=1).astype(jnp.int32)
    return jnp.where(stopped, first + 1, completions.shape[1]).astype(jnp.int32), stopped


def kept_tokens(logits: Float[Array, "*rows v"], top_k: int | None, top_p: float | None) -> Bool[Array, "*rows v"]:
    """Which ids may be sampled: the top_k likeliest and of these the nucleus of mass top_p (0: off).

    The nucleus holds the tokens before which less than top_p has been collected, likeliest first: never
    empty, and no token more where the sum hits top_p exactly. Of equal logits the lower id counts as
    likelier.
    """
    order = jnp.argsort(logits, axis=-1, descending=True)
    rank = jnp.argsort(order, axis=-1)
    kept = jnp.ones(logits.shape, jnp.bool_)
    if top_k:
        kept = rank < top_k
    if top_p and top_p < 1.0:
        ranked = jnp.take_along_axis(jnp.where(kept, logits, LOGIT_FLOOR), order, axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1)
        # The sum before a token is the one up to its predecessor; taking the token off its own sum would
        # round.
        before = jnp.concatenate([jnp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
        inside = jnp.take_along_axis(before < top_p - TOP_P_ROUNDING, rank, axis=-1)
        kept = kept & (inside | (rank == 0))
    return kept


@dataclass(frozen=True)
class Sampler:
    """Samples completions from a model; hashable, so one compiled program serves all with equal settings.

    model: a `CausalLM`. max_new_tokens: C, at least 1. end_ids: every id that ends a completion. vocab_size:
    ids from it on (padding of the embedding table) are never sampled, and the distribution is over the ids
    below it. pad_id: fills the columns past a completion's end. temperature: divides the logits; 0 takes the
    likeliest token, without dividing, and its log-probability at temperature 1. greedy: the likeliest token
    at any temperature. top_k, top_p: see `kept_tokens`; 0 or None is off, as is 1 for top_p. slots: rows that are
    sampled at a time, and have a cache; 0 or None for all. cache_dtype: of keys and values, by default the model's
    compute dtype. tensor: on a model's mesh, devices that share each product while sampling, see `in_groups`, which is
    a copy of the weights per call; 0 for the mesh as it is. Raises UserError for values out of range.
    """

    model: CausalLM
    _: KW_ONLY
    max_new_tokens: int
    end_ids: tuple[int, ...]
    vocab_size: int
    pad_id: int
    temperature: float
    top_k: int | None = 0
    top_p: float | None = 1.0
    greedy: bool = False
    slots: int | None = 0
    cache_dtype: str | None = None
    tensor: int = 0

    def __post_init__(self) -> None:
        table = self.model.config.vocab_size
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}: at least one token must be sampled")
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise UserError(f"temperature is {self.temperature}: give a number >= 0 (0 is greedy)")
        if not 1 <= self.vocab_size <= table:
            raise UserError(f"vocab_size is {self.vocab_size}, but the model has {table} embedding rows")
        if bad := [i for i in self.end_ids if not 0 <= i < self.vocab_size]:
            raise UserError(
                f"end token ids {bad} can never be sampled: the vocabulary has {self.vocab_size} ids; "
                "mend eos_token_id in the model's config.json or generation_config.json"
            )
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: give a count, or 0 for no limit")
        if self.top_p is not None and not 0.0 <= self.top_p <= 1.0:
            raise UserError(f"top_p is {self.top_p}: give a share between 0 and 1 (1 for no limit)")
        if self.slots is not None and self.slots < 0:
            raise UserError(f"slots is {self.slots}: give a count of rows, or 0 for all")
        if self.cache_dtype is not None:
            check_dtype("cache_dtype", self.cache_dtype)
        # The settings in one form each, so that equal samplers compare equal and compile once.
        for name, value in (
            ("end_ids", tuple(sorted({int(i) for i in self.end_ids}))),
            ("top_k", self.top_k or 0),
            ("top_p", self.top_p or 1.0),
            ("slots", self.slots or 0),
            ("greedy", self.greedy or self.temperature == 0.0),
            ("temperature", float(self.temperature) or 1.0),
        ):
            object.__setattr__(self, name, value)

    def generate(
        self,
        params: Any,
        prompt_tokens: Int[np.ndarray, "b p"] | Int[Array, "b p"],
        prompt_lengths: Int[np.ndarray, " b"] | Int[Array, " b"],
        prompt_ids: Int[np.ndarray, " b"] | Int[Array, " b"],
        n: int,
        seed: int,
        update: int,
        limits: Int[np.ndarray, " n"] | Int[Array, " n"] | None = None,
    ) -> Rollout:
        """n completions of each prompt: prompt_tokens int32 [B, P] left-padded, lengths and ids int32 [B].

        The noise of a token depends on (seed, update, prompt id, sample, position of the token in its text)
        alone: not on the other rows, their order, the padding, n, or the devices. A prompt that stands in the
        batch again counts its samples on from n, or its answers would be copies. seed and update lie in [0,
        2^32). limits: int32 [B * n], the most tokens of each row, at least 1; max_new_tokens is a limit too.
        Compiles once per shape of the batch and n; params, seed, update and limits are arguments of the program.
        """
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        numbers = np.asarray([seed, update], np.uint32)
        if limits is None:
            limits = np.full(len(prompt_tokens) * n, self.max_new_tokens, np.int32)
        return _generate(self, params, prompt_tokens, prompt_lengths, prompt_ids, numbers, n, limits)


@functools.partial(jax.jit, static_argnames=("sampler", "n"))
def _generate(
    sampler: Sampler,
    params: Any,
    prompt_tokens: Int[Array, "b p"],
    prompt_lengths: Int[Array, " b"],
    prompt_ids: Int[Array, " b"],
    numbers: Any,
    n: int,
    limits: Int[Array, " n"],
) -> Rollout:
    model, limits = sampler.model.replace(remat="none"), jnp.clip(limits, 1, sampler.max_new_tokens)
    prompts = prompt_tokens, prompt_lengths, prompt_ids
    if sampler.tensor:
        model, params = in_groups(model, params, sampler.tensor)
        # First where the caller's mesh can say so: else it is left to the compiler where arguments lie.
        everywhere = rows_on(sampler.model.mesh, (*prompts, limits), None)
        *prompts, limits = rows_on(model.mesh, everywhere)
    prompt_tokens, prompt_lengths, prompt_ids = prompts
    head = model.head(params)[:, : sampler.vocab_size]
    decoder = Decoder(
        model,
        model.apart(params),
        draw=lambda hidden, keys: _draw(sampler, scaled_logits(hidden, head, sampler.temperature), keys),
        is_end=lambda tokens: _is_end(tokens, sampler.end_ids),
        pad_id=sampler.pad_id,
        width=sampler.max_new_tokens,
        cache_dtype=sampler.cache_dtype,
    )
    requests = Requests(prompt_tokens, prompt_lengths, _row_keys(numbers, prompt_ids, n), limits)
    slots = sampler.slots or len(limits)
    if slots < len(limits):
        # Without a mesh that says so, nothing is known of where rows lie.
        lanes = 1 if model.mesh is None else ways(model.mesh, AxisTable().batch)
        shared = slots % lanes == 0 and len(prompt_tokens) % lanes == 0
        tokens, logprobs = Refill(decoder, requests, n, slots, lanes if shared else 1).run()
    else:
        tokens, logprobs = decoder.together(requests, n)
    lengths, stopped = completion_lengths(tokens, sampler.end_ids)
    found = Rollout(
        tokens=jnp.concatenate([repeat(prompt_tokens, n, 0), tokens], axis=1),
        prompt_lengths=repeat(prompt_lengths, n, 0),
        lengths=jnp.minimum(lengths, limits),
        logprobs=logprobs,
        stopped=stopped & (lengths <= limits),  # what lies behind the limit is padding, which may look like an end
    )
    return rows_on(sampler.model.mesh, rows_on(model.mesh, found)) if sampler.tensor else found


def rows_on(mesh: Mesh | None, tree: Any, axis: str | None = "batch") -> Any:
    """Arrays of rows, split over a mesh's devices as activations are, or whole on each (None)."""
    return jax.tree.map(lambda x: constrain(x, mesh, axis, *(None for _ in x.shape[1:])), tree)


def _row_keys(numbers: Any, prompt_ids: Int[Array, " b"], n: int) -> Any:
    """Keys [B * n]: fold_in(fold_in(fold_in(key(seed), update), prompt id), sample)."""
    base = jax.random.fold_in(jax.random.key(numbers[0]), numbers[1])
    of_sample = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    of_prompt = jax.vmap(lambda i, first: of_sample(jax.random.fold_in(base, i), first + jnp.arange(n)))
    # A batch in which one epoch ends and the next begins may hold a prompt twice.
    again = jnp.tril(prompt_ids[:, None] == prompt_ids[None, :], -1)
    return of_prompt(prompt_ids, n * jnp.sum(again, axis=1, dtype=jnp.int32)).reshape(-1)


def _draw(sampler: Sampler, logits: Float[Array, "n v"], keys: Any) -> tuple[Int[Array, " n"], Float[Array, " n"]]:
    """One token per row and its log-probability; logits are already divided by the temperature."""
    score = logits
    if not sampler.greedy:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32))(keys)
        score = logits + noise
        if sampler.top_k or sampler.top_p != 1.0:
            score = jnp.where(kept_tokens(logits, sampler.top_k, sampler.top_p), score, -jnp.inf)
    # Not `argmax`, which takes ten times as long on a CPU. Of equal scores the lower id, as there.
    ids = jnp.arange(score.shape[1], dtype=jnp.int32)[None]
    best = jnp.min(jnp.where(score == jnp.max(score, axis=1, keepdims=True), ids, score.shape[1] - 1), axis=1)
    token = best.astype(jnp.int32)
    picked = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, picked - jax.nn.logsumexp(logits, axis=1)


def _is_end(tokens: Int[Array, "*rows"], end_ids: tuple[int, ...]) -> Bool[Array, "*rows"]:
    return functools.reduce(jnp.logical_or, [tokens == i for i in end_ids], jnp.zeros(tokens.shape, jnp.bool_))
