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
from logra_jax.optim.slot import value_and_add_grad
from logra_jax.rl.kl import policy_kl
from logra_jax.rl.loss import LossSettings, LossSums, policy_loss, token_logprobs, token_weights
from logra_jax.rl.packing import Packing, Slots, read_slots
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
        fields = _row_fields(batch).items()
        rows: dict[str, Any] = {k: constrain(v, self.model.mesh, *(None,) * v.ndim) for k, v in fields}
        return batch._replace(**rows)

    def slots(self, batch: Batch, number: Int[Array, ""]) -> Slots:
        """The slots of a pass over packed rows."""
        assert batch.packing is not None
        source = constrain(batch.packing.source[number], self.model.mesh, "batch", None)
        return read_slots(source, batch.tokens.shape[1], self.prompt_width)


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


def _row_fields(batch: Batch) -> dict[str, Any]:
    fields = batch._asdict()
    return {k: v for k, v in fields.items() if k not in ("probe", "check", "packing") and v is not None}


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

    def body(total: Tree, rows: dict[str, Any]) -> tuple[Tree, None]:
        return jax.tree.map(jnp.add, total, function(batch._replace(**rows))), None

    return jax.lax.scan(body, initial, split)[0]


def _turn_size(rows: int, limit: int) -> int:
    """The largest number of rows per turn that divides ``rows`` and is at most ``limit`` (0: all at once)."""
    return max(size for size in range(1, min(limit or rows, rows) + 1) if rows % size == 0)


def _over_packed_rows(function: Callable, batch: Batch, initial: Tree) -> Tree:
    """Sum of ``function(number)`` over the passes that hold anything: the others cost nothing."""
    assert batch.packing is not None

    def body(number: Array, total: Tree) -> Tree:
        return jax.tree.map(jnp.add, total, function(number))

    return jax.lax.fori_loop(0, batch.packing.passes, body, initial)


