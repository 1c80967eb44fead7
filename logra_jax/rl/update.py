"""One update of the policy as one jitted program: sketches, RowAdam, ratio, predicted KL, apply (arXiv 2610.06647)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.mesh import AxisTable, constrain
from logra_jax.optim import (
    HiddenHead,
    SketchSpec,
    apply_updates,
    apply_with_residual,
    kl_link,
    merge,
    mismatch_average,
    predict_kl,
    rounding_keys,
    sketch_count,
    sketch_shardings,
    sketched_value_and_grad,
    step_ok,
    update_count,
)
from logra_jax.rl.kl import policy_kl
from logra_jax.rl.loss import LossSettings, LossSums, policy_loss, token_logprobs
from logra_jax.rl.rollout import attention_mask, completion_mask

Tree = Any


class TrainState(NamedTuple):
    """All that an update changes. Donated to the update, so the caller keeps only the one that comes back.

    ``residual`` is what bfloat16 weights lack, like ``train``; None unless rounding is "residual".
    """

    train: Tree
    opt_state: Tree
    mismatch: Float[Array, ""]
    residual: Tree = None


class Batch(NamedTuple):
    """Rows to learn from; N = prompts x generations, P and C the widths of prompts and completions.

    ``old_logprobs`` is needed only when a batch serves several updates, ``ref_logprobs`` only with a reference KL.
    ``probe`` holds the row numbers whose responses predict the KL; ``check`` says whether it is also measured.
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
        head = self.model.head(params)[:, : self.vocab_size].astype(hidden.dtype)
        return HiddenHead(hidden, constrain(head, self.model.mesh, None, "logits"))

    def logprobs(self, params: Tree, rows: Batch) -> tuple[Float[Array, "n c"], Float[Array, "n c"]]:
        """Log-probability at the sampling temperature and entropy (nats) of every completion position."""
        hidden, head = self.hidden_head(params, rows)
        return token_logprobs(hidden, head, rows.tokens[:, self.prompt_width :], self.temperature, mesh=self.model.mesh)


def _means(sums: LossSums) -> dict[str, Array]:
    """The sums of a step as means over its valid tokens."""
    mean = jax.tree.map(lambda total: total / jnp.maximum(sums.tokens, 1.0), sums)
    return {
        "loss": sums.loss,
        "entropy": mean.entropy,
        "clip/share": mean.clipped,
        "ratio/mean": mean.ratio,
        "importance/mean": mean.importance,
        "importance/capped": mean.capped,
        "kl/batch": mean.step_kl,
        "kl/reference": mean.reference_kl,
        "kl/mismatch": sums.mismatch / jnp.maximum(sums.ended_tokens, 1.0),
    }


def _valid_tokens(batch: Batch) -> Bool[Array, "n c"]:
    return completion_mask(batch.lengths, batch.rollout_logprobs.shape[1]) & batch.valid[:, None]


def _row_fields(batch: Batch) -> dict[str, Array]:
    fields = batch._asdict()
    return {k: v for k, v in fields.items() if k not in ("probe", "check") and v is not None}


def _take(batch: Batch, rows: Int[Array, " r"]) -> Batch:
    return batch._replace(**{k: v[rows] for k, v in _row_fields(batch).items()})


def _split(batch: Batch, micro_batch: int) -> dict[str, Array]:
    """The fields of the rows, ``[micro-batches, rows of each, ...]``."""
    count = batch.tokens.shape[0] // micro_batch if micro_batch else 1
    # Row i goes to micro-batch i mod count, so that a batch split over devices stays split in every micro-batch.
    return {k: v.reshape(-1, count, *v.shape[1:]).swapaxes(0, 1) for k, v in _row_fields(batch).items()}


def _over_micro_batches(function: Callable, batch: Batch, micro_batch: int, initial: Tree) -> Tree:
    """Sum of ``function(rows)`` over micro-batches, accumulated in place in the carry of a scan."""
    if micro_batch in (0, batch.tokens.shape[0]):
        return function(batch)
    split = _split(batch, micro_batch)

    def body(total: Tree, rows: dict[str, Array]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, function(batch._replace(**rows))), None

    return jax.lax.scan(body, initial, split)[0]


