"""Two runs never write to one folder, and a lock is in nobody's way once its run has ended, however it did."""

import errno
import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from logra_jax import cli, train
from logra_jax.checkpoint import steps
from logra_jax.errors import UserError
from logra_jax.lock import LOCK, hold
from logra_jax.metrics import read_rows

HOLDER = """
import sys, time
from pathlib import Path
from logra_jax.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds `tmp_path / "out"`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_one_is_refused_until_the_first_is_gone(holder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=f"another run writes to out={out}: "), hold(out):
        pass
    assert (out / LOCK).exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert [path.name for path in out.iterdir()] == [LOCK]
    with hold(out):
        pass
    assert list(out.iterdir()) == []  # it was there before


def test_it_leaves_nothing_behind(tmp_path):
    with hold(tmp_path / "a" / "b"):
        (tmp_path / "a" / "mine").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "mine"]
    with hold(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.yaml").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.yaml"]


def test_a_file_that_is_deleted_meanwhile_is_no_lock(tmp_path, monkeypatch):
    lock, path, calls = fcntl.flock, tmp_path / LOCK, []

    def ended_before(file, how):
        if not calls:
            path.unlink()  # by a run that held it when it was opened here
        calls.append(how)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", ended_before)
    with hold(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError, match="another run"), hold(tmp_path):
            pass


def test_file_systems_without_locks(tmp_path, monkeypatch):
    def unknown(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with hold(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"out=.*file/out cannot be written: .*Not a directory"),
        hold(tmp_path / "file" / "out"),
    ):
        pass


def test_runs_that_share_a_folder(command_settings, holder, capsys):
    """`holder` holds out/ below the current folder."""
    argv = [*command_settings, "steps=2", "data.eval=null", "checkpoint.every=1"]

    def refused(*more):
        with pytest.raises(SystemExit, match="2"):
            cli.run(lambda: train.main([*argv, *more]))
        assert "error: another run writes to out=out: " in capsys.readouterr().err

    refused()  # one that has written nothing yet: out holds nothing but the lock
    assert [path.name for path in Path("out").iterdir()] == [LOCK]
    holder.kill()
    holder.wait()
    assert train.main(argv) == 0
    partial = Path("out/checkpoints/3.partial")
    partial.mkdir()
    kept = Path("out/metrics.jsonl").read_bytes()
    with hold(Path("out")):
        refused("--resume", "steps=3")
        refused("--overwrite")
    assert partial.is_dir()
    assert Path("out/metrics.jsonl").read_bytes() == kept
    assert train.main([*argv, "steps=3", "--resume"]) == 0
    assert [row["step"] for row in read_rows("out/metrics.jsonl")] == [0, 1, 2]
    assert train.main([*argv, "--overwrite", "steps=1"]) == 0
    assert steps(Path("out/checkpoints")) == [1]
    assert not Path("out", LOCK).exists()


def test_a_run_that_ends_before_the_lock_is_taken_is_not_written_over(command_settings, monkeypatch, capsys):
    make = train.hold

    def late(out):
        out.mkdir()
        (out / "config.yaml").write_text("steps: 1\n")
        return make(out)

    monkeypatch.setattr(train, "hold", late)
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main(command_settings))
    assert "out=out is not empty" in capsys.readouterr().err
    assert Path("out/config.yaml").read_text() == "steps: 1\n"
