"""The length of a step from the change of the policy it predicts."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax._shapes import Array, Bool, Float
from logra_jax.errors import UserError
from logra_jax.optim.apply import LowRank
from logra_jax.optim.links import all_finite, find_states, value_at
from logra_jax.optim.slot import place
from logra_jax.optim.spec import Matrix, SketchSpec, leaves_with_paths

_CHUNK = 256  # positions whose logits exist at one time


class PredictedKLState(NamedTuple):
    """count: int32, updates so far. The rest is about the last update.

    alpha: the factor its direction was scaled by. predicted_kl: q of the unscaled direction, nats per token
    (the step taken has alpha^2 q). budget: the effective one. ok: False where the prediction was unusable.
    """

    count: Any
    alpha: Float[Array, ""]
    predicted_kl: Float[Array, ""]
    budget: Float[Array, ""]
    ok: Bool[Array, ""]


class HiddenHead(NamedTuple):
    """Last hidden states `[..., D]` and the output matrix `[D, V]`: logits never formed all at once."""

    hidden: Any
    head: Any


def scale_by_predicted_kl(budget: Any, alpha_max: Any = 3.0) -> optax.GradientTransformationExtraArgs:
    """Scales the whole step so that the KL divergence it predicts stays within a budget (arXiv 2610.06647).

        q     = predict_kl(step)
        delta = max(budget - kl_mismatch, budget / 2)
        alpha = min(alpha_max, sqrt(delta / q)), 1 where q is 0
        step <- alpha step

    Stands outside `optax.partition` and `optax.masked`, so that it sees the whole step, after everything
    that rescales and before `lift`. It bounds any optimizer: with dense updates the prediction is taken
    along dense tangents.

    `tx.update` takes two keyword arguments: predict_kl, the function that `predict_kl(...)` returns, and
    kl_mismatch, the running average of the disagreement between rollout and trainer log-probabilities (0
    without).

    A prediction that is negative or not finite moves nothing: updates are zeros, alpha is 0 and ok False.
    Wrap the chain in `guard_nonfinite` to keep the other links' states as they were.

    Args:
      budget: nats per token, above 0: a number, or a schedule of the update number such as `cosine_budget`.
      alpha_max: largest factor.

    Raises:
      UserError: the budget is not positive, predict_kl is missing, or the link stands where it sees a part
        of the step.
    """
    if isinstance(budget, int | float) and not budget > 0:
        raise UserError(f"scale_by_predicted_kl: budget is {budget}; it must be above 0 (nats per token)")

    def init_fn(params: Any) -> PredictedKLState:
        _check_whole(params)
        zero = jnp.zeros((), jnp.float32)
        return PredictedKLState(jnp.zeros((), jnp.int32), zero, zero, zero, jnp.asarray(True))

    def update_fn(
        updates: Any,
        state: PredictedKLState,
        params: Any = None,
        *,
        predict_kl: Callable[[Any], Any] | None = None,
        kl_mismatch: Any = 0.0,
        **extra_args: Any,
    ) -> Any:
        del params, extra_args
        _check_whole(updates)
        if predict_kl is None:
            raise UserError(
                "scale_by_predicted_kl: tx.update needs predict_kl=, the function returned by "
                "predict_kl(logits_fn, train, spec, step=..., mask=...)"
            )
        full = value_at(budget, state.count)
        delta = jnp.maximum(full - jnp.asarray(kl_mismatch, jnp.float32), 0.5 * full)
        q = jnp.asarray(predict_kl(updates), jnp.float32)
        ok = jnp.isfinite(q) & (q >= 0) & jnp.isfinite(delta) & all_finite(updates)
        alpha = jnp.minimum(value_at(alpha_max, state.count), jnp.sqrt(delta / jnp.where(q > 0, q, 1.0)))
        alpha = jnp.where(ok, jnp.where(q == 0, 1.0, alpha), 0.0)

        # A select, not a product: 0 times an infinite update is not 0.
        def scale(u: Array) -> Array:
            return jnp.where(ok, u.astype(jnp.float32) * alpha, 0.0).astype(u.dtype)

        count = optax.safe_increment(state.count)
        return jax.tree.map(scale, updates), PredictedKLState(count, alpha, q, delta, ok)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_whole(tree: Any) -> None:
    def stop(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode | LowRank)

    for node in jax.tree.leaves(tree, is_leaf=stop):
        if isinstance(node, optax.MaskedNode):
            raise UserError(
                "scale_by_predicted_kl: stands inside optax.partition or optax.masked, where it sees a "
                "part of the step; put it after: chain(partition(...), scale_by_predicted_kl(...), lift(...))"
            )
        if isinstance(node, LowRank):
            raise UserError("scale_by_predicted_kl: the updates are lifted already; lift comes after this link")


def kl_link(state: Any) -> PredictedKLState:
    """The state of the KL link, wherever it is in an optimizer state.

    Raises:
      UserError: there is none, or more than one.
    """
    found = find_states(state, PredictedKLState)
    if len(found) != 1:
        raise UserError(f"kl_link: this optimizer state has {len(found)} scale_by_predicted_kl(...) links, not one")
    return found[0]


def predict_kl(
    logits_fn: Callable[[Any], Any],
    train: Any,
    spec: SketchSpec | None,
    step: Any,
    mask: Any,
    temperature: Any = 1.0,
    materialize: bool | None = None,
    chunk: int = _CHUNK,
    head_sharding: NamedSharding | None = None,
) -> Callable[[Any], Float[Array, ""]]:
    """Returns the function updates -> q: the KL divergence in nats per token that a proposed step predicts.

    With z_dot the change of the logits along the whole step at once (one Jacobian-vector product):

        p       = softmax(z / T)
        c       = z_dot / T - E_p[z_dot / T]
        q_token = 1/2 E_p[c^2]
        q       = mean of q_token, weighted by the mask (0 where the mask is all 0)

    Close the result over inside the jitted step; functions cannot be arguments of `jax.jit`.

    Args:
      logits_fn: logits_fn(train) -> logits `[..., V]`, or `HiddenHead(hidden [..., D], head [D, V])`, whose
        logits are taken for about `chunk` positions at a time. It gets the targets as slots, as in
        `sketched_value_and_grad`, and closes over frozen leaves.
      train: parameters at which to predict, before the step.
      spec: that of the sketches; None where every update has its leaf's own shape (plain `optax.adam`).
      step: number of this update, `sketch_count(opt_state)` before it.
      mask: weights `[...]`, one per position; positions of weight 0 are ignored, even where they are not
        finite.
      temperature: T, of the policy that the divergence is about.
      materialize: as in `sketched_value_and_grad`.
      chunk: see logits_fn.
      head_sharding: on a mesh, how the `[D, V]` head of a `HiddenHead` lies; the logits of a chunk are split over
        V in the same way.

    The updates are those the KL link sees: sketch-shaped (or full) at targets, full elsewhere, downhill.
    """
    mask = jnp.asarray(mask, jnp.float32)

    def predicted(updates: Any) -> Float[Array, ""]:
        head_moves = False

        @jax.custom_jvp
        def watch(head: Any) -> Any:
            return head

        @partial(watch.defjvp, symbolic_zeros=True)
        def _(primals: Any, tangents: Any) -> Any:
            nonlocal head_moves
            head_moves = not isinstance(tangents[0], SymbolicZero)
            return primals[0], tangents[0]

        def run(leaves: Any) -> Any:
            out = logits_fn(tree(leaves))
            return HiddenHead(out.hidden, watch(out.head)) if isinstance(out, HiddenHead) else out

        matrices = _sketched(train, updates, spec)
        free, tree = place(logits_fn, train, matrices, spec, step, materialize)
        tangent = jax.tree.map(lambda leaf, update: update.astype(leaf.dtype), free, updates)
        out, change = jax.jvp(run, (free,), (tangent,))
        positions = (out.hidden if isinstance(out, HiddenHead) else out).shape[:-1]
        if positions != mask.shape:
            raise UserError(f"predict_kl: the mask has shape {mask.shape}, the logits have positions {positions}")
        if isinstance(out, HiddenHead):
            head_dot = change.head if head_moves else None
            total = _in_chunks(out.hidden, change.hidden, out.head, head_dot, mask, temperature, chunk, head_sharding)
        else:
            total = _weighted(out, change, mask, temperature)
        weight = jnp.sum(mask)
        return jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)

    return predicted


def _sketched(train: Any, updates: Any, spec: SketchSpec | None) -> dict[str, Matrix]:
    """The targets whose update is a sketch; others (plain Adam's) move along a dense tangent."""
    if spec is None:
        return {}
    by_path = dict(leaves_with_paths(updates))
    return {p: m for p, m in spec.matrices(train).items() if by_path[p].shape == m.sketch_shape(spec.rank)}


def _weighted(z: Array, z_dot: Array, mask: Array, temperature: Any) -> Float[Array, ""]:
    """Sum over positions of mask times 1/2 Var_p(z_dot / T), p = softmax(z / T)."""
    t = jnp.asarray(temperature, jnp.float32)
    p = jax.nn.softmax(z.astype(jnp.float32) / t, axis=-1)
    # A banned token has logit -inf and p exactly 0, and whatever its tangent is must not count.
    s = jnp.where(p == 0, 0.0, z_dot.astype(jnp.float32) / t)
    c = s - jnp.sum(p * s, axis=-1, keepdims=True)
    q = 0.5 * jnp.sum(p * jnp.square(c), axis=-1)
    return jnp.sum(jnp.where(mask > 0, q * mask, 0.0))


def _in_chunks(
    hidden: Array,
    hidden_dot: Array,
    head: Array,
    head_dot: Any,
    mask: Array,
    temperature: Any,
    chunk: int,
    head_sharding: NamedSharding | None,
) -> Float[Array, ""]:
    """`_weighted` of hidden @ head, with the logits of about `chunk` positions at a time."""
    rows = math.prod(mask.shape[:-1])
    if rows >= chunk:
        rows = 1
    # Chunks run along the last position axis, so that rows sharded over devices stay where they are.
    length = mask.size // rows
    width = max(1, chunk // rows)
    count = -(-length // width)

    def cut(x: Array, *features: int) -> Array:
        x = x.reshape(rows, length, *features)
        pad = [(0, 0), (0, count * width - length)] + [(0, 0)] * len(features)
        return jnp.moveaxis(jnp.pad(x, pad).reshape(rows, count, width, *features), 1, 0)

    head = head.astype(hidden.dtype)

    def dot(h: Array, matrix: Array) -> Array:
        if head_sharding is None:
            return jnp.matmul(h, matrix, preferred_element_type=jnp.float32)
        mesh, axes = head_sharding.mesh, head_sharding.spec
        h = lax.with_sharding_constraint(h, NamedSharding(mesh, PartitionSpec()))
        z = jnp.matmul(h, matrix, preferred_element_type=jnp.float32)
        return lax.with_sharding_constraint(z, NamedSharding(mesh, PartitionSpec(None, None, *axes[1:])))

    def one(block: tuple[Array, Array, Array]) -> Array:
        h, h_dot, m = block
        z_dot = dot(h_dot, head)
        if head_dot is not None:
            z_dot = z_dot + dot(h, head_dot.astype(h.dtype))
        return _weighted(dot(h, head), z_dot, m, temperature)

    d = hidden.shape[-1]
    return jnp.sum(lax.map(one, (cut(hidden, d), cut(hidden_dot, d), cut(mask))))


def cosine_budget(start: float, end: float, steps: int) -> Callable[[Any], Any]:
    """Schedule from `start` at update 0 along a half cosine to `end` at update steps - 1, then constant."""
    if steps < 1 or not start > 0 or not end > 0:
        raise UserError(f"cosine_budget: start {start} and end {end} must be above 0, steps {steps} at least 1")

    def budget(update: Any) -> Any:
        done = jnp.minimum(jnp.asarray(update, jnp.float32) / max(steps - 1, 1), 1.0)
        return end + 0.5 * (start - end) * (1 + jnp.cos(math.pi * done))

    return budget


def mismatch_average(m: Any, observed: Any, weight: float = 0.3) -> Any:
    """The running average behind kl_mismatch: (1 - weight) m + weight max(0, observed), m starting at 0.

    observed: mean of rollout minus trainer log-probability over the batch's counted tokens, in nats.
    """
    return (1 - weight) * m + weight * jnp.maximum(jnp.asarray(observed, jnp.float32), 0.0)
