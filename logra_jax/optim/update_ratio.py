"""A step length as a fraction of the weights, in place of a learning rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax._shapes import Array, Float
from logra_jax.errors import UserError
from logra_jax.optim.links import needs_params, value_at
from logra_jax.optim.projection import HIGHEST, gram, map_stack, weight_keys
from logra_jax.optim.spec import Matrix, SketchSpec, map_leaves


class UpdateRatioState(NamedTuple):
    """Updates so far, int32."""

    count: Any


def scale_by_update_ratio(ratio: Any, spec: SketchSpec) -> optax.GradientTransformationExtraArgs:
    """Turns all directions downhill, scaled by one factor so that ||dW|| = ratio ||W|| over all leaves.

    The length of a lifted sketch is ||D A||_F^2 = <D (A A^T), D>, taken with the r x r Gram matrix of each
    projection; the full-size product is never formed. Leaves that are not targets count with their ordinary
    norms. If all directions are zero they stay zero.

    Args:
      ratio: a number, or a schedule of the update number (from 0).
      spec: that of the sketches.
    """

    def init_fn(params: Any) -> UpdateRatioState:
        spec.matrices(params)
        return UpdateRatioState(jnp.zeros((), jnp.int32))

    def update_fn(updates: Any, state: UpdateRatioState, params: Any = None, **extra_args: Any) -> Any:
        del extra_args
        params = needs_params("scale_by_update_ratio", params)
        largest = _largest(updates)
        unit = jnp.where(largest > 0, largest, 1.0)

        def square(matrix: Matrix | None, leaf: Any, update: Any) -> Array:
            scaled = update.astype(jnp.float32) / unit
            if matrix is None or update.shape == matrix.shape:
                return jnp.sum(jnp.square(scaled))
            if update.shape != matrix.sketch_shape(spec.rank):
                raise UserError(
                    f"scale_by_update_ratio: the update of {matrix.path} has shape {update.shape}, not that "
                    f"of a sketch {matrix.sketch_shape(spec.rank)}"
                )
            return _lifted_square(scaled, weight_keys(spec, matrix, state.count), matrix, spec)

        squares = jax.tree.leaves(map_leaves(square, spec.matrices(params), params, updates))
        length = jnp.sqrt(_total(squares))
        own = [jnp.sum(jnp.square(w.astype(jnp.float32))) for w in jax.tree.leaves(params)]
        weights = jnp.sqrt(_total(own))
        wanted = value_at(ratio, state.count) * weights
        # Directions are divided by their largest entry first, so that none leaves the range of float32 here.
        factor = jnp.where(length > 0, wanted / jnp.where(length > 0, length, 1.0), 0.0)
        new = jax.tree.map(lambda u: (u.astype(jnp.float32) / unit * -factor).astype(u.dtype), updates)
        return new, UpdateRatioState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _lifted_square(d: Float[Array, "*stack r d"], keys: Array, matrix: Matrix, spec: SketchSpec) -> Float[Array, ""]:
    """Squared norm of A^T D over a stack, one r x r Gram matrix at a time."""

    def one(factor: Array, key: Array) -> Array:
        products = jax.lax.dot(gram(key, spec.rank, matrix.k, spec.distribution), factor, precision=HIGHEST)
        return jnp.sum(products * factor)

    return jnp.sum(map_stack(one, d.reshape(-1, *d.shape[-2:]), keys.reshape(-1, 2)))


def _largest(tree: Any) -> Float[Array, ""]:
    peaks = [jnp.max(jnp.abs(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
    return jnp.max(jnp.stack(peaks)) if peaks else jnp.zeros((), jnp.float32)


def _total(parts: list[Array]) -> Float[Array, ""]:
    return jnp.sum(jnp.stack(parts)) if parts else jnp.zeros((), jnp.float32)
