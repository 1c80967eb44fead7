"""Which leaves of a parameter tree are sketched, how their matrices lie in them, and what they are called."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from optax import MaskedNode

from logra_jax.errors import UserError
from logra_jax.optim.names import DEFAULT_TARGETS

DISTRIBUTIONS = ("rademacher", "gaussian")
# Flax's names for vectors. Stacked over layers they look like matrices; without weight names only these tell.
_VECTORS = ("bias", "scale")


@dataclass(frozen=True)
class Target:
    """A regular expression on weight names, with the axes of the matrix where they are not the last two.

    Args:
      pattern: searched (`re.search`) in the weight names.
      in_axes: negative axes that make up the input (the sum runs over them), in the order they are flattened.
      out_axes: negative axes that make up the output. Every other axis is a stack of independent matrices.

    An attention kernel `[d, heads, head_dim]` is `Target("query/kernel", in_axes=(-3,), out_axes=(-2, -1))`.
    """

    pattern: str
    in_axes: tuple[int, ...] = (-2,)
    out_axes: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        axes = (*self.in_axes, *self.out_axes)
        if not (self.in_axes and self.out_axes) or any(a >= 0 for a in axes) or len(set(axes)) != len(axes):
            raise UserError(
                f"Target({self.pattern!r}): in_axes {self.in_axes} and out_axes {self.out_axes} must be "
                "distinct negative numbers, at least one each; count axes from the end"
            )
        try:
            re.compile(self.pattern)
        except re.error as e:
            raise UserError(f"Target({self.pattern!r}): not a regular expression: {e}") from e


@dataclass(frozen=True)
class Matrix:
    """One sketched leaf: a stack of `len(names)` matrices of `k` inputs and `d` outputs."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]

    @property
    def batch_axes(self) -> tuple[int, ...]:
        """Stack axes, counted from the front."""
        core = {a % len(self.shape) for a in (*self.in_axes, *self.out_axes)}
        return tuple(a for a in range(len(self.shape)) if a not in core)

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the stack axes."""
        return tuple(self.shape[a] for a in self.batch_axes)

    @property
    def k(self) -> int:
        """Inputs of one matrix."""
        return prod(self.shape[a] for a in self.in_axes)

    @property
    def d(self) -> int:
        """Outputs of one matrix."""
        return prod(self.shape[a] for a in self.out_axes)

    def sketch_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the leaf's sketch, `[..., r, d]`."""
        return (*self.batch, rank, self.d)


