"""GaLore from optax, for parameters whose layers are stacked: each matrix is projected by itself.

`optax.contrib.galore` projects matrices and treats any other array as unprojected Adam would, a stack
`[layers, k, d]` too. Here every matrix of a stack has a state of its own, and they are updated one after the
other, so that the singular value decomposition of no more than one of them exists at a time, and none at all
between two projections.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from logra_jax._shapes import Array
from logra_jax.errors import UserError
from logra_jax.optim.alias import partition_targets
from logra_jax.optim.apply import in_place
from logra_jax.optim.projection import from_stack, to_stack
from logra_jax.optim.rounding import in_float32
from logra_jax.optim.spec import Matrix, SketchSpec, leaves_with_paths


def stacked_galore(
    spec: SketchSpec,
    learning_rate: Any,
    *,
    interval: int = 200,
    scale: float = 0.25,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Any = 0.0,
    dense: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam within the leading singular vectors of the gradient, for every target of `spec` (arXiv 2403.03507).

    For a matrix with gradient G and P its first `spec.rank` singular vectors on the longer side, found anew
    every `interval` updates:

        R = P^T G                     W <- W - learning_rate (scale P Adam(R) + weight_decay W)

    It is `partition(per_matrix(optax.contrib.galore(...)), dense)`. Updates are dense and float32; so is the
    state. The paper's settings are an interval of 200 and a scale of 0.25.

    Args:
      spec: targets and rank; nothing else of it is used.
      learning_rate: number or schedule.
      dense: optimizer of the other trained leaves; None: AdamW with the same numbers.
    """
    adam = optax.scale_by_adam(b1, b2, eps)
    inner = optax.contrib.galore(learning_rate, spec.rank, interval, scale, adam, weight_decay)
    if dense is None:
        dense = in_float32(optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay))
    return partition_targets({"sketched": per_matrix(in_float32(inner), spec), "dense": dense}, spec)


def per_matrix(inner: optax.GradientTransformation, spec: SketchSpec) -> optax.GradientTransformationExtraArgs:
    """`inner` as if each matrix of each leaf, a target of `spec`, were a parameter tree of its own.

    The state is that of `inner`, with a tree like the parameters in place of every array, whose leaves have
    the stack axes of theirs in front. Matrices are updated one after the other in place of their gradients: a
    `lax.cond` of `inner` stays one, which it would not under `vmap`.

    Raises:
      UserError: at init, a leaf is no target.
    """
    inner = optax.with_extra_args_support(inner)
    one_state: Any = jax.tree.structure(jax.eval_shape(inner.init, jax.ShapeDtypeStruct((2, 2), jnp.float32)))

    def init_one(matrix: Matrix, leaf: Any) -> Any:
        if not matrix.batch:
            return inner.init(to_stack(leaf, matrix)[0])
        states = jax.vmap(inner.init)(to_stack(leaf, matrix))
        return jax.tree.map(lambda x: x.reshape(*matrix.batch, *x.shape[1:]), states)

    def update_one(matrix: Matrix, grad: Any, state: Any, leaf: Any, extra_args: dict[str, Any]) -> tuple[Array, Any]:
        def step(cores: tuple[Array, ...], weight: Any) -> tuple[Array, ...]:
            grad, *own = cores
            update, new = inner.update(grad, one_state.unflatten(own), weight, **extra_args)
            return (update, *jax.tree.leaves(new))

        gradients = to_stack(grad, matrix).astype(jnp.float32)
        weights = None if leaf is None else to_stack(leaf, matrix)
        leaves = jax.tree.leaves(state)
        if not matrix.batch:
            update, *new = step((gradients[0], *leaves), None if weights is None else weights[0])
            return from_stack(update[None], matrix), one_state.unflatten(new)
        flat = (x.reshape(-1, *x.shape[len(matrix.batch) :]) for x in leaves)
        update, *new = in_place(step, (gradients, *flat), weights)
        new = [x.reshape(old.shape) for x, old in zip(new, leaves, strict=True)]
        return from_stack(update, matrix), one_state.unflatten(new)

    def init_fn(params: Any) -> Any:
        outer: Any = jax.tree.structure(params)
        matrices = spec.matrices(params)
        for path, _ in leaves_with_paths(params):
            if path not in matrices:
                raise UserError(f"per_matrix: {path} is no target; leave it to another link, with optax.partition")
        states = [init_one(matrices[path], leaf) for path, leaf in leaves_with_paths(params)]
        return jax.tree.transpose(outer, one_state, outer.unflatten(states))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        outer: Any = jax.tree.structure(updates)
        matrices = spec.matrices(updates)
        states = outer.flatten_up_to(jax.tree.transpose(one_state, outer, state))
        weights = [None] * len(states) if params is None else outer.flatten_up_to(params)
        news = [
            update_one(matrices[path], grad, own, weight, extra_args)
            for (path, grad), own, weight in zip(leaves_with_paths(updates), states, weights, strict=True)
        ]
        new_states = jax.tree.transpose(outer, one_state, outer.unflatten([new for _, new in news]))
        return outer.unflatten([update for update, _ in news]), new_states

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
