"""The last link of a chain, the low-rank updates it emits, and how they reach the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax._shapes import Array
from logra_jax.errors import UserError
from logra_jax.optim.links import needs_params, value_at
from logra_jax.optim.projection import expand_leaf, expand_matrix, from_stack, to_stack, weight_keys
from logra_jax.optim.rounding import join, needs_rounding, refuse_plain, round_stochastic, split
from logra_jax.optim.spec import Matrix, SketchSpec, map_leaves, path_string


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["factor", "key_data", "decay"],
    meta_fields=["distribution", "in_axes", "out_axes"],
)
@dataclass(frozen=True, eq=False)
class LowRank:
    """The update W <- (1 - decay) W + A^T D of one leaf: a pytree node in place of the full-size update.

    factor D: float32 `[..., r, d]`, downhill and scaled. key_data: uint32 `[..., 2]`, the keys of A. decay:
    float32 scalar. An engine that holds W needs no more than these, A's distribution, and
    `logra_jax.optim.twin`.
    """

    factor: Any
    key_data: Any
    decay: Any
    distribution: str
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]

    def matrix(self, shape: tuple[int, ...]) -> Matrix:
        """How the matrices lie in the leaf of that shape."""
        return Matrix("", (), shape, self.in_axes, self.out_axes)

    def __radd__(self, leaf: Any) -> Any:
        """What `optax.apply_updates` comes to, which cannot add a factor to a weight."""
        raise UserError(
            "optax.apply_updates: this chain ends in low-rank updates; use logra_jax.apply_updates, or for updates in "
            "full lift(spec, dense=True)"
        )


class LiftState(NamedTuple):
    """Updates so far, int32."""

    count: Any


def lift(
    spec: SketchSpec, weight_decay: Any = 0.0, learning_rate: Any = 1.0, dense: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Sketch-shaped directions become updates of the weights; stands last.

        W <- (1 - learning_rate weight_decay) W + A^T D

    D comes in downhill and scaled: neither the learning rate nor alpha of the KL link is applied to it here,
    and the decay, which has full rank, is not scaled by alpha. Leaves that are not targets pass, without
    decay.

    Args:
      spec: that of the sketches.
      weight_decay, learning_rate: numbers or schedules of the update number; only their product counts.
      dense: emit full-shape float32 updates for `optax.apply_updates` (convenient, not free of memory)
        instead of `LowRank` nodes for `logra_jax.apply_updates`.

    Neither kind passes `optax.MultiSteps` or `optax.apply_if_finite` (they want updates shaped like the
    gradients): add up sketches of one step instead, and use `guard_nonfinite`.

    Raises:
      UserError: an update is not sketch-shaped.
    """

    def init_fn(params: Any) -> LiftState:
        spec.matrices(params)
        return LiftState(jnp.zeros((), jnp.int32))

    def update_fn(updates: Any, state: LiftState, params: Any = None, **extra_args: Any) -> Any:
        del extra_args
        params = needs_params("lift", params)
        decay = value_at(weight_decay, state.count) * value_at(learning_rate, state.count)

        def one(matrix: Matrix | None, leaf: Any, update: Any) -> Any:
            if matrix is None:
                return update
            if isinstance(update, LowRank):
                raise UserError(f"lift: the update of {matrix.path} is lifted already; use one lift, at the end")
            if update.shape != matrix.sketch_shape(spec.rank):
                raise UserError(
                    f"lift: the update of {matrix.path} has shape {update.shape}, not that of a sketch "
                    f"{matrix.sketch_shape(spec.rank)}; put sketch(spec) first in the chain"
                )
            keys = weight_keys(spec, matrix, state.count)
            if dense:
                full = expand_leaf(update.astype(jnp.float32), keys, matrix, spec.distribution)
                return full - decay * leaf.astype(jnp.float32)
            factor = update.astype(jnp.float32)
            return LowRank(factor, keys, decay, spec.distribution, matrix.in_axes, matrix.out_axes)

        new = map_leaves(one, spec.matrices(params), params, updates)
        return new, LiftState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def apply_updates(train: Any, updates: Any, shardings: Any = None, *, keys: Any = None) -> Any:
    """The new parameters; low-rank updates are added matrix by matrix, in place where `train` is donated.

    Arithmetic is float32, the result has the parameter's dtype. Full-shape updates are added as
    `optax.apply_updates` does; None stays None.

    Args:
      train, updates: parameters, and what the chain made of their gradients.
      shardings: a tree like `train`, of how its leaves lie on a mesh; a low-rank update is then formed part by part
        where its weights are. Needed inside `jax.jit`, where an array does not know.
      keys: from `rounding_keys`, to round bfloat16 parameters at random and without bias. Their other choice
        is `apply_with_residual`.

    Raises:
      UserError: a parameter is bfloat16 and there are no keys; to the nearest, small updates would be lost.
    """
    parts = _apply(train, updates, keys=keys, shardings=shardings)
    return jax.tree.map(lambda leaf, new: None if leaf is None else new[0], train, parts, is_leaf=_is_none)


