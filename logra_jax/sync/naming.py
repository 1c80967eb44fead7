"""Leaves of a parameter tree as the tensors of a Hugging Face file, by the table of `models.names`. Free of jax.

Leaves go by their key paths, "layers/mlp/up_proj/kernel", and hold the matrices of all layers that have the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from logra_jax.models.names import HfName

Table = Mapping[str, HfName]


def file_shapes(table: Table, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name in the file, for shapes of whole leaves by path."""
    return {name: table[path].file_shape(shape) for path, shape in shapes.items() for name in table[path].names}


def factors_by_name(table: Table, factors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Factors `[r, d]` by name, of `LowRank.factor` `[..., r, d]` by path."""
    stacks = {path: np.asarray(factor).reshape(-1, *factor.shape[-2:]) for path, factor in factors.items()}
    return {
        name: matrix for path, stack in stacks.items() for name, matrix in zip(table[path].names, stack, strict=True)
    }


def dense_by_name(table: Table, leaves: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors as the file has them, by name, of whole leaves by path."""
    found: dict[str, np.ndarray] = {}
    for path, leaf in leaves.items():
        form, value = table[path], np.asarray(leaf)
        stack = value.reshape(-1, *value.shape[len(form.stack) :])
        found |= {name: form.to_file(one) for name, one in zip(form.names, stack, strict=True)}
    return found


def factor_bytes(shapes: Mapping[str, tuple[int, ...]], rank: int, itemsize: int = 2) -> int:
    """Bytes of the factors of an update, for targets `[d, k]` by name; a blob has about 0.1 kB more for each."""
    return sum(rank * d * itemsize for d, _ in shapes.values())


def weight_bytes(shapes: Mapping[str, tuple[int, ...]], itemsize: int = 2) -> int:
    """Bytes of tensors of these shapes."""
    return sum(prod(shape) * itemsize for shape in shapes.values())