@dataclass(frozen=True)
class SketchSpec:
    """What is sketched, and with which random projections. Hashable, so it can be a static argument.

    Args:
      rank: r, rows of a projection; smaller than the inputs of every target.
      seed: of all projections, in [0, 2^32).
      distribution: "rademacher" (signs) or "gaussian".
      refresh: a projection is kept for this many updates; 0 keeps the first one for ever.
      targets: regular expressions on weight names, or `Target`s for matrices that are not the last two axes.
      names: weight names by key path ("layers/mlp/up_proj/kernel"), one per matrix of the leaf, in C order
        of its stack axes. They key the projections. A leaf that is not listed is known by its key path, and
        a stack of matrices in it as "path/0", "path/1", ...

    Only leaves that hold matrices are sketched: a pattern may match biases and norms, they are left alone.
    Where a leaf has names, their number tells a stacked bias `[L, d]` (L names) from a matrix (one name).

    Raises:
      UserError: a setting is out of range; and, once it meets parameters, where a pattern matches no matrix,
        only a part of a stack, a matrix with no more than `rank` inputs, or one sharded over Explicit mesh axes.
    """

    rank: int = 256
    seed: int = 42
    distribution: str = "rademacher"
    refresh: int = 1
    targets: Sequence[str | Target] = DEFAULT_TARGETS  # kept as a tuple
    names: Any = None  # given as a mapping, kept as a sorted tuple of pairs
    _names: dict[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"SketchSpec: rank is {self.rank!r}; it must be an integer of at least 1")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise UserError(f"SketchSpec: seed is {self.seed!r}; it must be an integer in [0, 2^32)")
        if self.distribution not in DISTRIBUTIONS:
            raise UserError(f"SketchSpec: distribution is {self.distribution!r}; use one of {DISTRIBUTIONS}")
        if not isinstance(self.refresh, int) or self.refresh < 0:
            raise UserError(f"SketchSpec: refresh is {self.refresh!r}; use a number of updates, or 0 for never")
        if isinstance(self.targets, str) or not self.targets:
            raise UserError(f"SketchSpec: targets is {self.targets!r}; give a tuple of patterns, at least one")
        object.__setattr__(self, "targets", tuple(self.targets))
        pairs = self.names.items() if isinstance(self.names, Mapping) else self.names or ()
        table = {path: tuple(names) for path, names in pairs}
        object.__setattr__(self, "_names", table)
        object.__setattr__(self, "names", tuple(sorted(table.items())) or None)
        _ = self.all_targets  # patterns are compiled, so that a bad one is refused here

    @property
    def all_targets(self) -> tuple[Target, ...]:
        """The targets, strings turned into `Target`s of the last two axes."""
        return tuple(t if isinstance(t, Target) else Target(t) for t in self.targets)

    def redraw(self, update: Any) -> Any:
        """The update (int or int array) at which the projection used at `update` was drawn."""
        if self.refresh == 0:
            return update * 0
        return update // self.refresh * self.refresh

    def matrices(self, params: Any) -> dict[str, Matrix]:
        """The sketched leaves of `params` (arrays or `ShapeDtypeStruct`s) by key path.

        A tree cut by `optax.partition` or `optax.masked` may lack a pattern's leaves; a whole one may not.
        """
        used: set[Target] = set()
        found = {}
        for path, leaf in leaves_with_paths(params):
            target, matrix = self._matrix(path, tuple(leaf.shape), leaf.dtype)
            if target is not None and matrix is not None:
                # Products of sketches are left to the compiler to place: no rule here names an output sharding.
                if any(axis is not None for axis in jax.typeof(leaf).sharding.spec):
                    raise UserError(
                        f"SketchSpec: {path} is sharded over Explicit mesh axes; make the mesh with Auto ones: "
                        "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
                    )
                used.add(target)
                found[path] = matrix
        if not any(isinstance(x, MaskedNode) for x in jax.tree.leaves(params, is_leaf=_is_masked)):
            for target in self.all_targets:
                if target not in used:
                    raise UserError(
                        f"SketchSpec: target {target.pattern!r} matches no matrix of the parameters; leaves "
                        f"are called {', '.join(self._examples(params)) or '(there are none)'}"
                    )
        return found

    def split(self, params: Any, dense: Sequence[str] = ()) -> tuple[Any, Any]:
        """(train, frozen): two trees like `params`, each with None where the leaf is in the other one.

        `train` holds the targets, and other leaves whose key path or weight name matches one of `dense`.

        Raises:
          UserError: a pattern of `dense` matches no leaf; see the class for the targets.
        """
        for pattern in dense:
            if not any(self._matches(pattern, path) for path, _ in leaves_with_paths(params)):
                raise UserError(f"SketchSpec.split: dense pattern {pattern!r} matches no leaf of the parameters")
        matrices = self.matrices(params)
        trained = {
            path
            for path, _ in leaves_with_paths(params)
            if path in matrices or any(self._matches(p, path) for p in dense)
        }

        def pick(side: bool) -> Any:
            return jax.tree.map_with_path(
                lambda path, leaf: leaf if (path_string(path) in trained) is side else None, params
            )

        return pick(True), pick(False)

    def summary(self, params: Any, dense: Sequence[str] = ()) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Rows (path, "sketched" | "dense" | "frozen", shape, number of parameters), one per leaf."""
        matrices = self.matrices(params)
        train, _ = self.split(params, dense)
        trained = {path for path, _ in leaves_with_paths(train)}

        def kind(path: str) -> str:
            return "sketched" if path in matrices else "dense" if path in trained else "frozen"

        return [(p, kind(p), tuple(x.shape), prod(x.shape)) for p, x in leaves_with_paths(params)]

    def labels(self, params: Any) -> Any:
        """Tree of "sketched" and "dense", one label per leaf, for `optax.partition`.

        A tree, not a function: `optax.partition` would call one on sketch-shaped updates too.
        """
        matrices = self.matrices(params)
        return map_leaves(lambda m, _: "dense" if m is None else "sketched", matrices, params)

    def names_of(self, path: str) -> tuple[str, ...]:
        """The weight names given for a leaf, in C order of its stack axes; its key path if there are none."""
        return self._names.get(path, (path,))

    def _matches(self, pattern: str, path: str) -> bool:
        return any(re.search(pattern, name) for name in (path, *self._names.get(path, ())))

    def _matrix(self, path: str, shape: tuple[int, ...], dtype: Any) -> tuple[Target | None, Matrix | None]:
        names = self._names.get(path)
        for target in self.all_targets:
            hits = [bool(re.search(target.pattern, name)) for name in names or (path,)]
            if not any(hits):
                continue
            axes = (*target.in_axes, *target.out_axes)
            if -min(axes) > len(shape) or not jnp.issubdtype(dtype, jnp.floating):
                return target, None
            matrix = Matrix(path, names or (), shape, target.in_axes, target.out_axes)
            stack = prod(matrix.batch)
            if matrix.k < 2 or (names and stack != len(names)):
                return target, None
            if not names:
                if path.rsplit("/", 1)[-1] in _VECTORS:
                    return target, None
                own = tuple(f"{path}/{i}" for i in range(stack)) if matrix.batch else (path,)
                matrix = Matrix(path, own, shape, target.in_axes, target.out_axes)
            if not all(hits):
                missed = matrix.names[hits.index(False)]
                raise UserError(
                    f"SketchSpec: {target.pattern!r} matches only {sum(hits)} of the {stack} matrices "
                    f"stacked in {path} (not {missed}); widen or drop the pattern, a stack is sketched whole"
                )
            if self.rank >= matrix.k:
                raise UserError(
                    f"SketchSpec: rank {self.rank} is not below the {matrix.k} inputs of {path} {shape}; "
                    "lower the rank, or leave this weight out of the targets and train it densely"
                )
            return target, matrix
        return None, None

    def _examples(self, params: Any) -> list[str]:
        paths = [path for path, _ in leaves_with_paths(params)]
        named = [self._names[p][0] if p in self._names else p for p in paths]
        return named if len(named) <= 6 else [*named[:6], "..."]


def merge(train: Any, frozen: Any) -> Any:
    """The whole tree again from the two of `SketchSpec.split`; `train` may hold slots."""
    return jax.tree.map(lambda f, t: t if f is None else f, frozen, train, is_leaf=lambda x: x is None)


def path_string(path: Any) -> str:
    """A key path as "layers/mlp/up_proj/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their key paths as strings."""
    return [(path_string(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def map_leaves(fn: Any, matrices: dict[str, Matrix], tree: Any, *rest: Any) -> Any:
    """Maps fn(matrix or None, leaf, *rest) over the leaves of `tree`; `rest` may have nodes there."""
    return jax.tree.map_with_path(
        lambda path, leaf, *others: fn(matrices.get(path_string(path)), leaf, *others), tree, *rest
    )


def sketch_zeros(params: Any, matrices: dict[str, Matrix], rank: int) -> Any:
    """`params` with float32 zeros `[..., r, d]` in place of the targets."""
    return map_leaves(
        lambda m, leaf: leaf if m is None else jnp.zeros(m.sketch_shape(rank), jnp.float32), matrices, params
    )


def _is_masked(node: Any) -> bool:
    return isinstance(node, MaskedNode)
