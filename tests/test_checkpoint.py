"""Checkpoints: exact, on any mesh, never half written, and damage found before it is used."""

import json
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from members import HANGS

from logra_jax.checkpoint import Checkpoints, find_damage, newest_good, read_arrays, read_note, steps
from logra_jax.errors import UserError


class Inner(NamedTuple):
    count: jax.Array
    nothing: None
    empty: optax.EmptyState


def make_state(value: float = 0.0) -> dict:
    """Every kind of node a training state has, with bits that any rounding would lose."""
    rng = np.random.default_rng(7)
    dense = jnp.asarray(rng.normal(size=(64, 48)).astype(np.float32) + np.float32(value))
    return {
        "params": {"a": {"kernel": dense, "bias": None}, "b": dense[:8].astype(jnp.bfloat16)},
        "opt": (
            Inner(jnp.int32(3), None, optax.EmptyState()),
            {"key": jnp.array([1, 2**32 - 1], jnp.uint32)},
        ),
        "nan": jnp.array([np.nan, np.inf, -0.0], jnp.float32),
    }


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def template(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def saved(tmp_path, said):
    """A folder with steps 1 and 2, and a fresh `Checkpoints` on it."""
    first = Checkpoints(tmp_path, keep=5)
    first.save(1, make_state(1), {"consumed": 10})
    first.save(2, make_state(2), {"consumed": 20})
    first.close()
    checkpoints = Checkpoints(tmp_path, keep=5, report=said.append)
    yield checkpoints
    checkpoints.close()


def largest_file(folder: Path) -> Path:
    return max((p for p in (folder / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_round_trip_is_bit_exact_and_keeps_structure(saved):
    step, state, meta, host = saved.restore(template(make_state()))
    expected = make_state(2)
    assert (step, meta, host) == (2, {"consumed": 20}, {})
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert bits(state) == bits(expected)
    assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_arrays_of_the_host_come_back_and_are_summed(saved, tmp_path):
    given = {"rewards": np.array([[np.nan, 1]], np.float32), "stopped": np.array([True, False])}
    saved.save(3, make_state(3), {}, host=given)
    found = saved.restore(template(make_state())).host
    assert found.keys() == given.keys()
    for name, values in given.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype
    (tmp_path / "3" / "host.npz").write_bytes(b"")
    assert saved.restore(template(make_state())).step == 2


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 8), (2, 2)])
def test_restores_on_another_mesh(tmp_path, before, after):
    def place(devices):
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        return NamedSharding(mesh, PartitionSpec("x"))

    values = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": jax.device_put(values, place(before))}, {})
    wanted = place(after)
    state = checkpoints.restore({"w": jax.ShapeDtypeStruct((16, 5), jnp.float32, sharding=wanted)}).state
    checkpoints.close()
    assert state["w"].sharding == wanted
    np.testing.assert_array_equal(np.asarray(state["w"]), values)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: cut(largest_file(step)), "bytes instead of"),
        (lambda step: flip(largest_file(step)), "has changed"),
        (lambda step: largest_file(step).unlink(), "is missing"),
        (lambda step: largest_file(step).write_bytes(b""), "has 0 bytes"),
        (lambda step: flip(step / "meta.json"), "meta.json has changed"),
        (lambda step: cut(step / "checksums.json"), "checksums.json cannot be read"),
        (lambda step: (step / "checksums.json").unlink(), "checksums.json is missing"),
    ],
)
def test_damaged_newest_step_falls_back_and_says_so(saved, tmp_path, said, damage, reason):
    damage(tmp_path / "2")
    step, state, meta, host = saved.restore(template(make_state()))
    assert (step, meta, host) == (1, {"consumed": 10}, {})
    assert bits(state) == bits(make_state(1))
    assert str(tmp_path / "2") in said[0]
    assert reason in said[0]
    assert "step 1" in said[1]


def test_empty_step_folder_is_passed_over(saved, tmp_path, said):
    (tmp_path / "3").mkdir()
    assert saved.restore(template(make_state())).step == 2
    assert str(tmp_path / "3") in said[0]


