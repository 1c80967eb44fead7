"""The numpy twin: the golden file, and jax bit for bit."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logra_jax.optim import twin
from logra_jax.optim.names import name_hash


def cases() -> list[dict]:
    return json.loads((Path(__file__).parents[1] / "golden" / "projection.json").read_text())["cases"]


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c['name']}-{c['update']}")
def test_golden(case: dict) -> None:
    assert name_hash(case["name"]) == case["name_hash"]
    assert list(twin.weight_key(case["seed"], case["update"], case["name"])) == case["key"]
    got = twin.signs(case["seed"], case["update"], case["name"], case["r"], case["d_in"])
    assert got.dtype == np.int8
    assert got.shape == (case["r"], case["d_in"])
    assert got[0].tolist()[: len(case["signs_first_row"])] == case["signs_first_row"]
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["signs_sha256"]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    update=st.integers(0, 2**31 - 1),
    r=st.sampled_from([1, 3, 8]),
    k=st.sampled_from([2, 31, 32, 33, 100]),
    name=st.text(min_size=1, max_size=12),
)
def test_jax_draws_the_same(seed: int, update: int, r: int, k: int, name: str) -> None:
    key = jax.random.key(np.uint32(seed), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, update), np.uint32(name_hash(name)))
    words = np.asarray(jax.random.bits(key, (r, -(-k // 32)), jnp.uint32))
    expected = [[1 if words[i, j // 32] >> (j % 32) & 1 else -1 for j in range(k)] for i in range(r)]
    np.testing.assert_array_equal(twin.signs(seed, update, name, r, k), expected)


def test_twin_needs_no_jax() -> None:
    code = (
        "import sys, logra_jax, logra_jax.errors, logra_jax.optim.names, logra_jax.optim.twin; "
        "print([m for m in ('jax', 'jaxlib', 'flax', 'optax') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("case", cases(), ids=lambda c: f"{c['name']}-{c['update']}")
def test_torch_draws_the_same(case: dict) -> None:
    torch = pytest.importorskip("torch")
    got = twin.signs(case["seed"], case["update"], case["name"], case["r"], case["d_in"], xp=torch)
    assert got.dtype == torch.int8
    assert hashlib.sha256(got.contiguous().numpy().tobytes()).hexdigest() == case["signs_sha256"]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("columns", [(0, 32), (5, 6), (31, 33), (64, 100), (7, 100), (0, 100)])
def test_a_block_of_columns_is_drawn_by_itself(library: str, columns: tuple[int, int]) -> None:
    xp = pytest.importorskip(library)
    got = twin.signs(2**32 - 1, 3, "a.weight", 5, 100, columns, xp=xp)
    key = jax.random.fold_in(jax.random.key(np.uint32(2**32 - 1), impl="threefry2x32"), 3)
    words = np.asarray(jax.random.bits(jax.random.fold_in(key, np.uint32(name_hash("a.weight"))), (5, 4), jnp.uint32))
    expected = [[1 if words[i, j // 32] >> (j % 32) & 1 else -1 for j in range(*columns)] for i in range(5)]
    np.testing.assert_array_equal(np.asarray(got), expected)