def make_score(policy: Policy, micro_batch: int) -> Callable[[Tree, Tree, Batch], Float[Array, "n c"]]:
    """Jitted ``score(train, frozen, batch)``: log-probabilities ``[n, c]`` of the rows under other weights."""

    def score(train: Tree, frozen: Tree, batch: Batch) -> Float[Array, "n c"]:
        params = merge(train, frozen)
        split = _split(batch, micro_batch)
        scored = jax.lax.map(lambda rows: policy.logprobs(params, batch._replace(**rows))[0], split)
        return constrain(scored.swapaxes(0, 1).reshape(batch.rollout_logprobs.shape), policy.model.mesh, "batch", None)

    return jax.jit(score)


def make_update(
    policy: Policy,
    tx: optax.GradientTransformationExtraArgs,
    spec: SketchSpec,
    loss: LossSettings,
    *,
    sketched: bool = True,
    kl_control: bool = True,
    micro_batch: int = 0,
    mismatch: bool = False,
    probe_tokens: int = 4096,
    check_responses: int = 0,
    state_shardings: Tree = None,
    rounding: str | None = None,
) -> Callable[[TrainState, Tree, Batch], tuple[TrainState, dict[str, Array]]]:
    """Jitted ``update(state, frozen, batch) -> (state, metrics)``; ``state`` is donated.

    Args:
      policy: the model with its sampling temperature and widths.
      tx: the optimizer; one from :func:`logra_jax.logra` or any other, wrapped in ``guard_nonfinite``.
      spec: which leaves are sketched, and how.
      loss: aggregation, clipping, importance cap and reference KL.
      sketched: take sketches of the targets; False takes dense gradients, for a dense optimizer.
      kl_control: ``tx`` has a ``scale_by_predicted_kl`` link, which is given the prediction on the probe.
      micro_batch: rows per forward and backward pass; 0 takes all rows at once. The result does not depend on it.
      mismatch: subtract the running mismatch of rollout and trainer from the KL budget.
      probe_tokens: longest response prefix, in tokens, that the KL probe looks at.
      check_responses: responses of the probe on which the KL that really came out is measured, in float32.
      state_shardings: ``out_shardings`` of the state on a mesh.
      rounding: how bfloat16 weights take updates: "stochastic", or "residual" with ``TrainState.residual`` from
        ``init_residual``. The policy is the bfloat16 weights in both.

    Metrics are float32 scalars; ``ok`` is False when a sketch or the prediction was not finite, and then nothing moved.
    """

    places = None if state_shardings is None else state_shardings.train
    head_sharding = None
    if policy.model.mesh is not None and policy.model.mesh.size > 1:
        head_sharding = NamedSharding(policy.model.mesh, AxisTable().spec((None, "logits")))

    def laid_out(grads: Tree, like: Tree) -> Tree:
        """Sketches in as many parts as there are devices, from the first micro-batch on."""
        if places is None:
            return grads
        wanted = sketch_shardings(spec, like, places) if sketched else places
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, wanted)

    def gradient(train: Tree, frozen: Tree, batch: Batch, step: Array) -> tuple[LossSums, Tree]:
        # Counts of the whole step, so that the micro-batches add up to exactly one mean.
        total_tokens = jnp.sum(_valid_tokens(batch), dtype=jnp.float32)
        total_sequences = jnp.sum(batch.valid, dtype=jnp.float32)

        def of_rows(rows: Batch) -> tuple[LossSums, Tree]:
            mask = _valid_tokens(rows)

            def value(train: Tree) -> tuple[Array, LossSums]:
                logprobs, entropy = policy.logprobs(merge(train, frozen), rows)
                return policy_loss(
                    logprobs, entropy, rows.old_logprobs, rows.rollout_logprobs, rows.ref_logprobs,
                    rows.advantages, mask, mask & rows.stopped[:, None], loss,
                    total_tokens=total_tokens, total_sequences=total_sequences,
                )  # fmt: skip

            if sketched:
                (_, sums), grads = sketched_value_and_grad(value, spec, has_aux=True)(train, step=step)
            else:
                (_, sums), grads = jax.value_and_grad(value, has_aux=True)(train)
            # Gradients of bfloat16 weights add up in float32.
            return sums, laid_out(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads), train)

        shapes = jax.eval_shape(of_rows, batch)
        sums, grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        zeros = sums, laid_out(grads, train)
        return _over_micro_batches(of_rows, batch, micro_batch, zeros)

    def update(state: TrainState, frozen: Tree, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        train = state.train
        step = sketch_count(state.opt_state) if sketched else jnp.zeros((), jnp.int32)
        sums, grads = gradient(train, frozen, batch, step)
        metrics = _means(sums) | {"grad/norm": optax.tree.norm(grads)}
        average = state.mismatch
        if mismatch:  # where no answer ended by itself there is nothing to observe
            observed = mismatch_average(average, metrics["kl/mismatch"])
            average = jnp.where(sums.ended_tokens > 0, observed, average)

        probe = _take(batch, batch.probe)
        longest = min(probe.tokens.shape[1], policy.prompt_width + probe_tokens)
        probe = probe._replace(
            tokens=probe.tokens[:, :longest],
            lengths=jnp.minimum(probe.lengths, longest - policy.prompt_width),
        )
        probe_mask = completion_mask(probe.lengths, longest - policy.prompt_width)
        # Small passes: compiling their layers one by one would cost more than running them faster saves. In forward
        # mode and in float32, cuDNN has no attention.
        looped = policy._replace(model=policy.model.replace(scan_unroll=1, attention="blocked"))
        predicted = predict_kl(
            lambda train: looped.hidden_head(merge(train, frozen), probe), train, spec,
            step=step, mask=probe_mask, temperature=policy.temperature, head_sharding=head_sharding,
        )  # fmt: skip

        exact = looped._replace(model=looped.model.replace(compute_dtype="float32"))
        checked = _take(probe, jnp.arange(check_responses))

        def check_hidden(train: Tree) -> HiddenHead:
            return exact.hidden_head(merge(train, frozen), checked)

        if check_responses:
            # Taken before the weights are written over; the branch costs nothing on the other updates.
            shapes = jax.eval_shape(check_hidden, train)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            before = jax.lax.cond(batch.check, check_hidden, lambda _: zeros, train)

        updates, opt_state = tx.update(grads, state.opt_state, train, predict_kl=predicted, kl_mismatch=average)
        residual = state.residual
        if rounding == "residual":
            new_train, residual = apply_with_residual(train, residual, updates, places)
        else:
            keys = rounding_keys(spec, train, update_count(state.opt_state)) if rounding == "stochastic" else None
            new_train = apply_updates(train, updates, places, keys=keys)

        metrics["ok"] = step_ok(opt_state)
        if kl_control:
            link = kl_link(opt_state)
            metrics |= {
                "kl/predicted": link.alpha**2 * link.predicted_kl,
                "kl/alpha": link.alpha,
                "kl/budget": link.budget,
            }
        if check_responses:

            def measure(new_train: Tree) -> Array:
                after, mask = check_hidden(new_train), probe_mask[:check_responses]
                return policy_kl(before, after, mask, policy.temperature, mesh=policy.model.mesh)

            metrics["kl/realized"] = jax.lax.cond(
                batch.check, measure, lambda _: jnp.full((), jnp.nan, jnp.float32), new_train
            )
        # NaN would stay in the average for ever, and with it every later step would be refused.
        average = jnp.where(metrics["ok"] & jnp.isfinite(average), average, state.mismatch)
        return TrainState(new_train, opt_state, average, residual), metrics

    out = None if state_shardings is None else (state_shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out)
