"""The device mesh, and which mesh axis each logical axis of a parameter lies on.

Two mesh axes: `fsdp` splits the batch and, for storage, the residual width of every weight; `tensor` splits
heads, MLP width and vocabulary. Axes are Auto: the compiler places whatever is not stated here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from logra_jax.errors import UserError


@dataclass(frozen=True)
class AxisTable:
    """Logical axis of a parameter -> mesh axis, or None for replicated."""

    vocab: str | None = "tensor"
    embed: str | None = "fsdp"
    q_heads: str | None = "tensor"
    kv_heads: str | None = "tensor"
    mlp: str | None = "tensor"
    layers: str | None = None
    norm: str | None = None

    def spec(self, logical: tuple[str, ...]) -> PartitionSpec:
        """Where the dimensions of one array lie; two of them on one mesh axis is a mistake in the table."""
        mesh_axes = [getattr(self, name) for name in logical]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {logical} lie on mesh axes {mesh_axes}: one mesh axis is used twice")
        return PartitionSpec(*mesh_axes)


def make_mesh(fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `fsdp * tensor` devices: the first ones of `devices` (default: all there are).

    Raises UserError if a size is below 1 or if there are too few devices.
    """
    present = jax.devices() if devices is None else list(devices)
    if fsdp < 1 or tensor < 1:
        raise UserError(f"mesh fsdp={fsdp}, tensor={tensor}: both must be at least 1")
    if fsdp * tensor > len(present):
        raise UserError(
            f"mesh fsdp={fsdp} x tensor={tensor} needs {fsdp * tensor} devices, there are {len(present)}; "
            f"choose sizes whose product is at most {len(present)}"
        )
    return jax.make_mesh(
        (fsdp, tensor),
        ("fsdp", "tensor"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=present[: fsdp * tensor],
    )


def shardings(mesh: Mesh, logical_axes: Any, shapes: Any = None, table: AxisTable | None = None) -> Any:
    """A tree like `logical_axes` (tuples of logical names, one per dimension) of shardings on `mesh`.

    shapes: a tree of the same structure whose leaves have `.shape` (`model.abstract_params()` or parameters);
        with it, a dimension that its mesh axis does not divide is a UserError that names the sizes that do.
    """
    table = AxisTable() if table is None else table
    specs = jax.tree.map(table.spec, logical_axes, is_leaf=_is_names)
    if shapes is not None:
        _check_sizes(mesh, list(_dimensions(specs, logical_axes, shapes)))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def batch_sharding(mesh: Mesh, rows: int | None = None) -> NamedSharding:
    """Rows of a batch split over `fsdp`; with `rows`, a number that it does not divide is a UserError."""
    size = mesh.shape["fsdp"]
    if rows is not None and rows % size:
        raise UserError(
            f"{rows} rows do not split evenly over fsdp={size}; choose a multiple of {size} rows, "
            f"or fsdp from {_divisors(rows)}"
        )
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def _is_names(node: Any) -> bool:
    return isinstance(node, tuple)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _dimensions(specs: Any, logical_axes: Any, shapes: Any) -> Iterator[tuple[str, str, int, str]]:
    """Every split dimension as (parameter path, logical axis, size, mesh axis)."""
    names = jax.tree.leaves(logical_axes, is_leaf=_is_names)
    sized = jax.tree.flatten_with_path(shapes)[0]
    flat = jax.tree.leaves(specs, is_leaf=_is_spec)
    for spec, logical, (path, leaf) in zip(flat, names, sized, strict=True):
        for mesh_axis, name, size in zip(spec, logical, leaf.shape, strict=True):
            if mesh_axis is not None:
                yield "/".join(str(key.key) for key in path), name, size, mesh_axis


def _check_sizes(mesh: Mesh, dimensions: list[tuple[str, str, int, str]]) -> None:
    for path, name, size, mesh_axis in dimensions:
        if size % mesh.shape[mesh_axis]:
            common = math.gcd(*(other for _, _, other, axis in dimensions if axis == mesh_axis))
            raise UserError(
                f"mesh {mesh_axis}={mesh.shape[mesh_axis]} does not divide {path}: its {name} dimension is "
                f"{size}; sizes of {mesh_axis} that divide every parameter of this model: {_divisors(common)}"
            )


def _divisors(number: int) -> str:
    """The divisors that a mesh axis can sensibly have, as text."""
    return ", ".join(str(d) for d in range(1, min(number, 1024) + 1) if number % d == 0)