def apply_with_residual(train: Any, residual: Any, updates: Any, shardings: Any = None) -> tuple[Any, Any]:
    """`apply_updates` for bfloat16 parameters whose lost digits are kept: new parameters, new residual.

    The update is added to parameter + residual in float32, and the sum split again, in place where both are
    donated.

    Args:
      train, updates, shardings: as in `apply_updates`.
      residual: like `train`, from `init_residual` or the previous call.
    """
    parts = _apply(train, updates, residual=residual, shardings=shardings)

    def pick(place: int) -> Any:
        return jax.tree.map(
            lambda leaf, new: None if leaf is None or len(new) <= place else new[place], train, parts, is_leaf=_is_none
        )

    return pick(0), pick(1)


def _is_none(node: Any) -> bool:
    return node is None


def _apply(train: Any, updates: Any, keys: Any = None, residual: Any = None, shardings: Any = None) -> Any:
    """A tuple (new parameter,) or (new parameter, new residual) for each leaf of `train`."""
    blank = jax.tree.map(lambda leaf: None, train)

    def one(path: Any, leaf: Any, update: Any, key: Any, low: Any, sharding: Any) -> Any:
        if leaf is None:
            return None
        if needs_rounding(leaf) and key is None and low is None:
            refuse_plain(path)
        stored = (jnp.asarray(leaf),) if low is None else (jnp.asarray(leaf), low)
        if isinstance(update, LowRank):
            return _add_low_rank(stored, jax.tree.map(jnp.asarray, update), key, sharding)
        if update is None or isinstance(update, optax.MaskedNode):
            raise UserError(f"apply_updates: {path_string(path)} has no update, but {type(update).__name__}")
        if jnp.shape(update) != jnp.shape(leaf):
            raise UserError(
                f"apply_updates: the update of {path_string(path)} has shape {jnp.shape(update)}, the weight "
                f"{jnp.shape(leaf)}; where that is a sketch, end the chain with lift(spec)"
            )
        return _add_dense(stored, jnp.asarray(update), key)

    return jax.tree.map_with_path(
        one,
        train,
        updates,
        blank if keys is None else keys,
        blank if residual is None else residual,
        blank if shardings is None else shardings,
        is_leaf=_is_none,
    )


def _matrix_sharding(matrix: Matrix, sharding: Any) -> NamedSharding | None:
    """Of one matrix `[k, d]` of a leaf, where each of the two is a single axis."""
    if not isinstance(sharding, NamedSharding) or len(matrix.in_axes) != 1 or len(matrix.out_axes) != 1:
        return None
    axes = (*sharding.spec, *(None,) * (len(matrix.shape) - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(axes[matrix.in_axes[0]], axes[matrix.out_axes[0]]))


def _read(stored: tuple[Array, ...]) -> Array:
    """The float32 value of a parameter, with its residual if it has one."""
    return join(*stored) if len(stored) == 2 else stored[0].astype(jnp.float32)


def _write(value: Array, stored: tuple[Array, ...], key: Any) -> tuple[Array, ...]:
    """A float32 value in the form that `stored` has."""
    if len(stored) == 2:
        return split(value)
    if needs_rounding(stored[0]):
        return (round_stochastic(value, key),)
    return (value.astype(stored[0].dtype),)


def in_place(new_core: Callable[..., tuple[Array, ...]], stacks: tuple[Array, ...], *others: Any) -> Any:
    """new_core(cores, *others) for each place of the stacks, written over them.

    A loop that writes into its carry reuses the donated buffers; a scan would hold all weights twice.
    """

    def body(i: Array, buffers: tuple[Array, ...]) -> tuple[Array, ...]:
        def take(x: Array) -> Array:
            return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)

        # Were reading and writing fused, XLA would copy the stack, lest it write over what it still reads.
        cores = lax.optimization_barrier(jax.tree.map(take, buffers))
        new = new_core(cores, *jax.tree.map(take, others))
        return tuple(lax.dynamic_update_index_in_dim(b, n, i, 0) for b, n in zip(buffers, new, strict=True))

    return lax.fori_loop(0, stacks[0].shape[0], body, stacks)


def _add_dense(stored: tuple[Array, ...], update: Array, key: Any) -> tuple[Array, ...]:
    def add(stored: tuple[Array, ...], update: Array, key: Any) -> tuple[Array, ...]:
        return _write(_read(stored) + update.astype(jnp.float32), stored, key)

    # One matrix at a time, so that their sums in float32 never exist together.
    if len(stored) == 2 and update.ndim > 2:
        return in_place(add, stored, update, key)
    if key is None or key.ndim == 1:
        return add(stored, update, key)
    if update.shape[0] == key.shape[0]:
        return in_place(add, stored, update, key)
    # Matrices stacked along other axes: the first one's key has bits enough for all of them.
    return add(stored, update, key[0])