def test_damaged_step_is_set_aside_until_the_next_save(saved, tmp_path):
    flip(largest_file(tmp_path / "2"))
    saved.restore(template(make_state()))
    assert steps(tmp_path) == [1]
    assert (tmp_path / "2.damaged").is_dir()
    saved.save(2, make_state(5), {})
    saved.wait()
    assert steps(tmp_path) == [1, 2]
    assert not (tmp_path / "2.damaged").exists()
    assert bits(saved.restore(template(make_state())).state) == bits(make_state(5))


def test_all_damaged_is_an_error_that_names_each(saved, tmp_path):
    flip(largest_file(tmp_path / "1"))
    cut(largest_file(tmp_path / "2"))
    with pytest.raises(UserError, match=r"every checkpoint is damaged: step 2: .*bytes.*step 1: .*changed"):
        saved.restore(template(make_state()))
    assert steps(tmp_path) == [1, 2]


def test_no_checkpoint_is_none(tmp_path):
    (tmp_path / "3.partial").mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore({}) is None
    checkpoints.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["params"]["a"].update(kernel=jnp.zeros((32, 48))),
            r"kernel is float32\[64, 48\].*\[32, 48\]",
        ),
        (lambda s: s["params"].update(b=jnp.zeros((8, 48))), r"params.b is bfloat16\[8, 48\].*float32"),
        (lambda s: s.update(extra=jnp.zeros(1)), "extra is not in the checkpoint"),
        (lambda s: s.pop("nan"), "nan is in the checkpoint only"),
    ],
)
def test_other_settings_are_named_not_misread(saved, change, message):
    state = make_state()
    change(state)
    with pytest.raises(UserError, match=message):
        saved.restore(template(state))


def test_keeps_the_last_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, score in [(1, float("nan")), (2, 0.9), (3, None), (4, 0.5), (5, 0.1), (6, 0.1)]:
        checkpoints.save(step, {"x": jnp.ones(2)}, {}, score)
    checkpoints.close()
    assert steps(tmp_path) == [2, 5, 6]


def test_keeps_only_the_last_without_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=False)
    for step, score in [(1, 0.9), (2, 0.1), (3, 0.2)]:
        checkpoints.save(step, {"x": jnp.ones(2)}, {}, score)
    checkpoints.close()
    assert steps(tmp_path) == [3]


def test_a_score_that_comes_later_is_noted(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"x": jnp.ones(2)}, {"pending": "its evaluation"})
    for score in (0.9, 0.1, None):  # the first one counts
        checkpoints.save(1, {"x": jnp.zeros(2)}, {"pending": None, "said": score}, score)
    assert read_note(tmp_path / "1") == {"step": 1, "score": 0.9, "meta": {"pending": None, "said": 0.9}}
    assert find_damage(tmp_path / "1") is None
    assert checkpoints.restore({"x": jnp.zeros(2)}).state["x"].tolist() == [1, 1]
    flip(tmp_path / "1" / "meta.json")
    assert find_damage(tmp_path / "1") == "meta.json has changed since it was written"
    flip(tmp_path / "1" / "meta.json")
    for step, score in [(2, 0.2), (3, 0.3)]:
        checkpoints.save(step, {"x": jnp.ones(2)}, {}, score)
    checkpoints.close()
    assert steps(tmp_path) == [1, 3]


@pytest.mark.parametrize("killed_at", range(1, 4))
def test_killed_while_noting_a_score(tmp_path, monkeypatch, killed_at):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jnp.ones(2)}, {})
    replace, calls = Path.replace, []

    def die(self, target):
        calls.append(target)
        if len(calls) == killed_at:
            raise OSError("killed")
        replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(UserError, match="step 1 could not be written"):
            checkpoints.save(1, {"x": jnp.ones(2)}, {}, 0.5)
    assert newest_good(tmp_path) == (1, [])
    checkpoints.save(1, {"x": jnp.ones(2)}, {}, 0.5)
    checkpoints.close()
    assert read_note(tmp_path / "1")["score"] == 0.5
    assert newest_good(tmp_path) == (1, [])


