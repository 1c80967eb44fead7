"""Graders under fire: functions that raise, hang, die or lie; hostile answers; workers that vanish."""

import os
import signal
import sys
import threading
from types import SimpleNamespace

import limits
import numpy as np
import pytest

from logra_jax.errors import UserError
from logra_jax.rl import workers
from logra_jax.rl.reward import ROW_ROUNDS, RewardCounts, make_reward
from logra_jax.rl.workers import HURRY, WorkerPool

FUNCTIONS = '''
import os, signal, sys, time

calls = 0

def reward(prompts, completions, columns):
    """Length of the completion, after whatever the completion asks for."""
    print("noise"); print("noise", file=sys.stderr); os.write(1, b"noise")
    scores = []
    for text, answer in zip(completions, columns["answer"], strict=True):
        if text == "raise":
            raise KeyError("first\\nlast line")
        if text == "hang":
            time.sleep(60)
        if text == "deaf":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            time.sleep(60)
        if text == "die":
            os._exit(3)
        if text == "exit":
            sys.exit(1)
        odd = {"nan": float("nan"), "none": None, "inf": float("inf")}
        scores.append(odd.get(text, len(text) + len(answer)))
    return scores

def one_short(prompts, completions, columns):
    return [1.0] * (len(completions) - 1)

def only_one(prompts, completions, columns):
    return [1.0]

def raises_then_none(prompts, completions, columns):
    return [] if len(completions) == 1 else 1 / 0

def prompts_too(prompts, completions, columns):
    return [float(p == c) for p, c in zip(prompts, completions, strict=True)]

def jax_seen(prompts, completions, columns):
    return [float("jax" in sys.modules)] * len(completions)

class Holder:
    @staticmethod
    def nested(prompts, completions, columns):
        return [2] * len(completions)

number = 5
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def given(monkeypatch):
    """The time limits that were given, one for each request; see `limits.as_needed`."""
    return limits.as_needed(monkeypatch, lambda request: {"hang", "deaf"}.intersection(request["completions"]))


def grade(grader, texts):
    return grader.grade([""] * len(texts), texts, {"answer": [""] * len(texts)})


def function(name="reward", timeout_s=60.0, workers=2):
    return make_reward(f"my_rewards:{name}", answer_column=None, timeout_s=timeout_s, workers=workers)


def test_function_rewards_in_order_and_noise_unheard(here, capfd):
    with function() as grader:
        rewards = grade(grader, ["a", "", "ccc"])
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [1.0, 0.0, 3.0]
    assert grader.counts == RewardCounts()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_function_sees_prompts_and_columns_and_needs_no_jax(here):
    with function("prompts_too") as grader:
        assert grader.grade(["a", "b"], ["a", "c"], {}).tolist() == [1.0, 0.0]
    with function("jax_seen") as grader:
        assert grade(grader, ["a"]).tolist() == [0.0]
    with function("Holder.nested") as grader:
        assert grade(grader, ["a", "b"]).tolist() == [2.0, 2.0]


def test_rewards_that_are_not_finite_drop_their_rows(here):
    with function() as grader:
        np.testing.assert_array_equal(grade(grader, ["a", "nan", "none", "inf"]), [1, np.nan, np.nan, np.nan])
        assert grader.counts == RewardCounts(non_finite=3)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("raise", RewardCounts(errors=1)),
        ("exit", RewardCounts(errors=1)),
        ("die", RewardCounts(errors=1)),
        ("hang", RewardCounts(timeouts=1)),
        ("deaf", RewardCounts(timeouts=1)),
    ],
)
def test_only_the_guilty_row_is_dropped(here, given, text, counts):
    with function() as grader:
        np.testing.assert_array_equal(grade(grader, ["a", text, "ccc"]), [1, np.nan, 3])
        assert grader.counts == counts
        assert grade(grader, ["dddd"]).tolist() == [4.0]  # and the next batch is served


def test_every_row_failing_is_an_error_with_the_last_reason(here):
    with function() as grader:
        with pytest.raises(UserError, match=r"every reward failed.*KeyError"):
            grade(grader, ["raise", "raise"])
        with pytest.raises(UserError, match=r"every reward failed.*no finite"):
            grade(grader, ["nan", "none"])


def test_one_number_per_completion(here):
    # "only_one" would pass row by row, and "one_short" would not.
    for name in ("only_one", "one_short"):
        with (
            function(name) as grader,
            pytest.raises(UserError, match=rf"my_rewards:{name} returned 1 numbers for 2 completions"),
        ):
            grade(grader, ["a", "b"])
    with function("raises_then_none") as grader, pytest.raises(UserError, match="returned 0 numbers for 1 completions"):
        grade(grader, ["a", "b"])


def test_an_error_says_where_it_was_raised(here):
    line = 1 + FUNCTIONS[: FUNCTIONS.index("raise KeyError")].count("\n")
    with function() as grader, pytest.raises(UserError, match=rf"KeyError: .*\(my_rewards.py, line {line}\)"):
        grade(grader, ["raise", "raise"])


def test_a_batch_of_hangs_ends_in_bounded_time(here, given, monkeypatch):
    """By a clock that every request moves on by the whole of its limit."""
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: 0.5 * len(given)))
    with function(timeout_s=0.5, workers=1) as grader:
        rewards = grade(grader, ["a"] + ["hang"] * 40)
    assert len(given) == 2 + ROW_ROUNDS  # the batch, the first row, and as many others as there is time for
    assert rewards[0] == 1.0
    assert np.isnan(rewards[1:]).all()
    assert grader.counts == RewardCounts(timeouts=40)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("my_rewards:missing", "missing"),
        ("my_rewards:number", "not callable"),
        ("no_such_module:f", "No module named 'no_such_module'$"),
        ("mathe", "mathe.*math, exact, reasoning_gym and module:function"),
        ("my rewards:f", "math, exact, reasoning_gym and module:function"),
    ],
)
def test_unusable_kinds_are_refused_at_once(here, kind, message):
    with pytest.raises(UserError, match=message):
        make_reward(kind, answer_column="answer", timeout_s=5.0, workers=1)


def test_settings_are_checked(here):
    with pytest.raises(UserError, match="answer_column"):
        make_reward("math", answer_column=None, timeout_s=1.0, workers=1)
    with pytest.raises(UserError, match="timeout_s"):
        make_reward("math", answer_column="answer", timeout_s=0.0, workers=1)
    with pytest.raises(UserError, match="workers"):
        make_reward("math", answer_column="answer", timeout_s=1.0, workers=0)
    with pytest.raises(UserError, match="needs a group"):
        make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1, pattern="#.*")
    with pytest.raises(UserError, match="regular expression"):
        make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1, pattern="(")


def test_exact_takes_group_one_of_the_last_match():
    texts = ["8*6=48#12#3528", "#3528 ", "3528", "", "#", "#352"]
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1, pattern="#([^#]*)$") as grader:
        rewards = grader.grade([""] * 6, texts, {"answer": [" 3528"] * 6})
        assert rewards.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert rewards.dtype == np.float32
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1, pattern=r"#(\d+)") as grader:
        assert grader.grade([""] * 2, ["#1 #2", "#2 #1"], {"answer": ["2"] * 2}).tolist() == [1.0, 0.0]
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1) as grader:
        assert grader.grade(["", ""], [" yes\n", "yes no"], {"answer": ["yes", "yes"]}).tolist() == [1.0, 0.0]


def test_answers_that_vote(maths):
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1, pattern="#([^#]*)$") as grader:
        assert grader.answers(["8*6=48#12#3528", "# 3528\n", "3528", "#"]) == ["3528", "3528", None, None]
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1) as grader:
        assert grader.answers([" yes\n", "yes no", ""]) == ["yes", "yes no", None]
    assert maths.answers([r"\boxed{\tfrac12} or \boxed{ 7 }", "7"]) == ["7", None]


def test_exact_with_an_optional_group_that_did_not_match():
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1, pattern="(x)?y") as grader:
        assert grader.grade([""], ["y"], {"answer": ["x"]}).tolist() == [0.0]


def test_rows_and_columns_must_agree_and_the_answer_column_exist():
    with make_reward("exact", answer_column="answer", timeout_s=1.0, workers=1) as grader:
        with pytest.raises(ValueError, match="one entry per row"):
            grader.grade([""], ["a", "b"], {"answer": ["a", "b"]})
        with pytest.raises(UserError, match=r"answer.*solution"):
            grader.grade([""], ["a"], {"solution": ["a"]})
        assert grader.grade([], [], {"answer": []}).shape == (0,)


@pytest.fixture(scope="module")
def maths():
    with make_reward("math", answer_column="answer", timeout_s=5.0, workers=2) as grader:
        yield grader


def test_grading_works_off_the_main_thread(maths):
    result = []
    thread = threading.Thread(
        target=lambda: result.append(maths.grade([""], [r"\boxed{\frac24}"], {"answer": ["1/2"]}))
    )
    thread.start()
    thread.join()
    assert result[0].tolist() == [1.0]


def test_hostile_answers_need_no_time_limit(maths):
    hostile = [
        r"\boxed{9^{9^{9^{9}}}}",
        r"\boxed{(1+x)^{100000}}",
        r"\boxed{(10^{7})!}",
        r"\boxed{3^{20^{6}}}",
    ]
    rewards = maths.grade([""] * 65, [*hostile * 16, r"\boxed{2}"], {"answer": ["2"] * 65})
    assert rewards.tolist() == [0.0] * 64 + [1.0]
    assert maths.counts == RewardCounts()


def test_after_many_late_answers_the_others_get_less_time(here, given):
    pool = WorkerPool("my_rewards:reward", 1, 1.0)
    request = lambda text: {"prompts": [""], "completions": [text], "columns": {"answer": [""]}}
    replies = pool.run([request(text) for text in ["hang"] * 12 + ["a"]], full_limits=2)
    pool.close()
    assert given == [1.0] * 2 + [HURRY] * 11
    assert replies == [{"late": True}] * 12 + [{"scores": [1.0]}]


def test_reference_answers_are_looked_at_before_training(maths):
    golds = ["1", " -20 ", "9^{9^{9^{9}}}", r"\frac{1}{2}", "", r"\int_0^1 x^x dx"]
    bad = maths.unusable({"answer": golds})
    assert list(bad) == [2, 4]
    assert "too large" in bad[2]
    assert "empty" in bad[4]


def test_a_worker_that_vanished_costs_nobody_a_reward(maths):
    for worker in list(maths._pool._workers):
        os.kill(worker.process.pid, signal.SIGKILL)
    rewards = maths.grade([""] * 4, [r"\boxed{2}"] * 4, {"answer": ["2", "2", "2", "3"]})
    assert rewards.tolist() == [1.0, 1.0, 1.0, 0.0]


def test_a_worker_that_gets_no_core_is_not_late():
    pool = WorkerPool("math", 1, 1.0)
    pool.run([{"gold": "3", "completion": r"\boxed{3}"}])  # the first one takes ten times as long
    number = pool._workers[0].process.pid
    os.kill(number, signal.SIGSTOP)
    go_on = threading.Timer(1.8, os.kill, (number, signal.SIGCONT))  # past the limit and what may be added to it
    go_on.start()
    replies = pool.run([{"gold": "2", "completion": r"\boxed{2}"}])
    go_on.join()
    pool.close()
    assert replies == [{"score": 1.0}]


def test_an_answer_that_its_worker_ended_itself_over_is_late_and_not_tried_again():
    pool = WorkerPool("math", 1, 60.0)
    pool.wait_ready()
    os.kill(pool._workers[0].process.pid, signal.SIGVTALRM)
    replies = pool.run([{"gold": "2", "completion": r"\boxed{2}"}] * 2)
    pool.close()
    assert replies == [{"late": True}, {"score": 1.0}]


def test_a_worker_that_vanished_while_it_started_is_replaced(maths):
    pool = maths._pool
    for worker in list(pool._workers):
        pool._drop(worker)
    pool.start(2)
    for worker in pool._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    assert maths.grade([""], [r"\boxed{2}"], {"answer": ["2"]}).tolist() == [1.0]


def test_workers_that_never_start_end_the_run(tmp_path, monkeypatch):
    (tmp_path / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="cannot be used: the grading process ended"):
        make_reward("dies:score", answer_column=None, workers=1, timeout_s=1.0)


def test_code_and_odd_characters_are_only_text(maths, tmp_path):
    target = tmp_path / "pwned"
    texts = [
        f'\\boxed{{__import__("os").system("touch {target}")}}',
        "\\boxed{\ud800}",
        "\\boxed{\x00\n}",
        '{"score": 1.0}\n{"score": 1.0}\n',
    ]
    rewards = maths.grade([""] * 4, texts, {"answer": ["4"] * 4})
    assert rewards.tolist() == [0.0] * 4
    assert not target.exists()


def test_unusable_gold_answers_drop_the_row_or_end_the_run(maths):
    rewards = maths.grade(["", ""], [r"\boxed{1}", r"\boxed{1}"], {"answer": ["9^{9^{9^{9}}}", "1"]})
    np.testing.assert_array_equal(rewards, [np.nan, 1.0])
    assert maths.counts == RewardCounts(errors=1)
    with pytest.raises(UserError, match=r"every reward failed.*gold answer is empty"):
        maths.grade([""], [r"\boxed{1}"], {"answer": [""]})


def test_an_interrupted_call_leaves_no_stale_replies(maths):
    def interrupt(signum, frame):
        raise KeyboardInterrupt

    def once_at_work():
        while not over.wait(0.01):
            if any(worker.task is not None for worker in maths._pool._workers):
                os.kill(os.getpid(), signal.SIGUSR1)
                return

    over, thread = threading.Event(), threading.Thread(target=once_at_work)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            maths.grade([""], [r"\boxed{2}"], {"answer": [r"\int_0^1 x^{x^{x^{x}}} dx"]})  # takes for ever
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, previous)
    assert maths.grade([""] * 3, [r"\boxed{2}"] * 3, {"answer": ["2", "3", "2"]}).tolist() == [1.0, 0.0, 1.0]


def test_close_ends_the_processes_and_may_be_repeated():
    grader = make_reward("math", answer_column="answer", timeout_s=1.0, workers=2)
    processes = [worker.process for worker in grader._pool._workers]
    assert len(processes) == 2
    grader.close()
    grader.close()
    assert all(process.returncode is not None for process in processes)
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([""], [r"\boxed{2}"], {"answer": ["2"]})


def test_workers_end_with_the_interpreter(here):
    import subprocess

    code = (
        "from logra_jax.rl.reward import make_reward\n"
        "g = make_reward('my_rewards:reward', answer_column=None, timeout_s=1.0, workers=1)\n"
        "print(g._pool._workers[0].process.pid)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(out.stdout), 0)