def _add_low_rank(stored: tuple[Array, ...], update: LowRank, key: Any, sharding: Any) -> tuple[Array, ...]:
    shape = stored[0].shape
    matrix = update.matrix(shape)
    part = _matrix_sharding(matrix, sharding)
    keep = 1 - update.decay

    def add(stored: tuple[Array, ...], factor: Array, key_data: Array, key: Any) -> tuple[Array, ...]:
        """One matrix in the layout of `stored`, stack axes gone."""
        change = expand_matrix(factor, key_data, matrix.k, update.distribution, part)
        if leading:
            change = from_stack(change[None], update.matrix(stored[0].shape))
        return _write(keep * _read(stored) + change, stored, key)

    n = len(matrix.batch_axes)
    leading = matrix.batch_axes == tuple(range(n))
    if not matrix.batch:
        return add(stored, update.factor, update.key_data, key)
    stacks = tuple(x.reshape(-1, *shape[n:]) if leading else to_stack(x, matrix) for x in stored)
    factors = update.factor.reshape(-1, *update.factor.shape[-2:])
    keys = None if key is None else key.reshape(-1, 2)
    stacks = in_place(add, stacks, factors, update.key_data.reshape(-1, 2), keys)
    return tuple(x.reshape(shape) if leading else from_stack(x, matrix) for x in stacks)


def sketch_shardings(spec: SketchSpec, train: Any, shardings: Any) -> Any:
    """Shardings of gradients as `sketched_value_and_grad` returns them, on the mesh of the parameters.

    A sketch `[..., r, d]` has lost the inputs of its kernel, so d is split over the mesh axes of both sides, as
    far as they divide it. Dense gradients lie as their parameters do.

    Args:
      spec: that of the sketches.
      train: parameters, or anything with their shapes.
      shardings: a tree like `train`.
    """

    def one(matrix: Matrix | None, leaf: Any, sharding: Any) -> Any:
        if matrix is None or not isinstance(sharding, NamedSharding):
            return sharding
        axes = (*sharding.spec, *(None,) * (leaf.ndim - len(sharding.spec)))
        split = widest(sharding.mesh, matrix.d, *(axes[a] for a in (*matrix.out_axes, *matrix.in_axes)))
        return NamedSharding(sharding.mesh, PartitionSpec(*(axes[a] for a in matrix.batch_axes), None, split))

    return map_leaves(one, spec.matrices(train), train, shardings)


def state_shardings(tx: optax.GradientTransformation, train: Any) -> Any:
    """Shardings for the state of `tx`, for `jax.jit(tx.init, out_shardings=state_shardings(tx, train))`.

    A state leaf whose key path ends in a parameter's path follows that parameter: one of the same shape has
    its sharding, and one without its input axis (second moments of rows) has it with that axis taken out. One
    with r in place of an axis of the matrix (momentum of sketches, projectors) has the other axis split over the
    mesh axes of both, as sketches are. Everything else, counters above all, is replicated over the same mesh.

    Args:
      tx: any optax transformation, chains, `partition`, `masked` and `inject_hyperparams` included.
      train: arrays, or `ShapeDtypeStruct`s that carry shardings.
    """
    params = [(tuple(path), leaf) for path, leaf in jax.tree.leaves_with_path(train)]
    params.sort(key=lambda pair: -len(pair[0]))  # the longest path that fits is the leaf's own
    meshes = [x.sharding.mesh for _, x in params if isinstance(x.sharding, NamedSharding)]
    replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else params[0][1].sharding

    def one(path: Any, leaf: Any) -> Any:
        for own, param in params:
            if tuple(path)[len(path) - len(own) :] == own:
                return _follow(param, leaf.shape) or replicated
        return replicated

    return jax.tree.map_with_path(one, jax.eval_shape(tx.init, train))


def _follow(param: Any, shape: tuple[int, ...]) -> Any:
    """The parameter's sharding for a state leaf of a related shape, None for an unrelated one."""
    own = tuple(param.shape)
    if shape == own:
        return param.sharding
    if len(own) < 2 or not isinstance(param.sharding, NamedSharding):
        return None
    mesh = param.sharding.mesh
    axes: tuple[Any, ...] = (*param.sharding.spec, *(None,) * (len(own) - len(param.sharding.spec)))
    *stack, rows, columns = axes
    if shape == (*own[:-2], own[-1]):
        return NamedSharding(mesh, PartitionSpec(*stack, columns))
    if len(shape) != len(own) or shape[:-2] != own[:-2]:
        return None
    by_rows, by_columns = widest(mesh, own[-2], rows, columns), widest(mesh, own[-1], columns, rows)
    if shape[-1] == own[-1]:
        return NamedSharding(mesh, PartitionSpec(*stack, None, by_columns))
    if shape[-2] in own[-2:]:
        return NamedSharding(mesh, PartitionSpec(*stack, by_rows if shape[-2] == own[-2] else by_columns, None))
    return None


def widest(mesh: Any, size: int, *places: Any) -> tuple[str, ...]:
    """All mesh axes of `places`, as far as they divide a dimension of that size."""
    split: tuple[str, ...] = ()
    for place in places:
        for name in (place,) if isinstance(place, str) else place or ():
            if size % prod(mesh.shape[n] for n in (*split, name)) == 0:
                split = (*split, name)
    return split
