"""The first link of a chain: dense gradients of the targets become sketches, sketches pass."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from logra_jax._shapes import Array, Int
from logra_jax.errors import UserError
from logra_jax.optim.apply import LowRank
from logra_jax.optim.links import find_states, needs_params
from logra_jax.optim.projection import sketch_leaf, weight_keys
from logra_jax.optim.spec import Matrix, SketchSpec, map_leaves, sketch_zeros


class SketchState(NamedTuple):
    """Updates seen so far, int32: the number that keys the projections of the next one."""

    count: Any


def sketch(spec: SketchSpec) -> optax.GradientTransformationExtraArgs:
    """Turns the dense gradient G of every target into its sketch A G `[..., r, d]`, float32.

    A leaf that has the sketch's shape already (from `sketched_value_and_grad`) passes, cast to float32.
    Leaves that are not targets pass untouched. A is that of the update this state counts.

    Raises:
      UserError: a target's update has neither shape, or has been lifted already.
    """

    def init_fn(params: Any) -> SketchState:
        spec.matrices(params)
        return SketchState(jnp.zeros((), jnp.int32))

    def update_fn(updates: Any, state: SketchState, params: Any = None, **extra_args: Any) -> Any:
        del extra_args

        def one(matrix: Matrix | None, leaf: Any, update: Any) -> Any:
            if matrix is None:
                return update
            if isinstance(update, LowRank):
                raise UserError(f"sketch: the update of {matrix.path} is lifted already; lift comes last in a chain")
            if update.shape == matrix.sketch_shape(spec.rank):
                return update.astype(jnp.float32)
            if update.shape == matrix.shape:
                return sketch_leaf(update, weight_keys(spec, matrix, state.count), matrix, spec)
            raise UserError(
                f"sketch: the update of {matrix.path} has shape {update.shape}; expected a gradient "
                f"{matrix.shape} or a sketch {matrix.sketch_shape(spec.rank)}"
            )

        params = needs_params("sketch", params)
        new = map_leaves(one, spec.matrices(params), params, updates)
        return new, SketchState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def sketched(inner: optax.GradientTransformation, spec: SketchSpec) -> optax.GradientTransformationExtraArgs:
    """`inner` for use after `sketch(spec)`: it sees sketch-shaped stand-ins for the targets' parameters.

    `optax.chain` hands the full parameters to every link's `init`, so a transformation with buffers like the
    parameters (`optax.scale_by_adam`) would make full ones. The stand-ins are zeros; a transformation that
    reads the values of parameters (weight decay, a trust ratio) sees those zeros at the targets. Its buffers go on
    over a redraw, after which they hold sketches by other projections: use `refresh=0` with such a transformation.
    """
    inner = optax.with_extra_args_support(inner)

    def stand_ins(params: Any) -> Any:
        return sketch_zeros(params, spec.matrices(params), spec.rank)

    def init_fn(params: Any) -> Any:
        return inner.init(stand_ins(params))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return inner.update(updates, state, None if params is None else stand_ins(params), **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def sketch_count(state: Any) -> Int[Array, ""]:
    """Number of the coming update, int32, from the `sketch` link anywhere in an optimizer state.

    Raises:
      UserError: there is no `sketch` link.
    """
    found = find_states(state, SketchState)
    if not found:
        raise UserError("sketch_count: this optimizer state has no sketch(...) link")
    return found[0].count
