"""The whole optimizer, composed."""

from typing import Any

import jax
import optax

from logra_jax.errors import UserError
from logra_jax.optim.apply import lift
from logra_jax.optim.guard import guard_nonfinite
from logra_jax.optim.links import needs_params
from logra_jax.optim.predicted_kl import scale_by_predicted_kl
from logra_jax.optim.row_adam import scale_by_row_adam
from logra_jax.optim.sketching import sketch
from logra_jax.optim.spec import SketchSpec, leaves_with_paths
from logra_jax.optim.update_ratio import scale_by_update_ratio


def logra(
    spec: SketchSpec,
    *,
    learning_rate: Any = None,
    update_ratio: Any = None,
    b1: float = 0.0,
    b2: float = 0.95,
    eps: float = 1e-8,
    preserve_norm: bool | None = None,
    kl_budget: Any = None,
    alpha_max: float = 3.0,
    weight_decay: Any = 0.0,
    dense: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LoGRA: low-rank gradient sketches, RowAdam, and steps bounded by the KL divergence they predict.

    For a weight W `[k, d]` with gradient G, a random A `[r, k]`, E[A^T A] = I, redrawn every `spec.refresh`
    updates:

        S = A G                                                          sketch                    [r, d]
        v <- b2 v + (1 - b2) mean_r(S^2)                                 row_adam                  [d]
        D = S / (sqrt(v / (1 - b2^t)) + eps)                             plain form
        D <- -learning_rate D      or      D <- -D rho ||W|| / ||A^T D||  over all targets together
        q = 1/2 E_p[(z_dot - E_p z_dot)^2],  z_dot = d logits / dW [A^T D]
        alpha = min(alpha_max, sqrt(delta / q))                          predicted KL
        W <- (1 - (learning_rate or rho) weight_decay) W + alpha A^T D   lift, then `apply_updates`

    It is `guard_nonfinite(chain(sketch, scale_by_row_adam, scale_by_update_ratio or scale_by_learning_rate,
    scale_by_predicted_kl, lift))`; the maths is in those. Nothing that rescales follows the KL link.

    Reference: "LoGRA: Scaling LLM Reinforcement Learning with Low-Rank Gradient Sketches", arXiv 2610.06647.

    Args:
      spec: targets and projections.
      learning_rate: number or schedule, or
      update_ratio: rho, number or schedule: exactly one of the two.
      b1: momentum of the sketches between redraws; 0 for none.
      b2, eps, preserve_norm: of RowAdam; preserve_norm None means with update_ratio only, as in the paper.
      kl_budget: delta, nats per token, number or schedule; None leaves the KL link out.
      alpha_max: largest alpha.
      weight_decay: decoupled, of the targets, times learning_rate or update_ratio; not part of q.
      dense: a whole optax optimizer (`optax.adamw(1e-6)`) for the other trained leaves. KL link and alpha
        cover them.

    Raises:
      UserError: both or neither of learning_rate and update_ratio; at init, leaves that are not targets
        without `dense`.
    """
    if (learning_rate is None) == (update_ratio is None):
        given = "both are" if learning_rate is not None else "neither is"
        raise UserError(f"logra: set exactly one of learning_rate and update_ratio; {given} set")
    by_ratio = update_ratio is not None
    steps = [
        sketch(spec),
        scale_by_row_adam(b2, eps, b1, by_ratio if preserve_norm is None else preserve_norm, spec),
        scale_by_update_ratio(update_ratio, spec) if by_ratio else optax.scale_by_learning_rate(learning_rate),
    ]
    inner = partition_targets({"sketched": optax.chain(*steps), "dense": dense or _refuse()}, spec)
    link = [] if kl_budget is None else [scale_by_predicted_kl(kl_budget, alpha_max)]
    last = lift(spec, weight_decay, update_ratio if by_ratio else learning_rate)
    return guard_nonfinite(optax.chain(inner, *link, last))


def partition_targets(
    transforms: dict[str, optax.GradientTransformation], spec: SketchSpec
) -> optax.GradientTransformationExtraArgs:
    """`optax.partition` of "sketched" (targets) and "dense" leaves, with the labels of the parameters it is given, as
    updates may have the shapes of sketches."""

    def by_labels(params):
        return optax.partition(transforms, spec.labels(params))

    def init_fn(params: Any) -> Any:
        return by_labels(params).init(params)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return by_labels(needs_params("partition", params)).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _refuse() -> optax.GradientTransformation:
    """In place of the optimizer for dense leaves where none was given."""

    def init_fn(params: Any) -> optax.EmptyState:
        if jax.tree.leaves(params):
            first = leaves_with_paths(params)[0][0]
            raise UserError(
                f"logra: {first} is trained but is no target; pass dense=, an optax optimizer for such "
                "leaves, or freeze them (train, frozen = spec.split(params))"
            )
        return optax.EmptyState()

    return optax.GradientTransformation(init_fn, lambda updates, state, params=None: (updates, state))