def _padding_share(batch: Batch) -> Float[Array, ""]:
    """Share of the tokens put through the model that belong to no answer that counts."""
    used = jnp.where(batch.valid & (batch.lengths > 0), batch.prompt_lengths + batch.lengths - 1, 0)
    if batch.packing is None:
        slots = jnp.float32(batch.tokens.size)
    else:
        slots = batch.packing.passes.astype(jnp.float32) * batch.packing.source[0].size
    return 1.0 - jnp.sum(used, dtype=jnp.float32) / jnp.maximum(slots, 1.0)


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
      micro_batch: rows per forward and backward pass; 0 takes all rows at once. The result does not depend on it,
        nor on ``Batch.packing``, which replaces it.
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
        packed = batch.packing is not None
        whole = policy.everywhere(batch) if packed else batch

        def weights_of(rows: Batch) -> Float[Array, " n"]:
            return token_weights(loss.aggregation, rows.lengths, total_tokens, total_sequences)

        def of_rows(rows: Batch, into: Tree = None) -> tuple[LossSums, Tree]:
            mask = _valid_tokens(rows)
            return of_pass(
                lambda params: policy.logprobs(params, rows),
                into,
                old_logprobs=rows.old_logprobs,
                rollout_logprobs=rows.rollout_logprobs,
                ref_logprobs=rows.ref_logprobs,
                advantages=rows.advantages[:, None],
                weights=weights_of(rows)[:, None],
                mask=mask,
                ended=mask & rows.stopped[:, None],
            )

        def of_packed(number: Array, into: Tree = None) -> tuple[LossSums, Tree]:
            slots = policy.slots(whole, number)
            token = lambda values: None if values is None else slots.of_completion(values)
            answer = slots.of_answer
            return of_pass(
                lambda params: policy.packed_logprobs(params, whole.tokens, slots),
                into,
                old_logprobs=token(whole.old_logprobs),
                rollout_logprobs=token(whole.rollout_logprobs),
                ref_logprobs=token(whole.ref_logprobs),
                advantages=answer(whole.advantages),
                weights=answer(weights_of(whole)),
                mask=slots.learns,
                ended=slots.learns & answer(whole.stopped),
            )

        def of_pass(logprobs: Callable[[Tree], tuple[Array, Array]], into: Tree, **terms: Any) -> tuple[LossSums, Tree]:
            def value(train: Tree) -> tuple[Array, LossSums]:
                return policy_loss(*logprobs(merge(train, frozen)), **terms, settings=loss)

            if sketched:
                (_, sums), grads = sketched_value_and_grad(value, spec, has_aux=True)(train, step=step, into=into)
            else:
                (_, sums), grads = value_and_add_grad(value, train, into, has_aux=True)
            return sums, grads

        def passes(function: Callable, initial: Tree) -> Tree:
            if packed:
                return _over_packed_rows(function, batch, initial)
            return _over_micro_batches(function, batch, micro_batch, initial)

        def wide(rows: Any) -> tuple[LossSums, Tree]:
            sums, grads = one(rows)
            return sums, laid_out(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads), train)

        one = of_packed if packed else of_rows
        sum_shapes, shapes = jax.eval_shape(one, jnp.int32(0) if packed else batch)
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sum_shapes)
        # Behind a barrier, or the compiler keeps one zero sketch until the end for all later uses of zeros.
        zero = jax.lax.optimization_barrier(jnp.zeros(()))
        totals = laid_out(jax.tree.map(lambda leaf: jnp.full(leaf.shape, zero, jnp.float32), shapes), train)
        if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(shapes)):
            # Gradients of bfloat16 weights add up in float32, which takes a conversion in between.
            return passes(wide, (sums, totals))
        into = jax.tree.map(jax.new_ref, totals)
        sums = passes(lambda rows: one(rows, into)[0], sums)
        return sums, jax.tree.map(jax.freeze, into)

    def update(state: TrainState, frozen: Tree, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        train = state.train
        step = sketch_count(state.opt_state) if sketched else jnp.zeros((), jnp.int32)
        sums, grads = gradient(train, frozen, batch, step)
        metrics = _means(sums) | {"grad/norm": optax.tree.norm(grads), "padding/share": _padding_share(batch)}
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

        def predicted(updates: Tree) -> Array:
            """Predicted KL on the probe, no more of whose rows are alive at a time than in the gradient."""

            def of_rows(rows: Batch) -> tuple[Array, Array]:
                mask = completion_mask(rows.lengths, longest - policy.prompt_width)
                mean = predict_kl(
                    lambda train: looped.hidden_head(merge(train, frozen), rows), train, spec if sketched else None,
                    step=step, mask=mask, temperature=policy.temperature, head_sharding=head_sharding,
                )(updates)  # fmt: skip
                tokens = jnp.sum(mask, dtype=jnp.float32)
                return mean * tokens, tokens

            size = _turn_size(probe.tokens.shape[0], micro_batch)
            total, tokens = _over_micro_batches(of_rows, probe, size, (jnp.zeros(()), jnp.zeros(())))
            return total / jnp.maximum(tokens, 1.0)

        exact = looped._replace(model=looped.model.replace(compute_dtype="float32"))
        checked = _take(probe, jnp.arange(check_responses))

        def check_hidden(train: Tree) -> Float[Array, "r c d"]:
            params, size = merge(train, frozen), _turn_size(check_responses, micro_batch)
            turns = {k: v.reshape(-1, size, *v.shape[1:]) for k, v in _row_fields(checked).items()}
            found = jax.lax.map(lambda rows: exact.hidden_head(params, checked._replace(**rows)).hidden, turns)
            return found.reshape(-1, *found.shape[2:])

        def check_head(train: Tree) -> Float[Array, "d v"]:
            head = policy.model.head(merge(train, frozen))[:, : policy.vocab_size]
            return constrain(head, policy.model.mesh, None, "logits")

        def check_before(train: Tree) -> tuple[Array, Array | None]:
            """What the update writes over: not the head, where the targets alone are trained."""
            others = len(jax.tree.leaves(train)) > len(spec.matrices(train))
            return check_hidden(train), check_head(train) if others else None

        if check_responses:
            # Taken before the weights are written over; the branch costs nothing on the other updates.
            shapes = jax.eval_shape(check_before, train)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            before = jax.lax.cond(batch.check, check_before, lambda _: zeros, train)
            # One after the other: the compiler would rather copy all weights than look at them before they are changed.
            before, train = jax.lax.optimization_barrier((before, train))

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
                head, (hidden, old_head) = check_head(new_train), before
                old = HiddenHead(hidden, head if old_head is None else old_head)
                new = HiddenHead(check_hidden(new_train), head)
                mask = probe_mask[:check_responses]
                return policy_kl(old, new, mask, policy.temperature, mesh=policy.model.mesh)

            metrics["kl/realized"] = jax.lax.cond(
                batch.check, measure, lambda _: jnp.full((), jnp.nan, jnp.float32), new_train
            )
        # NaN would stay in the average for ever, and with it every later step would be refused.
        average = jnp.where(metrics["ok"] & jnp.isfinite(average), average, state.mismatch)
        return TrainState(new_train, opt_state, average, residual), metrics

    out = None if state_shardings is None else (state_shardings, None)
    return jax.jit(update, donate_argnums=0, out_shardings=out)
