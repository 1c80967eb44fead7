"""LoRA: a frozen kernel beside two thin trained matrices, W + s A B, which only an export adds up.

    y = x W + s (x A) B                    s = alpha / r

A `[k, r]` starts at random, B `[r, d]` at zero: before the first update the model is the one it was. A
baseline for gradient sketches; reference: "LoRA: Low-Rank Adaptation of Large Language Models",
arXiv 2106.09685.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax._shapes import Array
from logra_jax.errors import UserError
from logra_jax.optim.apply import widest
from logra_jax.optim.projection import HIGHEST, weight_keys
from logra_jax.optim.spec import Matrix, SketchSpec, map_leaves
from logra_jax.optim.stand_in import StandIn


@partial(jax.tree_util.register_dataclass, data_fields=["kernel", "a", "b", "scale"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class LoraKernel(StandIn):
    """A kernel with its adapter; takes the kernel's place in a parameter tree and answers `x @ node`.

    kernel `[..., k, d]`, a `[..., k, r]`, b `[..., r, d]` and scale `[...]`: four leaves that `lax.scan` and
    `vmap` slice together. a, b and scale are float32 and computed with in the dtype of x. Only a single matrix
    (no stack axes left) multiplies. The two trees of `split_adapters` have None in place of some of them.
    """

    kernel: Any
    a: Any
    b: Any
    scale: Any

    def constrain(self, sharding: Any) -> "LoraKernel":
        """Lays the kernel out as `sharding` says, and the adapter to match."""
        a, b, _ = _places(sharding, 0, self.a.shape[-1])
        put = lax.with_sharding_constraint
        return replace(self, kernel=put(self.kernel, sharding), a=put(self.a, a), b=put(self.b, b))

    def __rmatmul__(self, x: Any) -> Any:
        if self.ndim != 2:
            raise TypeError(
                f"x @ adapted kernel: kernel of shape {self.shape}; take one matrix of the stack (scan, vmap or index)"
            )
        x = jnp.asarray(x)
        y = x @ self.kernel
        change = (x @ self.a.astype(x.dtype)) @ self.b.astype(x.dtype)
        return y + (change * self.scale.astype(x.dtype)).astype(y.dtype)


def adapter_shapes(params: Any, spec: SketchSpec) -> Any:
    """`params` (arrays or `ShapeDtypeStruct`s) as shapes and dtypes, each target of `spec` as a `LoraKernel`.

    On a mesh A is split as the rows of its kernel are, B as its columns, and its r rows over the mesh axes of
    the kernel's rows as far as they divide r: no device holds a whole B.

    Raises:
      UserError: a target's matrix is not its last two axes; see `SketchSpec` for others.
    """

    def one(matrix: Matrix | None, leaf: Any) -> Any:
        own = _struct(leaf.shape, leaf.dtype, leaf.sharding)
        if matrix is None:
            return own
        if (matrix.in_axes, matrix.out_axes) != ((-2,), (-1,)):
            raise UserError(f"LoRA: the matrix of {matrix.path} {matrix.shape} is not its last two axes")
        a, b, scale = _places(leaf.sharding, len(matrix.batch), spec.rank)
        return LoraKernel(
            own,
            _struct((*matrix.batch, matrix.k, spec.rank), jnp.float32, a),
            _struct((*matrix.batch, spec.rank, matrix.d), jnp.float32, b),
            _struct(matrix.batch, jnp.float32, scale),
        )

    return map_leaves(one, spec.matrices(params), params)


def add_adapters(params: Any, spec: SketchSpec, alpha: float | None = None) -> Any:
    """`params` with a `LoraKernel` of rank `spec.rank` in place of each target of `spec`; no array is copied.

    The entries of A are uniform in +-1/sqrt(k), from a key of (spec.seed, weight name) as projections are: they
    depend on no mesh. B is zero, and s = alpha / r.

    Args:
      params: arrays; they may be sharded.
      spec: rank, seed, targets and their names.
      alpha: None: r, so that s is 1.

    Raises:
      UserError: see `adapter_shapes`.
    """
    shapes, matrices = adapter_shapes(params, spec), spec.matrices(params)
    scale = adapter_scale(spec.rank, alpha)

    def first(matrix: Matrix) -> LoraKernel:
        def draw(key_data: Array) -> Array:
            key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
            return jax.random.uniform(key, (matrix.k, spec.rank), jnp.float32, -1, 1)

        with jax.threefry_partitionable(True):
            a = jax.vmap(draw)(weight_keys(spec, matrix, 0).reshape(-1, 2)) * np.float32(matrix.k**-0.5)
        b = jnp.zeros((*matrix.batch, spec.rank, matrix.d), jnp.float32)
        return LoraKernel(None, a.reshape(*matrix.batch, matrix.k, spec.rank), b, jnp.full(matrix.batch, scale))

    def place(matrix: Matrix | None, node: Any) -> Any:
        return None if matrix is None else jax.tree.map(lambda x: x.sharding, replace(node, kernel=None))

    # All in one program, each part made where it belongs.
    places = map_leaves(lambda m, _, node: place(m, node), matrices, params, shapes)
    drawn = jax.jit(
        lambda: map_leaves(lambda m, _: None if m is None else first(m), matrices, params), out_shardings=places
    )()
    return map_leaves(lambda m, leaf, node: leaf if m is None else replace(node, kernel=leaf), matrices, params, drawn)


def adapter_scale(rank: int, alpha: float | None) -> float:
    """s, the factor that adapters count with: alpha / r, and 1 for None."""
    return 1.0 if alpha is None else alpha / rank


def split_adapters(params: Any) -> tuple[Any, Any]:
    """(train, frozen), to be put together again by `merge`: A and B of all adapters, and everything else."""

    def trained(node: Any) -> Any:
        return replace(node, kernel=None, scale=None) if _is_adapted(node) else None

    def rest(node: Any) -> Any:
        return replace(node, a=None, b=None) if _is_adapted(node) else node

    return tuple(jax.tree.map(pick, params, is_leaf=_is_adapted) for pick in (trained, rest))


def merge_adapters(params: Any, dtype: Any = None) -> Any:
    """Plain parameters, with W + s A B for each adapted kernel, added up in float32.

    dtype: of those; None: each kernel's own.
    """

    def add(parts: tuple[Array, ...]) -> Array:
        kernel, a, b, scale = parts
        wide = kernel.astype(jnp.float32) + scale * jnp.matmul(a, b, precision=HIGHEST)
        return wide.astype(kernel.dtype if dtype is None else dtype)

    def one(node: Any) -> Any:
        if not _is_adapted(node):
            return node
        whole = add
        for _ in node.scale.shape:  # one matrix at a time: float32 copies of a stack never exist
            whole = partial(lax.map, whole)
        return jax.jit(whole)((node.kernel, node.a, node.b, node.scale))

    return jax.tree.map(one, params, is_leaf=_is_adapted)


def _is_adapted(node: Any) -> bool:
    return isinstance(node, LoraKernel)


def _struct(shape: Any, dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _places(sharding: Any, stacked: int, rank: int) -> tuple[Any, Any, Any]:
    """Shardings of a, b and scale beside a kernel of `stacked` stack axes with that sharding."""
    if not isinstance(sharding, NamedSharding):
        return sharding, sharding, sharding
    mesh = sharding.mesh
    axes: tuple[Any, ...] = (*sharding.spec, *(None,) * (stacked + 2 - len(sharding.spec)))
    *stack, rows, columns = axes
    specs = (*stack, rows, None), (*stack, widest(mesh, rank, rows), columns), tuple(stack)
    a, b, scale = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    return a, b, scale
