"""Token log-probabilities in chunks of positions, and the policy loss with weights from outside.

Every function works on any part of a step's tokens: the parts' losses, gradients and sums add up to those of
the whole step, because what a token counts in the whole step is passed in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.mesh import constrain

LOGIT_FLOOR = -1e30  # stands for -inf: 0 * -1e30 is 0 where 0 * -inf is NaN, in the value and in the gradient
LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8: far beyond any useful ratio, far below float32's overflow
CHUNK_ELEMENTS = 2**26  # logits that may exist at a time by default: 256 MiB in float32


@dataclass(frozen=True)
class LossSettings:
    """Which policy loss; see `policy_loss` for the formula.

    aggregation: "token" is the mean over the step's valid tokens, "sequence" the mean over its valid rows of
    each row's mean over its own tokens, "constant" the mean over rows of sums divided by the longest possible
    length ("Dr. GRPO", arXiv 2503.20783). ratio: "token", or "sequence" for the geometric mean over the tokens
    of the answer (GSPO, arXiv 2507.18071, which takes it with aggregation "sequence"). clip_low, clip_high: the
    ratio is held in [1 - clip_low, 1 + clip_high]; a side that is None does not clip. importance_cap: largest
    weight for what the trainer finds likelier than the sampler did; None leaves the weights out. reference_kl:
    factor of the KL to the reference policy.
    """

    aggregation: str = "token"
    ratio: str = "token"
    clip_low: float | None = None
    clip_high: float | None = None
    importance_cap: float | None = None
    reference_kl: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("aggregation", ("token", "sequence", "constant")), ("ratio", ("token", "sequence"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}")


class LossSums(NamedTuple):
    """Sums over the valid tokens, float32 scalars without gradient.

    They add up over the parts of a step (`add_sums`) and give means when divided by `tokens`. loss: the part of the
    loss (already divided by the step's counts); clipped: tokens whose gradient the clip cuts; entropy: nats,
    at the sampling temperature; ratio: exp(logp - old); step_kl, reference_kl: k3 estimates of KL(new || old)
    and KL(new || reference), nats; importance: the truncated weight; capped: tokens whose weight was cut;
    deviation: |exp(old - rollout) - 1|, how far the trainer's probability of a token is from the sampler's, before
    any update of this batch; max_deviation: the largest of them, no sum; mismatch: rollout logp - old logp, nats, and
    ended_tokens: their number, both over rows that ended by themselves.
    """

    loss: Array
    tokens: Array
    clipped: Array
    entropy: Array
    ratio: Array
    step_kl: Array
    reference_kl: Array
    importance: Array
    capped: Array
    deviation: Array
    max_deviation: Array
    mismatch: Array
    ended_tokens: Array


def add_sums(one: LossSums, other: LossSums) -> LossSums:
    """The sums of two parts of a step together."""
    largest = jnp.maximum(one.max_deviation, other.max_deviation)
    return jax.tree.map(jnp.add, one, other)._replace(max_deviation=largest)


def scaled_logits(
    hidden: Float[Array, "*rows d"], head: Float[Array, "d v"], temperature: float | Array
) -> Float[Array, "*rows v"]:
    """float32 logits / temperature; the one formula of both sampler and trainer. -inf becomes LOGIT_FLOOR."""
    rows = hidden.reshape(-1, hidden.shape[-1])  # one plain product, as in the model's linear layers
    logits = jnp.matmul(rows, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return jnp.maximum(logits / temperature, LOGIT_FLOOR).reshape(*hidden.shape[:-1], head.shape[1])


def entropy_of(logits: Float[Array, "*rows v"]) -> Float[Array, "*rows"]:
    """Entropy of softmax(logits), nats. A logit of -inf is a token of probability 0, in the gradient too."""
    logits = jnp.maximum(logits, LOGIT_FLOOR)
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.sum(jnp.exp(logits - total[..., None]) * logits, axis=-1)


def token_logprobs(
    hidden: Float[Array, "b c d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "b c"],
    temperature: float | Array,
    chunk: int | None = None,
    mesh: Mesh | None = None,
    wanted: Bool[Array, "b c"] | None = None,
) -> tuple[Float[Array, "b c"], Float[Array, "b c"]]:
    """(log softmax(hidden @ head / temperature)[targets], entropy in nats), both float32 [B, C].

    hidden [B, C, D]: the final hidden states of the positions that predict `targets` [B, C]. head [D, V]:
    output head, cut by the caller to the ids that may be sampled. chunk: positions of every row taken at a
    time, under `jax.checkpoint`, so that [B, chunk, V] is the largest array alive in either direction; None
    takes as many as keep it below 256 MiB. Chunks run along the positions, not over flattened tokens: rows
    stay on their devices. mesh: its devices share the vocabulary of each chunk; the head comes split the same
    way, and the few hidden states of a chunk go to all of them. wanted: positions that matter; chunks without any
    cost nothing, and both results are 0 there.
    """
    batch, length, _ = hidden.shape
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS // max(1, batch * head.shape[1]))
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, not {chunk}")
    count = max(1, -(-length // chunk))
    size = -(-length // count)

    def whole_piece(hidden, targets):
        hidden = constrain(hidden, mesh, None, None, None)
        logits = constrain(scaled_logits(hidden, head, temperature), mesh, None, None, "logits")
        # A comparison instead of a gather: no scatter in the gradient, and the vocabulary may be sharded.
        # Behind a barrier with the chunk's ids, or what is the same for all chunks would be kept at full size.
        ids = jnp.arange(head.shape[1], dtype=targets.dtype)
        ids, zero, targets = jax.lax.optimization_barrier((ids, jnp.zeros(()), targets))
        chosen = ids[None, None, :] == targets[..., None]
        picked = jnp.sum(jnp.where(chosen, logits, zero), axis=-1)
        found = picked - jax.nn.logsumexp(logits, axis=-1), entropy_of(logits)
        return tuple(constrain(x, mesh, "batch", None) for x in found)

    @jax.checkpoint
    def piece(hidden, targets, wanted):
        if wanted is None:
            return whole_piece(hidden, targets)
        nothing = jnp.zeros(targets.shape, jnp.float32)
        return jax.lax.cond(jnp.any(wanted), whole_piece, lambda *_: (nothing, nothing), hidden, targets)

    if count == 1:
        return piece(hidden, targets, wanted)

    def split(x):
        padded = jnp.pad(x, ((0, 0), (0, count * size - length), *((0, 0),) * (x.ndim - 2)))
        return padded.reshape(batch, count, size, *x.shape[2:]).swapaxes(0, 1)

    parts = jax.lax.map(lambda xs: piece(*xs), jax.tree.map(split, (hidden, targets, wanted)))
    logprobs, entropy = (x.swapaxes(0, 1).reshape(batch, -1)[:, :length] for x in parts)
    return logprobs, entropy


def token_weights(
    aggregation: str,
    lengths: Int[Array, " n"],
    longest: int,
    total_tokens: Float[Array, ""],
    total_sequences: Float[Array, ""],
) -> Float[Array, " n"]:
    """What each token of a row counts in the step's mean; see `LossSettings.aggregation`.

    lengths: tokens of each row. longest: tokens that a row may have. total_tokens and total_sequences count the
    valid tokens and rows of the whole step, so that the parts of a split batch add up to exactly one mean.
    """
    if aggregation == "token":
        return jnp.broadcast_to(1.0 / jnp.maximum(total_tokens, 1.0), lengths.shape)
    divisor = lengths.astype(jnp.float32) if aggregation == "sequence" else jnp.full(lengths.shape, float(longest))
    return 1.0 / (jnp.maximum(divisor, 1.0) * jnp.maximum(total_sequences, 1.0))


def row_mean(values: Float[Array, "b c"], mask: Bool[Array, "b c"]) -> Float[Array, "b 1"]:
    """The mean over the masked positions of each row; 0 where there are none."""
    count = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0.0), axis=1, keepdims=True) / jnp.maximum(count, 1.0)


def policy_loss(
    logprobs: Float[Array, "b c"],
    entropy: Float[Array, "b c"],
    old_logprobs: Float[Array, "b c"] | None,
    rollout_logprobs: Float[Array, "b c"],
    ref_logprobs: Float[Array, "b c"] | None,
    advantages: Float[Array, "b #c"],
    weights: Float[Array, "b #c"],
    mask: Bool[Array, "b c"],
    ended: Bool[Array, "b c"],
    settings: LossSettings,
    answer_mean: Callable[[Float[Array, "b c"], Bool[Array, "b c"]], Float[Array, "b #c"]] = row_mean,
) -> tuple[Float[Array, ""], LossSums]:
    """The part of the step's policy loss that falls on these tokens, and its sums. Arrays float32, masks bool.

    The sum over the valid tokens of weight x loss where, with ratio = exp(logp - old) and A the advantage,

        loss = -w min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) + reference_kl k3(ref - logp)
        w    = min(exp(old - rollout), importance_cap), no gradient; 1 where importance_cap is None
        k3(d) = exp(d) - d - 1

    With settings.ratio "sequence", logp - old in the ratio is its mean over the tokens of the answer (GSPO, in the
    form with a term per token: the value of each is that of its answer, its gradient goes to its own logp).

    Tokens may lie in rows of their own answer or in any other order: advantages and weights (from
    `token_weights`) have one column for each token, or a single one where they are those of the row.
    old_logprobs None stands for the current policy: ratio 1, the plain policy gradient. mask: valid tokens;
    ended: those of them whose response ended by itself. answer_mean(values, mask): the mean of each token's answer;
    without it an answer is a row.

    Values at masked positions, NaN included, touch neither the loss nor the gradient, and log ratios are
    bounded to +-20 before `exp`. A step without a valid token has loss 0 and gradient 0. Raises ValueError
    where reference_kl is set and ref_logprobs is None.
    """
    if settings.reference_kl and ref_logprobs is None:
        raise ValueError("reference_kl needs ref_logprobs")

    def valid(values):
        # Selecting before the arithmetic: multiplying by the mask afterwards turns 0 * inf into NaN.
        return jnp.where(mask, values, 0.0)

    logprobs = valid(logprobs)
    # Constant, and with it the importance weight.
    old = jax.lax.stop_gradient(logprobs if old_logprobs is None else valid(old_logprobs))
    log_ratio = logprobs - old
    if settings.ratio == "sequence":
        mean = answer_mean(jax.lax.stop_gradient(log_ratio), mask)
        log_ratio = valid(mean + (logprobs - jax.lax.stop_gradient(logprobs)))
    ratio = jnp.exp(_bounded(log_ratio))
    plain = ratio * advantages
    low = -jnp.inf if settings.clip_low is None else 1.0 - settings.clip_low
    high = jnp.inf if settings.clip_high is None else 1.0 + settings.clip_high
    clip = jnp.clip(ratio, low, high) * advantages
    # Only where the clipped branch is strictly the smaller one is a token's gradient cut. A selection by that
    # condition, because the gradient of minimum() and clip() is halved where both sides are equal.
    clipped = mask & (clip < plain)
    surrogate = jnp.where(clipped, clip, plain)

    apart = old - valid(rollout_logprobs)
    deviation = jnp.abs(jnp.expm1(_bounded(apart)))
    weight = jnp.ones_like(ratio)
    capped = jnp.zeros_like(mask)
    if settings.importance_cap is not None:
        raw = jnp.exp(_bounded(apart))
        weight = jnp.minimum(raw, settings.importance_cap)
        capped = mask & (raw > settings.importance_cap)
    per_token = valid(-weight * surrogate)

    kl = jnp.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = _k3(valid(jax.lax.stop_gradient(ref_logprobs)) - logprobs)
        if settings.reference_kl:
            per_token = per_token + settings.reference_kl * kl

    loss = jnp.sum(valid(weights) * per_token)
    sums = LossSums(
        loss=loss,
        tokens=jnp.sum(mask, dtype=jnp.float32),
        clipped=jnp.sum(clipped, dtype=jnp.float32),
        entropy=jnp.sum(valid(entropy)),
        ratio=jnp.sum(valid(ratio)),
        step_kl=jnp.sum(_k3(old - logprobs)),
        reference_kl=jnp.sum(kl),
        importance=jnp.sum(valid(weight)),
        capped=jnp.sum(capped, dtype=jnp.float32),
        deviation=jnp.sum(deviation),
        max_deviation=jnp.max(deviation, initial=0.0),
        mismatch=jnp.sum(jnp.where(ended, -apart, 0.0)),
        ended_tokens=jnp.sum(mask & ended, dtype=jnp.float32),
    )
    return loss, jax.lax.stop_gradient(sums)


def _bounded(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _k3(log_ratio: Array) -> Array:
    """exp(d) - d - 1 >= 0, the low-variance estimate of a KL divergence; expm1 keeps it exact near d = 0."""
    bounded = _bounded(log_ratio)
    return jnp.expm1(bounded) - bounded
