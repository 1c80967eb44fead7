"""How a sketch is taken: a function whose derivative it is, and a stand-in for the kernel that calls it.

A target kernel W `[k, d]` gets a slot U `[r, d]` that is zero:

    y     = x W                                   (the slot costs nothing in the forward pass)
    y_dot = x_dot W + (x A^T) U_dot

Reverse mode with respect to U gives A G, the sketch of the gradient G of W (transposed, as Flax kernels
are), without G ever being formed: what is kept of x for this weight is x A^T, r numbers per token. Forward
mode along U_dot gives the change of the outputs under W + A^T U_dot. Method: arXiv 2610.06647.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from logra_jax._shapes import Array, Float
from logra_jax.errors import UserError
from logra_jax.optim.names import PROJECTED_INPUT
from logra_jax.optim.projection import expand_leaf, signs, weight_keys
from logra_jax.optim.spec import Matrix, SketchSpec, leaves_with_paths, map_leaves, path_string, sketch_zeros
from logra_jax.optim.stand_in import StandIn


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kernel", "key_data", "u"],
    meta_fields=["distribution", "in_axes", "out_axes", "probe"],
)
@dataclass(frozen=True, eq=False)
class Slot(StandIn):
    """A kernel together with its slot; takes the kernel's place in a parameter tree and answers `x @ slot`.

    kernel `[..., k, d]`, key_data uint32 `[..., 2]`, u float32 `[..., r, d]`: three leaves that `lax.scan`,
    `vmap` and `jax.tree.map(lambda leaf: leaf[i], ...)` slice together. Only a single matrix (no stack axes
    left) multiplies. Anything but `@` from the right, `.astype`, `.shape`, `.dtype` and `.ndim` raises,
    rather than lose a gradient.
    """

    kernel: Any
    key_data: Any
    u: Any
    distribution: str
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    probe: bool = False  # set while asking whether a function uses its kernels in `@` alone

    def constrain(self, sharding: Any) -> "Slot":
        """Lays the kernel out as `sharding` says; keys and slot stay where they are."""
        return replace(self, kernel=lax.with_sharding_constraint(self.kernel, sharding))

    def __rmatmul__(self, x: Any) -> Any:
        return sketch_matmul(jnp.asarray(x), self)


def sketch_matmul(x: Float[Array, "*tokens k"], slot: Slot) -> Float[Array, "*tokens d"]:
    """`x @ kernel`, whose derivative with respect to `slot.u` is the sketch.

    The result has the dtype of `x @ kernel`; cast the slot (`slot.astype(x.dtype)`) to compute in x's. The
    projected input is accumulated in float32 and kept in x's dtype; the sketch is float32.

    Raises:
      TypeError: the slot is still a stack of matrices, or its matrix is not the last two axes.
      UserError: the kernel itself is differentiated.
    """
    if (slot.in_axes, slot.out_axes) != ((-2,), (-1,)):
        raise TypeError(
            f"x @ slot: the matrix of this kernel {slot.shape} lies in axes {slot.in_axes}, {slot.out_axes}"
        )
    if slot.ndim != 2:
        raise TypeError(f"x @ slot: kernel of shape {slot.shape}; take one matrix of the stack (scan, vmap or index)")
    return _matmul((slot.distribution, slot.probe), x, slot.kernel, slot.key_data, slot.u)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul(static: tuple[str, bool], x: Any, kernel: Any, key_data: Any, u: Any) -> Any:
    return x @ kernel


@partial(_matmul.defjvp, symbolic_zeros=True)
def _matmul_jvp(static: tuple[str, bool], primals: Any, tangents: Any) -> tuple[Any, Any]:
    distribution, probe = static
    x, kernel, key_data, u = primals
    x_dot, kernel_dot, _, u_dot = tangents
    y = _matmul(static, x, kernel, key_data, u)
    if not isinstance(kernel_dot, SymbolicZero) and not probe:
        raise UserError(
            f"a sketched kernel of shape {kernel.shape} is also differentiated itself; its dense "
            "gradient would be zero. Take sketches with sketched_value_and_grad; train a weight one way only"
        )
    y_dot = None
    if not isinstance(x_dot, SymbolicZero):
        y_dot = x_dot @ kernel
    if not isinstance(u_dot, SymbolicZero):
        r, k = u.shape[0], kernel.shape[0]
        a = signs(key_data, r, k, distribution, x.dtype)
        p = lax.dot_general(x, a, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        # Scaled before it is rounded to the compute dtype; this is all of x that the backward pass keeps.
        p = checkpoint_name((p * np.float32(r**-0.5)).astype(x.dtype), PROJECTED_INPUT)
        change = lax.dot_general(p, u_dot, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        change = change.astype(y.dtype)
        y_dot = change if y_dot is None else y_dot + change
    return y, zero_from_primal(y, symbolic_zeros=True) if y_dot is None else y_dot


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _materialize(static: tuple[Matrix, str], kernel: Any, key_data: Any, u: Any) -> Any:
    """W + A^T U at U = 0: the kernel itself, for functions that need an array."""
    return kernel


@partial(_materialize.defjvp, symbolic_zeros=True)
def _materialize_jvp(static: tuple[Matrix, str], primals: Any, tangents: Any) -> tuple[Any, Any]:
    matrix, distribution = static
    kernel, key_data, _ = primals
    kernel_dot, _, u_dot = tangents
    changes = [] if isinstance(kernel_dot, SymbolicZero) else [kernel_dot]
    if not isinstance(u_dot, SymbolicZero):
        # Under checkpoint the projections of a stack are drawn again backwards instead of being kept.
        expand = jax.checkpoint(lambda key, change: expand_leaf(change, key, matrix, distribution))
        changes.append(expand(key_data, u_dot).astype(kernel.dtype))
    return kernel, sum(changes[1:], changes[0]) if changes else zero_from_primal(kernel, symbolic_zeros=True)


def _place(train: Any, matrices: dict[str, Matrix], spec: SketchSpec, step: Any, free: Any, how: str) -> Any:
    """`train` with targets as slots ("slots", "probe") or W + A^T U ("arrays"), `free`'s leaves elsewhere."""

    def one(matrix: Matrix | None, leaf: Any, other: Any) -> Any:
        if matrix is None:
            return other
        key_data = weight_keys(spec, matrix, step)
        if how == "arrays":
            return _materialize((matrix, spec.distribution), leaf, key_data, other)
        return Slot(leaf, key_data, other, spec.distribution, matrix.in_axes, matrix.out_axes, how == "probe")

    return map_leaves(one, matrices, train, free)


