"""Processes that are one run: how they find each other, that they change no result, and how they end."""

import json
import os
import re
import signal
import socket
from pathlib import Path

import jax
import numpy as np
import pytest
from members import assert_same, ended, outcome, variables

from logra_jax import cli, distributed, train
from logra_jax.config import load_config
from logra_jax.distributed import Member, find
from logra_jax.errors import UserError
from logra_jax.rl.reward import RewardCounts

STEP = {
    "SLURM_JOB_ID": "70001", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08,11],login", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


# 61440 + (70001 + 2) % 4096 = 61811
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (variables("node:1234", "4", "3"), Member("node:1234", 4, 3)),
        (variables(None, "1", None) | STEP, None),  # said to be on its own
        (variables("", "", ""), None),
        (STEP, Member("gpu07:61811", 8, 5, (1,))),
        (STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, Member("gpu07:61811", 8, 5, (1,))),
        (STEP | {"CUDA_VISIBLE_DEVICES": "3"}, Member("gpu07:61811", 8, 5)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}, Member("gpu07:61811", 8, 5)),
        (STEP | {"SLURM_STEP_NODELIST": "a-1,b[2-3]"}, Member("a-1:61811", 8, 5, (1,))),
        (variables("node:1", "2", "0") | STEP, Member("node:1", 2, 0)),
        # The shell of an allocation of eight tasks, with and without a step of its own
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        (STEP | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    ],
)
def test_who_takes_part(environment, expected):
    assert find(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (variables("node:1", "2", None), "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES is set but JAX_PROCESS_ID is not"),
        (variables(None, "2", None), "is set but JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID is not"),
        (variables("node:1", "2", "2"), "JAX_PROCESS_ID=2 and JAX_NUM_PROCESSES=2"),
        (variables("node:1", "0", "0"), "JAX_PROCESS_ID=0 and JAX_NUM_PROCESSES=0"),
        (variables("node:1", "2", "-1"), "JAX_PROCESS_ID=-1: expected a whole number"),
        (variables("node:1", "two", "0"), "JAX_NUM_PROCESSES=two: expected a whole number"),
        (variables("node", "2", "0"), "JAX_COORDINATOR_ADDRESS=node: expected host:port"),
        (variables("node:99999", "2", "0"), "JAX_COORDINATOR_ADDRESS=node:99999: expected host:port"),
        (STEP | {"SLURM_PROCID": ""}, "SLURM_STEP_NUM_TASKS is set but SLURM_PROCID is not"),
    ],
)
def test_wrong_variables(environment, message, monkeypatch, capsys):
    with pytest.raises(UserError, match=re.escape(message)):
        find(environment)
    monkeypatch.chdir(Path(__file__).parent)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main(["--dry-run"]))
    assert message in capsys.readouterr().err


def test_a_place_that_cannot_be_met_at():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}, where the processes meet, cannot be used: Address already"):
            distributed.join(Member(f"localhost:{port}", 2, 0), join_s=1, silent_s=60)
    with pytest.raises(UserError, match=r"JAX_COORDINATOR_ADDRESS=no.such.host.invalid:1: unknown host"):
        distributed.join(Member("no.such.host.invalid:1", 2, 1), join_s=1, silent_s=60)


def test_a_folder_that_is_not_shared(tmp_path, monkeypatch):
    config = load_config(None, [f"out={tmp_path}"])
    assert train.unseen(config) is None  # the process that writes
    monkeypatch.setattr(distributed, "first", lambda: False)
    assert f"out={tmp_path} is another folder here" in str(train.unseen(config, patience=0.0))
    (tmp_path / "config.yaml").touch()
    assert train.unseen(config, patience=0.0) is None


