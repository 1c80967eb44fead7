"""RowAdam: one second moment per output row of a weight."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax._shapes import Array
from logra_jax.errors import UserError
from logra_jax.optim.spec import SketchSpec, map_leaves, sketch_zeros


class RowAdamState(NamedTuple):
    """count: int32, updates so far. rms: tree of float32 `[..., d]`, the root of the second moment v.

    v itself leaves float32 where sketches are below 1e-19 or above 1e19; its root does not. momentum: tree
    of float32 `[..., r, d]`, or None without.
    """

    count: Any
    rms: Any
    momentum: Any

    @property
    def v(self) -> Any:
        """The second moment itself, `[..., d]`."""
        return jax.tree.map(jnp.square, self.rms)


def scale_by_row_adam(
    b2: Any = 0.95,
    eps: Any = 1e-8,
    b1: Any = 0.0,
    preserve_norm: bool = False,
    spec: SketchSpec | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Divides every output row of a sketch by the running root mean square of that row (arXiv 2610.06647).

    With S `[..., r, d]` (a row of the paper's matrices is a column here) and t counting from 1:

        v <- b2 v + (1 - b2) mean_r(S^2)        rms_t = sqrt(v / (1 - b2^t))
        plain:            D = S / (rms_t + eps)
        norm-preserving:  D = S / (rms_t + max(eps mean(rms_t), tiny)), times ||S||_F / ||D||_F, per matrix

    v belongs to output rows, so it outlives the redraw of a projection. With b1 the numerator S becomes
    M <- b1 M + (1 - b1) S, divided by 1 - b1^n, n counted since the projection was drawn; M starts anew
    with it. Dense gradients may take the place of sketches, r is k then; without a spec momentum never starts anew.

    Sums are scaled so that sketches of any size that float32 holds, dead rows and zero sketches give finite
    results; a zero sketch gives exactly zero. A leaf with fewer than two axes is treated entry by entry.

    Args:
      b2, eps, b1: numbers, or float32 scalars from `optax.inject_hyperparams`. There, keep b1 = 0 a static
        argument.
      preserve_norm: the norm-preserving form.
      spec: needed for sketches with b1 > 0 (for `refresh`), and for targets whose matrix is not the last two axes.

    Raises:
      UserError: b1 beside sketches that are redrawn at every update, where momentum starts anew each time; updates of
        another shape than `init` expected: sketches with b1 and without a spec are.
    """
    with_momentum = not (isinstance(b1, int | float) and b1 == 0)
    if isinstance(b1, int | float) and b1 != 0 and spec is not None and spec.refresh == 1:  # an array may hold 0
        raise UserError(
            "scale_by_row_adam: b1 does nothing where projections are redrawn at every update (refresh=1), for then "
            "momentum starts anew each time: give the spec refresh=0 (kept for good) or more updates, or leave b1 out"
        )

    def init_fn(params: Any) -> RowAdamState:
        matrices = {} if spec is None else spec.matrices(params)

        def row_shape(matrix: Any, leaf: Any) -> tuple[int, ...]:
            if matrix is not None:
                return (*matrix.batch, matrix.d)
            return tuple(leaf.shape) if leaf.ndim < 2 else (*leaf.shape[:-2], leaf.shape[-1])

        rms = map_leaves(lambda m, leaf: jnp.zeros(row_shape(m, leaf), jnp.float32), matrices, params)
        momentum = None
        if with_momentum:
            like = params if spec is None else sketch_zeros(params, matrices, spec.rank)
            momentum = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        return RowAdamState(jnp.zeros((), jnp.int32), rms, momentum)

    def update_fn(updates: Any, state: RowAdamState, params: Any = None, **extra_args: Any) -> Any:
        del params, extra_args
        count = optax.safe_increment(state.count)
        sketches = jax.tree.map(lambda s: s.astype(jnp.float32), updates)
        rms = jax.tree.map(lambda s, old: _row_rms(s, old, b2), sketches, state.rms)
        debias = jnp.sqrt(1 - jnp.power(jnp.float32(b2), count.astype(jnp.float32)))
        momentum, numerator = None, sketches
        if with_momentum:
            age = state.count % spec.refresh if spec is not None and spec.refresh else state.count
            jax.tree.map(_check_momentum, sketches, state.momentum)
            keep = jnp.where(age == 0, 0.0, b1).astype(jnp.float32)
            momentum = jax.tree.map(lambda m, s: keep * m + jnp.float32(1 - b1) * s, state.momentum, sketches)
            scale = 1 / (1 - jnp.power(jnp.float32(b1), (age + 1).astype(jnp.float32)))
            numerator = jax.tree.map(lambda m: m * scale, momentum)
        direction = _norm_preserving if preserve_norm else _plain
        new = jax.tree.map(lambda s, x: direction(s, x / debias, eps), numerator, rms)
        return new, RowAdamState(count, rms, momentum)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_momentum(s: Array, momentum: Array) -> None:
    if s.shape != momentum.shape:
        raise UserError(
            f"scale_by_row_adam: a sketch of shape {s.shape} does not fit the momentum {momentum.shape}: b1 > 0 needs "
            "spec=, the one of the sketches, whose momentum starts anew when a projection is redrawn"
        )


def _rows(rms: Array, like: Array) -> Array:
    """Row values `[..., d]` next to a sketch `[..., r, d]`."""
    return rms if like.ndim < 2 else rms[..., None, :]


def _row_rms(s: Array, old: Array, b2: Any) -> Array:
    """Root of b2 old^2 + (1 - b2) mean_r(s^2), without squaring anything far from 1."""
    if s.ndim < 2:
        now = jnp.abs(s)
    else:
        largest = jnp.max(jnp.abs(s), axis=-2)
        unit = jnp.where(largest > 0, largest, 1.0)
        now = largest * jnp.sqrt(jnp.mean(jnp.square(s / unit[..., None, :]), axis=-2))
    if now.shape != old.shape:
        raise UserError(
            f"scale_by_row_adam: an update of shape {s.shape} does not fit its second moment {old.shape}; "
            "put sketch(spec) before it, and pass spec= where a target's matrix is not its last two axes"
        )
    return jnp.hypot(jnp.sqrt(jnp.float32(b2)) * old, jnp.sqrt(jnp.float32(1 - b2)) * now)


def _plain(s: Array, rms: Array, eps: Any) -> Array:
    """S / (rms + eps), 0 where both are 0."""
    den = _rows(rms, s) + jnp.float32(eps)
    return jnp.where(s == 0, 0.0, s / jnp.where(den > 0, den, 1.0))


def _norm_preserving(s: Array, rms: Array, eps: Any) -> Array:
    """The norm-preserving form. A common factor of 1/den cancels, so min(den)/den in (0, 1] stands for it."""
    axes = tuple(range(s.ndim))[-2:]
    tiny = np.finfo(np.float32).tiny
    floor = jnp.maximum(jnp.float32(eps) * jnp.mean(rms, axis=-1, keepdims=True), tiny) if s.ndim else tiny
    den = rms + floor
    inverse = (jnp.min(den, axis=-1, keepdims=True) if s.ndim else den) / den
    largest = jnp.max(jnp.abs(s), axis=axes, keepdims=True)
    unit = s / jnp.where(largest > 0, largest, 1.0)
    d = _rows(inverse, s) * unit

    def norm(x: Array) -> Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes, keepdims=True))

    length = norm(d)
    return d * (norm(unit) / jnp.where(length > 0, length, 1.0)) * largest