def with_slots(train: Any, spec: SketchSpec, step: Any) -> Any:
    """`train` with every target replaced by a `Slot` whose u is zero, drawn for update number `step`."""
    matrices = spec.matrices(train)
    return _place(train, matrices, spec, step, sketch_zeros(train, matrices, spec.rank), "slots")


def takes_slots(fn: Callable[[Any], Any], train: Any, matrices: dict[str, Matrix], spec: SketchSpec, step: Any) -> bool:
    """Whether fn(train) can run on slots and uses the targets in `x @ W` alone.

    fn is traced once, along a change of the kernels that slots ignore: a result that still changes has used
    a kernel in another way (a tied head, a penalty on the weights), and its sketch would miss that part.
    """
    elsewhere = False

    @jax.custom_jvp
    def watch(x: Any) -> Any:
        return x

    @partial(watch.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        nonlocal elsewhere
        elsewhere = elsewhere or not isinstance(tangents[0], SymbolicZero)
        return primals[0], tangents[0]

    free = sketch_zeros(train, matrices, spec.rank)

    def along(kernels: dict[str, Any]) -> Any:
        def run(moving: dict[str, Any]) -> Any:
            whole = jax.tree.map_with_path(lambda path, leaf: moving.get(path_string(path), leaf), train)
            return jax.tree.map(watch, fn(_place(whole, matrices, spec, step, free, "probe")))

        return jax.jvp(run, (kernels,), (jax.tree.map(jnp.ones_like, kernels),))[0]

    try:
        jax.eval_shape(along, {path: leaf for path, leaf in leaves_with_paths(train) if path in matrices})
    except (TypeError, AttributeError):
        return False
    return not elsewhere


def place(
    fn: Callable[[Any], Any],
    train: Any,
    matrices: dict[str, Matrix],
    spec: SketchSpec | None,
    step: Any,
    materialize: bool | None,
) -> tuple[Any, Callable[[Any], Any]]:
    """(free, tree): the leaves to differentiate, and the function that makes the model's parameters of them.

    `free` is `train` with zero U at the targets. `materialize`: True: arrays; False: slots; None: ask.
    """
    if spec is None or not matrices:
        return train, lambda free: free
    arrays = not takes_slots(fn, train, matrices, spec, step) if materialize is None else materialize
    how = "arrays" if arrays else "slots"
    return (
        sketch_zeros(train, matrices, spec.rank),
        lambda free: _place(train, matrices, spec, step, free, how),
    )


def sketched_value_and_grad(
    loss_fn: Callable[..., Any], spec: SketchSpec, has_aux: bool = False, materialize: bool | None = None
) -> Callable[..., Any]:
    """`jax.value_and_grad(loss_fn)` with sketches A G `[..., r, d]` (float32) for the targets' gradients.

    Args:
      loss_fn: loss_fn(train, *args) -> scalar, or (scalar, aux). It gets `train` with targets as `Slot`s.
      spec: the targets and their projections.
      has_aux: as in `jax.value_and_grad`.
      materialize: False: the loss multiplies targets as `x @ W` only (kernel on the right), and no dense
        gradient of a target exists at any time. True: it is given arrays W + A^T U (at U = 0, so W), which
        works for every loss, and a target's dense gradient exists for a moment. None: traces the loss once
        more to find out.

    Returns:
      A function (train, *args, step, into=None) -> (value, gradients). `step` is the number of the update, an int
      or int32 scalar: `sketch_count(opt_state)`. Sketches of several batches at one step may be added: with `into`,
      as in `value_and_add_grad`, that happens in place.

    Raises:
      UserError: a target is differentiated itself as well.
    """

    def value_and_grad(train: Any, *args: Any, step: Any, into: Any = None) -> Any:
        def value(tree: Any) -> Any:
            out = loss_fn(tree, *args)
            return out[0] if has_aux else out

        free, tree = place(value, train, spec.matrices(train), spec, step, materialize)
        return value_and_add_grad(lambda f: loss_fn(tree(f), *args), free, into, has_aux)

    return value_and_grad


def value_and_add_grad(fn: Callable[[Any], Any], at: Any, into: Any, has_aux: bool = False) -> tuple[Any, Any]:
    """`jax.value_and_grad(fn, has_aux=has_aux)(at)`, the gradient returned or, with `into`, added to what is there.

    into: a tree like `at` of `jax.Ref`s of the gradients' shapes and dtypes; None is returned in place of gradients.
    The gradients of stacked layers are added layer by layer on the way back, so that no second stack exists.
    """
    if into is None:
        return jax.value_and_grad(fn, has_aux=has_aux)(at)
    vjp: Any = jax.vjp
    value, backwards, *aux = vjp(fn, at, has_aux=has_aux)
    backwards.with_refs(into)(jnp.ones_like(value))
    return ((value, *aux) if has_aux else value), None
