"""Leaves as the file's tensors, against the files themselves; and what a sync weighs."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from logra_jax.models import load_hf
from logra_jax.models.names import name_table
from logra_jax.optim.spec import leaves_with_paths
from logra_jax.sync.naming import dense_by_name, factor_bytes, factors_by_name, file_shapes, weight_bytes


@pytest.mark.parametrize("folder", ["tiny-qwen2-tied", "tiny-qwen3", "tiny-qwen3_5-text"])
def test_leaves_are_the_files_tensors(fixtures: Path, folder: str) -> None:
    model, params = load_hf(fixtures / folder)
    table, leaves = name_table(model.config), dict(leaves_with_paths(params))
    expected = load_file(fixtures / folder / "model.safetensors")
    got = dense_by_name(table, {path: np.asarray(leaf) for path, leaf in leaves.items()})
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value)
    shapes = file_shapes(table, {path: leaf.shape for path, leaf in leaves.items()})
    assert shapes == {name: value.shape for name, value in expected.items()}
    assert weight_bytes(shapes, 4) == sum(value.nbytes for value in expected.values())


def test_factors_go_by_their_layer(fixtures: Path) -> None:
    """Layers of a hybrid model are stacked on two axes; the factor of each is marked with its number."""
    model, params = load_hf(fixtures / "tiny-qwen3_5-text")
    table = name_table(model.config)
    paths = [path for path, form in table.items() if form.transpose and len(form.stack) == 2]
    marked = {}
    for path in paths:
        form, d = table[path], dict(leaves_with_paths(params))[path].shape[-1]
        numbers = np.reshape(form.layers, (*form.stack, 1, 1))
        marked[path] = np.broadcast_to(numbers, (*form.stack, 3, d)).astype(jax.numpy.bfloat16)
    assert paths
    found = factors_by_name(table, marked)
    assert len(found) == sum(len(table[path].names) for path in paths)
    for name, factor in found.items():
        assert factor.shape[0] == 3
        assert np.all(factor == int(name.split(".")[2]))


def test_bytes_of_a_7b() -> None:
    """By hand: 28 layers, outputs of q, k, v, o, gate, up and down, r numbers of 2 bytes for each."""
    outputs = 3584 + 512 + 512 + 3584 + 18944 + 18944 + 3584
    script = Path(__file__).parents[2] / "scripts/sync_bytes.py"
    command = [sys.executable, script, "--presets", "qwen2.5-math-7b", "--ranks", "16", "256"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[3:5] for row in rows[2:]] == [[str(r), f"{28 * outputs * r * 2 / 1e6:.1f}"] for r in (16, 256)]
    assert factor_bytes({"a": (5, 7), "b": (3, 7)}, 4) == 64


def test_refuses_an_unknown_preset() -> None:
    script = Path(__file__).parents[2] / "scripts/sync_bytes.py"
    done = subprocess.run([sys.executable, script, "--presets", "none"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not known" in done.stderr
