"""The device mesh, and which mesh axis each logical axis of a parameter or an activation lies on.

Two mesh axes: `fsdp` splits the batch and, for storage, the rows of every weight; `tensor` splits heads, MLP
width and vocabulary. Decoding may take another mesh of the same devices, where weights lie as they are used: `data` and
`decode` take the place of `fsdp`, and the one splits the batch alone, the other what `tensor` splits. Axes are Auto:
the compiler places whatever is not stated here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from logra_jax.errors import UserError

BLOCK = 2**28  # bytes that are fetched at once

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True)
class AxisTable:
    """Logical axis -> mesh axis, several of them, or None for replicated.

    All but the last two are axes of stored parameters; `heads_in` and `mlp_in` are those that a product sums over.
    Storage splits rows, not columns: parts that are gathered along a matrix's last axis make the compiler keep a
    second, transposed copy of the whole stack. `batch` is the rows of any activation, `logits` the vocabulary
    axis of the logits, which are split over all devices: rows that share a device take turns instead. An axis that a
    mesh does not have splits nothing there.
    """

    vocab: MeshAxes = ("tensor", "decode")
    embed: MeshAxes = "fsdp"
    q_heads: MeshAxes = ("tensor", "decode")
    kv_heads: MeshAxes = ("tensor", "decode")
    mlp: MeshAxes = ("tensor", "decode")
    heads_in: MeshAxes = ("tensor", "decode", "fsdp")
    mlp_in: MeshAxes = ("tensor", "decode", "fsdp")
    width: str | None = None
    taps: str | None = None
    layers: str | None = None
    norm: str | None = None
    batch: MeshAxes = ("data", "fsdp")
    logits: MeshAxes = ("fsdp", "tensor")

    @property
    def gathered(self) -> AxisTable:
        """Where a weight lies while it is used: whole along what is split for storage alone."""
        return replace(self, embed=None, heads_in=self.q_heads, mlp_in=self.mlp)

    def spec(self, logical: tuple[str | None, ...]) -> PartitionSpec:
        """Where the dimensions of one array lie (None: whole); two on one mesh axis is a mistake in the table."""
        mesh_axes = [None if name is None else getattr(self, name) for name in logical]
        used = [axis for axes in mesh_axes for axis in _axes(axes)]
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
    if devices is None and jax.process_count() > 1 and fsdp * tensor < len(present):
        raise UserError(
            f"mesh fsdp={fsdp} x tensor={tensor} leaves devices idle, but {jax.process_count()} processes have "
            f"{len(present)} together and all have to take part: choose sizes whose product is {len(present)}"
        )
    return jax.make_mesh(
        (fsdp, tensor),
        ("fsdp", "tensor"),
        axis_types=(AxisType.Auto, AxisType.Auto),
        devices=present[: fsdp * tensor],
    )


def decoding_mesh(mesh: Mesh, tensor: int) -> Mesh:
    """The devices of `mesh` in groups of `tensor`, a multiple of its own, neighbours each, for decoding."""
    sizes = -1, tensor // mesh.shape["tensor"], mesh.shape["tensor"]
    return Mesh(mesh.devices.reshape(sizes), ("data", "decode", "tensor"), axis_types=(AxisType.Auto,) * 3)


def shardings(mesh: Mesh, logical_axes: Any, shapes: Any = None, table: AxisTable | None = None) -> Any:
    """A tree like `logical_axes` (tuples of logical names, one per dimension) of shardings on `mesh`.

    shapes: a tree of the same structure whose leaves have `.shape` (`model.abstract_params()` or parameters);
        with it, a dimension that its mesh axis does not divide is a UserError that names the sizes that do.
    """
    table = AxisTable() if table is None else table
    specs = jax.tree.map(lambda names: _present(mesh, table.spec(names)), logical_axes, is_leaf=_is_names)
    if shapes is not None:
        _check_sizes(mesh, list(_dimensions(mesh, specs, logical_axes, shapes)))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)


def constrain(x: Any, mesh: Mesh | None, *logical: str | None, table: AxisTable | None = None) -> Any:
    """`x`, laid out on `mesh` as its logical axes say, one name (None: whole) per dimension.

    x: an array, or a node that stands for one and has `constrain(sharding)`. Without a mesh, or with one device,
        it is returned as it is. A dimension shorter than the devices it would be split over stays whole.
    """
    if mesh is None or mesh.size == 1:
        return x
    spec = _present(mesh, (AxisTable() if table is None else table).spec(logical))
    fits = [axes if size >= ways(mesh, axes) else None for axes, size in zip(spec, x.shape, strict=True)]
    place = NamedSharding(mesh, PartitionSpec(*fits))
    return jax.lax.with_sharding_constraint(x, place) if isinstance(x, jax.Array) else x.constrain(place)


def ways(mesh: Mesh, axes: MeshAxes) -> int:
    """Into how many parts the mesh axes split a dimension."""
    return math.prod(mesh.shape[axis] for axis in _axes(axes) if axis in mesh.shape)


def _present(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """`spec` without the axes that the mesh does not have."""
    kept = [tuple(axis for axis in _axes(axes) if axis in mesh.shape) for axes in spec]
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in kept))


def _axes(axes: MeshAxes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes


def batch_sharding(mesh: Mesh, rows: int | None = None) -> NamedSharding:
    """Rows of a batch split over `fsdp`; with `rows`, a number that it does not divide is a UserError."""
    size = mesh.shape["fsdp"]
    if rows is not None and rows % size:
        raise UserError(
            f"{rows} rows do not split evenly over fsdp={size}; choose a multiple of {size} rows, "
            f"or fsdp from {_divisors(rows)}"
        )
    return NamedSharding(mesh, PartitionSpec("fsdp"))


def place(
    shape: tuple[int, ...], read: Callable[[Any], np.ndarray], sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """An array of `shape` on devices, of which the host holds the part of one device at a time.

    read: gives the part that slices say, in memory that nobody else writes to.
    """
    if sharding is None:
        return jax.device_put(read(tuple(slice(None) for _ in shape)))
    parts = [
        jax.device_put(read(part), device).block_until_ready()
        for device, part in sharding.addressable_devices_indices_map(shape).items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def place_array(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array, which all processes hold, on devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def fetch(tree: Any) -> Any:
    """Arrays as numpy, whole, on the host. What lies on devices of several processes they have to fetch together."""

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


def fetch_parts(array: jax.Array) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """An array in parts that make it up, each with its index, of which the host holds one at a time.

    A part is what a device has, or rows of it of BLOCK bytes. What lies on devices of several processes they have to
    fetch together, and each of their devices holds all of it meanwhile.
    """
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        array = jax.device_put(array, array.sharding.update(spec=PartitionSpec()))
    for shard in {str(shard.index): shard for shard in array.addressable_shards}.values():
        data, (rows, *rest) = shard.data, shard.index
        step = max(BLOCK * len(data) // max(data.nbytes, 1), 1)
        for start in range(0, len(data), step):
            block = np.asarray(data[start : start + step] if step < len(data) else data)
            begin = (rows.start or 0) + start
            yield (slice(begin, begin + len(block)), *rest), block


def _is_names(node: Any) -> bool:
    return isinstance(node, tuple)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _dimensions(mesh: Mesh, specs: Any, logical_axes: Any, shapes: Any) -> Iterator[tuple[str, str, int, str]]:
    """Every split dimension as (parameter path, logical axis, size, mesh axis)."""
    names = jax.tree.leaves(logical_axes, is_leaf=_is_names)
    sized = jax.tree.flatten_with_path(shapes)[0]
    flat = jax.tree.leaves(specs, is_leaf=_is_spec)
    for spec, logical, (path, leaf) in zip(flat, names, sized, strict=True):
        for axes, name, size in zip(spec, logical, leaf.shape, strict=True):
            for mesh_axis in _axes(axes):
                yield "/".join(str(key.key) for key in path), name, size, mesh_axis
                size = size // mesh.shape[mesh_axis]  # what is left for the next one to split


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
