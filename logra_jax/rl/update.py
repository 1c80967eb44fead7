"""One update of the policy as one jitted program: sketches, RowAdam, ratio, predicted KL, apply (arXiv 2610.06647)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from logra_jax._shapes import Array, Float
from logra_jax.mesh import AxisTable, constrain
from logra_jax.optim import (
    HiddenHead,
    LowRank,
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
from logra_jax.optim.spec import leaves_with_paths, path_string
from logra_jax.rl.batch import (
    Batch,
    add_trees,
    over_micro_batches,
    over_packed_rows,
    padding_share,
    row_fields,
    take,
    turn_size,
    valid_tokens,
)
from logra_jax.rl.kl import policy_kl
from logra_jax.rl.loss import LossSettings, LossSums, add_sums, policy_loss, token_weights
from logra_jax.rl.policy import Policy
from logra_jax.rl.rollout import completion_mask

Tree = Any


class TrainState(NamedTuple):
    """All that an update changes. Donated to the update, so the caller keeps only the one that comes back.

    ``residual`` is what bfloat16 weights lack, like ``train``; None unless rounding is "residual".
    """

    train: Tree
    opt_state: Tree
    mismatch: Float[Array, ""]
    residual: Tree = None


class Sent(NamedTuple):
    """What servers need of an update of the targets.

    factors: `LowRank.factor` by path, bfloat16 `[..., r, d]`, the very numbers that were applied. decay: float32.
    before: int32, how many sketches were taken before it, which tells when the projections were drawn.
    """

    factors: dict[str, Array]
    decay: Float[Array, ""]
    before: Array


def _rounded(updates: Tree) -> tuple[Tree, dict[str, Array], Array]:
    """The updates with factors that bfloat16 holds exactly, these by path, and the decay that all of them share."""

    def is_low_rank(node: Any) -> bool:
        return isinstance(node, LowRank)

    def one(node: Any) -> Any:
        # Not a conversion there and back, which compilers may leave out.
        return replace(node, factor=jax.lax.reduce_precision(node.factor, 8, 7)) if is_low_rank(node) else node

    updates = jax.tree.map(one, updates, is_leaf=is_low_rank)
    nodes = jax.tree.leaves_with_path(updates, is_leaf=is_low_rank)
    found = {path_string(path): node for path, node in nodes if is_low_rank(node)}
    factors = {path: node.factor.astype(jnp.bfloat16) for path, node in found.items()}
    return updates, factors, next(iter(found.values())).decay


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
        "importance/deviation": mean.deviation,
        "importance/max_deviation": sums.max_deviation,
        "kl/batch": mean.step_kl,
        "kl/reference": mean.reference_kl,
        "kl/mismatch": sums.mismatch / jnp.maximum(sums.ended_tokens, 1.0),
    }


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
    sends: bool = False,
) -> Callable[[TrainState, Tree, Batch], tuple[Any, ...]]:
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
      sends: round factors to bfloat16 before they are applied, and return them as a third value, a `Sent`.

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
        total_tokens = jnp.sum(valid_tokens(batch), dtype=jnp.float32)
        total_sequences = jnp.sum(batch.valid, dtype=jnp.float32)
        packed = batch.packing is not None
        whole = policy.everywhere(batch) if packed else batch

        def weights_of(rows: Batch) -> Float[Array, " n"]:
            longest = rows.rollout_logprobs.shape[1]
            return token_weights(loss.aggregation, rows.lengths, longest, total_tokens, total_sequences)

        def of_rows(rows: Batch, into: Tree = None) -> tuple[LossSums, Tree]:
            mask = valid_tokens(rows)
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
                answer_mean=lambda values, mask: answer(slots.means(values, mask, whole.tokens.shape[0])),
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
                return over_packed_rows(function, batch, initial, together)
            return over_micro_batches(function, batch, micro_batch, initial, together)

        def together(total: tuple[LossSums, Tree], part: tuple[LossSums, Tree]) -> tuple[LossSums, Tree]:
            return add_sums(total[0], part[0]), add_trees(total[1], part[1])

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
        sums, _ = passes(lambda rows: (one(rows, into)[0], None), (sums, None))
        return sums, jax.tree.map(jax.freeze, into)

    def update(state: TrainState, frozen: Tree, batch: Batch) -> tuple[Any, ...]:
        train = state.train
        step = sketch_count(state.opt_state) if sketched else jnp.zeros((), jnp.int32)
        sums, grads = gradient(train, frozen, batch, step)
        metrics = _means(sums) | {"grad/norm": optax.tree.norm(grads), "padding/share": padding_share(batch)}
        average = state.mismatch
        if mismatch:  # where no answer ended by itself there is nothing to observe
            observed = mismatch_average(average, metrics["kl/mismatch"])
            average = jnp.where(sums.ended_tokens > 0, observed, average)

        probe = take(batch, batch.probe)
        longest = min(probe.tokens.shape[1], policy.prompt_width + probe_tokens)
        probe = probe._replace(
            tokens=probe.tokens[:, :longest],
            lengths=jnp.minimum(probe.lengths, longest - policy.prompt_width),
        )
        probe_mask = completion_mask(probe.lengths, longest - policy.prompt_width)
        limit = micro_batch if batch.packing is None else batch.packing.source.shape[1]  # rows alive at a time
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

            size = turn_size(probe.tokens.shape[0], limit)
            total, tokens = over_micro_batches(of_rows, probe, size, (jnp.zeros(()), jnp.zeros(())))
            return total / jnp.maximum(tokens, 1.0)

        exact = looped._replace(model=looped.model.replace(compute_dtype="float32"))
        checked = take(probe, jnp.arange(check_responses))

        def check_hidden(train: Tree) -> Float[Array, "r c d"]:
            params, size = merge(train, frozen), turn_size(check_responses, limit)
            turns = {k: v.reshape(-1, size, *v.shape[1:]) for k, v in row_fields(checked).items()}
            found = jax.lax.map(lambda rows: exact.hidden_head(params, checked._replace(**rows)).hidden, turns)
            return found.reshape(-1, *found.shape[2:])

        def check_head(train: Tree) -> Float[Array, "d v"]:
            head = policy.model.head(merge(train, frozen))[:, : policy.vocab_size]
            return constrain(head, policy.model.mesh, None, "logits")

        def check_before(train: Tree) -> tuple[Array, Array | None]:
            """What the update writes over: the head only where it is trained."""
            name = "embed_tokens" if policy.model.config.tie_word_embeddings else "lm_head"
            trained = any(path.startswith(f"{name}/") for path, _ in leaves_with_paths(train))
            return check_hidden(train), check_head(train) if trained else None

        if check_responses:
            # Taken before the weights are written over; the branch costs nothing on the other updates.
            shapes = jax.eval_shape(check_before, train)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            before = jax.lax.cond(batch.check, check_before, lambda _: zeros, train)
            # One after the other: the compiler would rather copy all weights than look at them before they are changed.
            before, train = jax.lax.optimization_barrier((before, train))

        updates, opt_state = tx.update(grads, state.opt_state, train, predict_kl=predicted, kl_mismatch=average)
        sent: tuple[Sent, ...] = ()
        if sends:
            updates, factors, decay = _rounded(updates)
            sent = (Sent(factors, jnp.asarray(decay, jnp.float32), step),)
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
        return TrainState(new_train, opt_state, average, residual), metrics, *sent

    out = None if state_shardings is None else (state_shardings, None, *((None,) if sends else ()))
    return jax.jit(update, donate_argnums=0, out_shardings=out)
