"""The training command from the command line to its files: what it writes, refuses, and survives."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from logra_jax import cli, train
from logra_jax.checkpoint import read_arrays, steps
from logra_jax.config import load_config, to_yaml
from logra_jax.errors import UserError
from logra_jax.metrics import read_rows
from logra_jax.models import load_hf

KEYS = """
step reward/mean response/length entropy grad/norm advantage/zero_share clip/share rows/dropped
kl/predicted kl/alpha kl/budget time/rollout_s time/reward_s time/update_s tokens/s
"""


@pytest.fixture
def base(command_settings):
    return command_settings


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(argv, capsys):
    """The message with which the command leaves with code 2."""
    with pytest.raises(SystemExit) as left:
        cli.run(lambda: train.main(argv))
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_a_run_writes_what_it_says(base, capsys):
    assert train.main(base) == 0
    out = Path("out")
    rows = read_rows(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row.keys() >= set(KEYS.split())
        assert all(value is not None for value in row.values())
        assert ("kl/realized" in row) == (row["step"] % 2 == 0)
        assert row["kl/predicted"] <= row["kl/budget"] * 1.001
        assert 1 <= row["response/length"] <= 6
    # Evaluated before training, after update 2 (row 1), and after the last update.
    assert {row["step"]: row["eval/updates"] for row in rows if "eval/accuracy" in row} == {0: 0, 1: 2, 3: 4}
    assert any(row["reward/mean"] > 0 and row["grad/norm"] > 0 for row in rows)
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(out / "config.yaml") == load_config(None, base)
    assert steps(out / "checkpoints") == [2, 4]
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints", "config.yaml", "curves.png", "hf", "metrics.jsonl",
    ]  # fmt: skip

    model, params = load_hf(out / "hf")
    saved = read_arrays(out.resolve() / "checkpoints" / "4", "params.")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert len(leaves) == len(saved)
    for path, leaf in leaves:
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(saved[name]))
    _, before = load_hf(re.search(r"model.path=(.*)", " ".join(base))[1].split()[0])
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), params, before)
    assert moved["layers"]["mlp"]["up_proj"]["kernel"]
    assert not moved["embed_tokens"]["embedding"]
    assert model.logits(params, np.array([[3, 4]])).shape == (1, 2, 32)

    said = capsys.readouterr()
    assert said.err == ""
    assert "update 4/4  reward" in said.out
    assert said.out.splitlines()[-1].startswith("done: 4 updates")

    kept = files(out)
    assert train.main([*base, "--resume"]) == 0  # there is nothing left to do
    assert files(out) == kept