@pytest.mark.parametrize("async_", [True, False])
def test_donated_buffers_do_not_reach_the_file(tmp_path, async_):
    @partial(jax.jit, donate_argnums=0)
    def overwrite(x):
        return x * 0 - 1

    values = np.arange(2_000_000, dtype=np.float32)
    checkpoints = Checkpoints(tmp_path, async_=async_)
    state = jax.block_until_ready(jnp.asarray(values) + 1)
    checkpoints.save(1, {"x": state}, {})
    for _ in range(3):
        state = overwrite(state)
    jax.block_until_ready(state)
    restored = checkpoints.restore({"x": jax.ShapeDtypeStruct(values.shape, jnp.float32, sharding=state.sharding)})
    checkpoints.close()
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), values + 1)


PROGRAM = """
import os, resource, signal, sys
import jax.numpy as jnp
from logra_jax import checkpoint
from logra_jax.checkpoint import Checkpoints
from logra_jax.errors import UserError
checkpoints = Checkpoints(sys.argv[1], keep=1)
big = jnp.arange(3_000_000)
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess:
    code = PROGRAM + textwrap.dedent(program)
    return subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=HANGS)


def test_killed_while_saving_leaves_the_previous_step(tmp_path, said):
    done = run(
        tmp_path,
        """
        checkpoints.save(2, {"x": big}, {})
        checkpoints.wait()
        checkpoint._write_sums = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(3, {"x": big + 1}, {})
        checkpoints.wait()
        """,
    )
    assert done.returncode == -9, done.stderr
    assert (tmp_path / "3.partial").is_dir()
    checkpoints = Checkpoints(tmp_path, report=said.append)
    assert steps(tmp_path) == [2]
    assert not list(tmp_path.glob("*.partial"))
    restored = checkpoints.restore({"x": jnp.zeros(3_000_000, jnp.int32)})
    checkpoints.close()
    assert restored.step == 2
    assert said == []
    np.testing.assert_array_equal(np.asarray(restored.state["x"]), np.arange(3_000_000))


def test_leaving_without_waiting_never_leaves_half_a_step(tmp_path):
    done = run(
        tmp_path,
        "checkpoints.save(2, {'x': big}, {}); checkpoints.wait(); checkpoints.save(3, {'x': big}, {})",
    )
    assert done.returncode == 0, done.stderr
    step, problems = newest_good(tmp_path)
    assert step in (2, 3)
    assert problems == []


def test_failing_disk_is_reported_and_leaves_the_previous_step(tmp_path):
    done = run(
        tmp_path,
        """
        checkpoints.save(2, {"x": big}, {})
        checkpoints.wait()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            checkpoints.save(3, {"x": big * 1_000_003}, {})
            checkpoints.wait()
        except UserError as error:
            print("caught", error)
        print("left", os.listdir(sys.argv[1]))
        """,
    )
    assert "caught the checkpoint of step 3 could not be written" in done.stdout, done.stderr
    assert "left ['2']" in done.stdout  # half a step would take the space that the next attempt needs
    assert newest_good(tmp_path) == (2, [])


def test_read_arrays_takes_a_part_only(saved, tmp_path):
    found = read_arrays(tmp_path / "2", "params.")
    assert set(found) == {"params.a.kernel", "params.b"}
    assert bits(found["params.a.kernel"]) == bits(make_state(2)["params"]["a"]["kernel"])


def test_every_file_of_a_step_is_summed(saved, tmp_path):
    for step in (1, 2):
        noted = json.loads((tmp_path / str(step) / "checksums.json").read_text())
        on_disk = {
            p.relative_to(tmp_path / str(step)).as_posix() for p in (tmp_path / str(step)).rglob("*") if p.is_file()
        }
        assert set(noted) == on_disk - {"checksums.json"}