NCCL = "INTERNAL: NCCL operation ncclGroupEnd() failed: "


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (
            "Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4",
            True,
        ),
        ("Gloo AllGather failed: [external/gloo/transport/tcp/pair.cc:534] Read error [::1]:4: Broken pipe", True),
        ("[external/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation", True),
        (f"{NCCL}remote process exited or there was a network error", True),
        (f"INTERNAL: all-reduce\n{NCCL}unhandled system error. Last NCCL warning: Connection timed out", True),
        ("UNAVAILABLE: The following tasks missed heartbeats: /job:jax_worker/replica:0/task:1", True),
        ("INTERNAL: NCCL operation ncclCommInitRankConfig failed: invalid usage (run with NCCL_DEBUG=WARN)", False),
        (f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        ("INVALID_ARGUMENT: Gloo does not support this reduction", False),
        ("INTERNAL: no kernel image", False),
    ],
)
def test_errors_that_mean_that_another_one_is_lost(text, lost, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(distributed, "alone", lambda: False)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    distributed.leave(RuntimeError(text), distributed.FAILED)
    assert codes == [distributed.LOST if lost else distributed.FAILED]
    said = capsys.readouterr().err
    assert ("has lost another one" in said) == lost
    assert (f"RuntimeError: {text}" in said) == (not lost)


MEMBER = """
import json, math, os, signal, sys
from contextlib import closing
from pathlib import Path
import numpy as np
from logra_jax import cli, distributed
from logra_jax.config import load_config
from logra_jax.errors import SharedError, UserError
from logra_jax.signals import StopFlag, Stopped
from logra_jax.watchdog import Watchdog

def raised(call, *arguments):
    try:
        return call(*arguments)
    except SharedError as error:
        return str(error)

def fail():
    raise OSError("the disk is full")

def main():
    with StopFlag() as stop, Watchdog(0) as watchdog:
        silent = 10 if sys.argv[1] == "dies" else 100
        config = load_config(None, [f"processes.join_s={sys.argv[2]}", f"processes.silent_s={silent}"])
        cli.begin(config, distributed.find(os.environ), stop, watchdog)
        print(f"process {distributed.number()}")
        print(json.dumps(everything()), file=sys.__stdout__, flush=True)
        if sys.argv[1] == "dies" and distributed.number() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                stop.check()
        except Stopped as stopped:
            return stopped.code

def saved(split, rows):
    import jax
    from logra_jax.checkpoint import Checkpoints
    from logra_jax.mesh import fetch, place_array as place
    folder, said = Path(__file__).parent / sys.argv[1], []
    with closing(Checkpoints(folder, keep=3, report=said.append)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": place(rows * step, split)}, {"at": step}, score=None)
        checkpoints.wait()
        if distributed.first():
            next((folder / "2" / "state" / "d").iterdir()).write_bytes(b"")
        step, state, meta, _ = checkpoints.restore({"x": jax.ShapeDtypeStruct((2, 3), "float32", sharding=split)})
        names = sorted(path.name for path in folder.iterdir())
        if distributed.on_first(lambda: 0) == 0 and distributed.first():
            (folder / "1" / "meta.json").unlink()
        every = raised(checkpoints.restore, {"x": jax.ShapeDtypeStruct((2, 3), "float32", sharding=split)})
        return step, fetch(state["x"]).tolist(), meta, len(said), names, every.split(":")[0]

def everything():
    import jax
    from logra_jax.mesh import fetch, make_mesh, place_array as place
    from logra_jax.rl.reward import Grader, RewardCounts
    from logra_jax.rl.shared_grading import SharedGrader
    me = distributed.number()
    if sys.argv[1] == "mistake" and me == 1:
        raise UserError("this one alone is wrong")
    if sys.argv[1] == "fault" and me == 1:
        raise KeyError("a fault")

    class Length(Grader):
        def _grade(self, prompts, completions, columns):
            assert prompts == columns["a"]
            if "bad" in completions:
                raise UserError("no such function")
            return [float(len(c)) or math.nan for c in completions], RewardCounts(1 + me, me), "empty"

        def unusable(self, columns):
            return {i: f"{text} of {me}" for i, text in enumerate(columns["a"]) if text.startswith("bad")}

    def grade(*texts):
        prompts = [f"p{i}" for i in range(len(texts))]
        grader = SharedGrader(Length())
        scores, counts = grader.grade_counted(prompts, texts, {"a": prompts})
        return scores.tolist(), str(counts)

    mesh = make_mesh(2, 1)
    split, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    rows = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    stored = saved(split, rows)
    there = place(rows, split)
    found = {
        "stored": stored,
        "first": distributed.first(),
        "largest": distributed.largest(7 - me),
        "agree": distributed.agree(None),
        "disagree": raised(distributed.agree, UserError("mine") if me == 1 else None),
        "on_first": distributed.on_first(lambda: 5 if me == 0 else 1 / 0),
        "failed": raised(distributed.on_first, fail),
        "own": str(distributed.own_rows(5)),
        "collected": distributed.collect(np.full(2 + me, me, np.float32), 5).tolist(),
        "local": there.addressable_data(0).tolist(),
        "fetched": [leaf.tolist() for leaf in fetch((there, place(rows, whole), there[1], rows))],
        "grades": grade("a", "bb", "", "dddd", "eeeee"),
        "one": grade("a"),
        "none": raised(grade, "", ""),
        "bad": raised(grade, "a", "bad"),
        "unusable": sorted(SharedGrader(Length()).unusable({"a": ["a", "bad 1", "c", "bad 3", "e"]}).items()),
    }
    try:
        make_mesh(1, 1)
    except UserError as error:
        found["mesh"] = str(error)
    return found

cli.run(main)
"""


def test_what_processes_say_to_each_other_and_how_they_end(members, tmp_path):
    Path(tmp_path / "member.py").write_text(MEMBER)
    runs = {how: members(str(tmp_path / "member.py"), how, "600") for how in ("dies", "mistake", "fault", "stop")}
    late = members(str(tmp_path / "member.py"), "late", "2", count=1)
    (code, _, errors), *_ = ended(late)
    assert code == 2
    assert re.search(r"process 0 of 2 did not meet the others at localhost:\d+ within 2 s \(processes.join_s\)", errors)

    (survived, output, errors), (killed, other, _) = ended(runs["dies"])
    assert killed == -signal.SIGKILL
    assert survived != 0
    assert "has lost another one" in errors or "another task died" in errors
    rows = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert output.startswith("process 0\n")
    for number, text in enumerate((output.removeprefix("process 0\n"), other)):
        folder = tmp_path / "dies"
        assert json.loads(text) == {
            "stored": [
                1,
                rows,
                {"at": 1},
                2 * (number == 0),
                ["1", "2.damaged"],
                [str(folder), "process 0 failed; see what it has written"][number],
            ],
            "first": number == 0,
            "largest": 7,
            "agree": None,
            "disagree": ["process 1 failed; see what it has written", "mine"][number],
            "on_first": 5,
            "failed": ["the disk is full", "process 0 failed; see what it has written"][number],
            "own": ["slice(0, 2, None)", "slice(2, 5, None)"][number],
            "collected": [0.0, 0.0, 1.0, 1.0, 1.0],
            "local": [rows[number]],
            "fetched": [rows, rows, rows[1], rows],
            "grades": [[1.0, 2.0, pytest.approx(np.nan, nan_ok=True), 4.0, 5.0], str(RewardCounts(3, 1))],
            "one": [[1.0], str(RewardCounts(2, 1))],  # which the second one has graded
            "none": "every reward failed (2 rows): empty",
            "bad": ["process 1 failed; see what it has written", "no such function"][number],
            "unusable": [
                [[1, "bad 1 of 0"], [3, "see the other processes"]],
                [[1, "see the other processes"], [3, "bad 3 of 1"]],
            ][number],
            "mesh": "mesh fsdp=1 x tensor=1 leaves devices idle, but 2 processes have 2 together and all have to "
            "take part: choose sizes whose product is 2",
        }

    for _ in range(2):
        runs["stop"][0].stdout.readline()
    runs["stop"][1].terminate()  # one of them is enough
    assert [code for code, *_ in ended(runs["stop"])] == [143, 143]
    (left, _, _), (mistaken, _, errors) = ended(runs["mistake"])
    assert left != 0
    assert mistaken == 2
    assert errors.splitlines()[-1] == "error: process 1: this one alone is wrong"
    (left, _, _), (faulty, _, errors) = ended(runs["fault"])
    assert left != 0
    assert faulty == 1
    assert "KeyError: 'a fault'" in errors


def test_two_processes_are_one_with_two_devices(members, command_settings, capsys):
    settings = [*command_settings, *["mesh.fsdp=2", "loss.reference_kl=0", "kl.check_every=0"]]
    # Evaluation samples with the program of the rollouts.
    settings += ["checkpoint.every=1", "eval.every=1", "eval.before=false", "eval.max_prompts=5", "eval.samples=2"]
    (code, output, errors), (code_too, nothing, more) = ended(members("-m", "logra_jax.train", *settings, "steps=2"))
    assert (code, code_too) == (0, 0), errors + more
    assert output.splitlines()[-1].startswith("done: 2 updates")
    assert not nothing  # one of them writes
    assert train.main([*settings, "out=whole", "steps=2"]) == 0
    assert_same(outcome("out", 2), outcome("whole", 2))
    for out in ("out", "whole"):
        assert train.main([*settings, f"out={out}", "steps=3", "--resume"]) == 0
        assert "resumed after 2 updates" in capsys.readouterr().out
    assert_same(outcome("out", 3), outcome("whole", 3))
