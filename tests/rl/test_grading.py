r"""Which answers are right. Graded by real workers, whole table at once, as the trainer does."""

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from logra_jax.rl.math_answer import BadGold, check_gold, score
from logra_jax.rl.math_text import answer_text, last_box
from logra_jax.rl.reward import RewardCounts, make_reward

CASES = Path(__file__).parents[1] / "cases/grader.jsonl"
# Reports about neighbouring graders; a score marked `policy` is a choice made here: the last box counts, no
# box earns nothing, symbols ignore case, a gold answer that cannot be evaluated drops the row (null).
ROWS = [json.loads(line) for line in CASES.read_text().splitlines()]
# By kind of answer, each with a verdict reasoned from mathematics, or from a policy that `why` names.
KINDS = [json.loads(line) for line in CASES.with_name("grader_kinds.jsonl").read_text("utf-8").splitlines()]

# gold, content of the box, right score
PAIRS = [
    # the whole box must parse; nothing is picked out of it
    ("4", r"4\sqrt(2)", 0),
    (r"4\sqrt{2}", r"4\sqrt(2)", 1),
    ("f(x)=0", r"\forall x>0, f(x)=0", 0),
    ("12", "1 2", 0),
    ("3", "1 2", 0),
    ("15", "4 5 6", 0),
    ("5", "5,6", 0),
    ("5", r"5 \text{ or } 6", 0),
    # clock times and ratios
    ("12:00", "1:00", 0),
    ("12:00", "12:00", 1),
    ("1:2:3", "2:4:6", 1),
    ("1:2:3", "1:3:2", 0),
    ("3:2", "6:4", 1),
    ("a:b", "b:a", 0),
    # equations and inequalities, up to a factor
    ("3*x-1*y+13=0", "3x+4y+14=0", 0),
    ("3x-y+13=0", "y=3x+13", 1),
    ("y=2x+1", "2x-y+1=0", 1),
    ("x^2+y^2=4", "y^2+x^2-4=0", 1),
    ("x=1", "y=1", 0),
    ("x=5", "5", 1),
    ("5", "x=5", 1),
    ("x<5", "5>x", 1),
    ("x<5", "x>5", 0),
    ("x<5", r"x\le 5", 0),
    ("-x<-5", "x>5", 1),
    ("f(x)=x^2", "x^2", 1),
    ("f(x)=x^2", "f(x)=x^3", 0),
    # expressions, equal where both are real
    ("|x|", "x", 0),
    (r"\sqrt{x^2}", "x", 0),
    ("x^2-1", "(x-1)(x+1)", 1),
    ("x^2-1", "(x-1)(x+2)", 0),
    ("(-1)^{n+1}", "-(-1)^n", 1),
    ("n!", "n(n-1)!", 1),
    (r"\cos 2x", r"1-2\sin^2 x", 1),
    (r"\sin x", r"\cos x", 0),
    ("x+1", "y+1", 0),
    ("10^{-20}x", r"2\cdot10^{-20}x", 0),
    # decimals: exact, or a rounding with six digits
    ("0.333333", r"\frac13", 1),
    (r"\frac13", "0.3333", 0),
    (r"\frac23", "0.666667", 1),
    (r"\frac23", "0.666666", 1),
    (r"\frac23", "0.666668", 0),
    (r"\sqrt{2}", "1.41421356", 1),
    (r"\sqrt2", "1.41421366", 0),
    (r"\pi", "3.14", 0),
    ("2", "1.9999999", 0),
    ("2.5", "2.50001", 0),
    ("18.9", "18.90", 1),
    (r"0.1\overline{6}", "1/6", 1),
    (r"3.0\times 10^8", "300000000", 1),
    ("3^{1000}", "3^{1000}+1", 0),
    ("10^{-20}", r"2\cdot 10^{-20}", 0),
    (r"\{10^{-9},2\}", r"\{2\cdot10^{-9},2\}", 0),
    ("0", r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt{6}}", 1),
    ("5!", "120", 1),
    (r"1-\frac{1}{\mathrm{e}}", r"\frac{\mathrm{e}-1}{\mathrm{e}}", 1),
    ("3", r"\log_2 8", 1),
    (r"e^{i\pi}", "-1", 1),
    ("2+3i", "2-3i", 0),
    # percent, money, units, words
    ("28", r"28\%", 1),
    (r"28\%", "0.28", 1),
    ("0.28", "28", 0),
    (r"\$18.90", "18.90", 1),
    ("10", r"10\text{ cm}", 1),
    (r"\text{(C)}", "C", 1),
    ("A", "B", 0),
    ("21_3", "21_4", 0),
    ("21_{3}", "21_3", 1),
    ("21_3", "21", 1),
    ("(21_3, 5)", "(21_4, 5)", 0),
    (r"21_{\text{three}}", r"21_{\text{four}}", 0),
    ("4210_5", r"4210_{\text{five}}", 1),
    (r"\text{east}", r"\text{west}", 0),
    # ratios, times of day
    ("1:2:3", r"2:4:\,6", 1),
    ("1:2:3", "1:2:4", 0),
    ("0:2:3", "0:4:6", 1),
    ("0:0", "1:2", 0),
    ("0:2:3", "5:2:3", 0),
    ("2:5", "12:30", 1),
    ("12:30", "2:5", 0),
    ("12:30", "12: 30", 1),
    ("5:100", "1:20", 1),
    ("1:100", "2:200", 1),
    # tuples, intervals, sets, matrices
    ("(1,2)", "(2,1)", 0),
    ("(1, 2)", "[1,2]", 0),
    (r"(\frac12, 3)", "(0.5,3)", 1),
    ("(1,2,3)", "(1,2,4)", 0),
    ("1,2,3", "3,2,1", 1),
    ("1,2,3", "1,2", 0),
    (r"\pm 2", "2,-2", 1),
    (r"\infty", r"-\infty", 0),
    (r"\begin{pmatrix}1/2\\3\end{pmatrix}", r"\begin{pmatrix}0.5\\3\end{pmatrix}", 1),
]


def completion(row: dict) -> str:
    if "terms" in row:
        return "\\boxed{" + "+".join(f"x^{{{power}}}" for power in range(row["terms"])) + "}"
    if "pieces" in row:
        return "".join(text * count for text, count in row["pieces"])
    return row["completion"]


@pytest.fixture(scope="module")
def grader():
    # The default: none of these texts needs it. It counts CPU time, so that what else the machine does is no matter.
    with make_reward("math", answer_column="answer", timeout_s=5.0, workers=2) as grader:
        yield grader


@pytest.fixture(scope="module")
def reported(grader):
    texts = [completion(row) for row in ROWS]
    scores = grader.grade([""] * len(ROWS), texts, {"answer": [row["gold"] for row in ROWS]})
    return dict(zip((row["id"] for row in ROWS), scores.tolist(), strict=True)), grader.counts


@pytest.fixture(scope="module")
def paired(grader):
    texts = [f"so \\boxed{{{box}}}." for _, box, _ in PAIRS]
    return grader.grade([""] * len(PAIRS), texts, {"answer": [gold for gold, _, _ in PAIRS]}).tolist()


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_reported_case(reported, row):
    got = reported[0][row["id"]]
    if row["score"] == "any":
        assert got in (0.0, 1.0)
    elif row["score"] is None:
        assert math.isnan(got)
    else:
        assert got == row["score"], row["note"]


def test_reported_cases_need_no_time_limit(reported):
    # The unsolvable integral and the huge answers (a dozen) are refused before they are evaluated.
    assert reported[1].timeouts == 0
    assert reported[1].errors == 1  # the gold answer that cannot be evaluated


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[f"{gold} | {box}" for gold, box, _ in PAIRS])
def test_pair(paired, number):
    assert paired[number] == PAIRS[number][2]


def test_pairs_by_kind(grader):
    texts = [row["completion"] if "completion" in row else f"so \\boxed{{{row['box']}}}." for row in KINDS]
    found = grader.grade([""] * len(KINDS), texts, {"answer": [row["gold"] for row in KINDS]})
    wrong = [row for row, score in zip(KINDS, found.tolist(), strict=True) if score != row["score"]]
    assert wrong == []
    assert len(KINDS) > 300
    # A reference answer that is judged must be one that may be in a file. One is compared by its text alone.
    assert len(grader.unusable({"answer": [row["gold"] for row in KINDS]})) == 1


def test_hostile_answers_do_not_hold_up_the_others(grader):
    """One in a hundred, of kinds that would take for ever: none is evaluated (scripts/check_grader.py times them)."""
    spec = importlib.util.spec_from_file_location("check_grader", Path(__file__).parents[2] / "scripts/check_grader.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    hostile = [text % 7 for text in script.HOSTILE]
    texts = [*hostile, *(f"\\boxed{{{n % 10}}}" for n in range(100 * len(hostile)))]
    found = grader.grade([""] * len(texts), texts, {"answer": ["3"] * len(texts)})
    assert grader.counts == RewardCounts()
    assert found.tolist() == [0.0] * len(hostile) + [float(n % 10 == 3) for n in range(100 * len(hostile))]


def test_integrals_sums_and_limits_are_no_answers_unless_asked_for():
    assert score("5050", r"\boxed{\sum_{k=1}^{100} k}") == 0.0
    assert score("2", r"\boxed{\int_0^2 1\,dx}") == 0.0
    assert score(r"\sum_{k=1}^{n} k^2", r"\boxed{\sum_{j=1}^{n} j^2}") == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("$ $", "empty"),
        (r"\frac{1}{", "neither mathematics"),
        ("9^{9^{9^{9}}}", "too large"),
        ("1+" * 400 + "1", "over 600 characters"),
        ("(" * 30 + "1" + ")" * 30, "20 deep"),
    ],
)
def test_unusable_reference_answers(text, reason):
    with pytest.raises(BadGold, match=reason):
        check_gold(text)
    for fine in ("5", r"\text{east}", "no solution", "12:00", r"x\in[1,2]", r"\boxed{\frac12}", "O'Brien", r"25\%"):
        check_gold(fine)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\boxed{5} + 1}", r"\boxed{5} + 1"),
        (r"\boxed{4} and \boxed{5", "4"),
        (r"{ stray \boxed{6} }", "6"),
        (r"\boxed{}", ""),
        (r"\boxed5", None),
        (r"\fbox{5}", None),
        (r"\boxed{5\}", None),
        ("", None),
    ],
)
def test_last_complete_box(text, content):
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{ \dfrac{1}{2}. }", r"\frac{1}{2}"),
        (r"\boxed{$\left(1, 2\right)$}", "(1,2)"),
        (r"\boxed{5}, no: \boxed{12 000}", "12000"),
        (r"\boxed{1/2}", "1/2"),  # equal to the first, and not the same text
        (r"\boxed{}", None),
        ("5", None),
    ],
)
def test_the_text_of_an_answer(text, answer):
    assert answer_text(text) == answer


def test_the_text_of_a_hostile_answer_takes_little_time():
    start = time.thread_time()  # of this thread alone, whatever else the machine does
    for part in (".", "\\text{1 ", " ", "1 ", "{", "\\sqrt(", "1.", "\\, "):
        answer_text(f"\\boxed{{{part * (200 // len(part) - 1)}x}}")
        answer_text(f"\\boxed{{{part * 10_000}x}}")
    assert time.thread_time() - start < 2.0


def test_last_box_takes_linear_time():
    start = time.thread_time()
    assert last_box("\\boxed{" * 100_000) is None
    assert last_box("\\boxed{" * 200_000 + "1" + "}" * 200_000) is not None
    assert time.thread_time() - start < 3.0


def test_gold_may_be_boxed_itself_and_must_not_be_empty():
    assert score(r"The answer is \boxed{8}.", r"\boxed{8}") == 1.0
    assert score(r"The answer is \boxed{8}.", r"\boxed{9}") == 0.0
    with pytest.raises(BadGold):
        score("  ", r"\boxed{}")


def test_ratio_too_large_to_compare():
    assert score("1:2", r"\boxed{1:9^{9^{9^{9}}}}") == 0.0
    with pytest.raises(BadGold):
        score("1:9^{9^{9^{9}}}", r"\boxed{1:2}")
    with pytest.raises(BadGold):
        check_gold("1:9^{9^{9^{9}}}")
    with pytest.raises(BadGold):
        check_gold("1:10^{50001}")


def test_long_completion_is_graded_on_its_tail(grader):
    texts = [r"\boxed{7}" + " x" * 60_000, " x" * 60_000 + r"\boxed{7}"]
    assert grader.grade(["", ""], texts, {"answer": ["7", "7"]}).tolist() == [0.0, 1.0]


def test_order_is_kept_among_slow_and_fast_rows(grader):
    golds = [str(n) for n in range(40)]
    texts = [f"\\boxed{{{n if n % 3 else n + 1}}}" for n in range(40)]
    texts[1] = r"\boxed{\int_0^1 x^{x^{x^{x}}} dx}"
    expected = [float(n % 3 != 0) for n in range(40)]
    expected[1] = 0.0
    np.testing.assert_array_equal(grader.grade([""] * 40, texts, {"answer": golds}), expected)


def test_worker_modules_import_no_jax():
    code = "import sys, logra_jax.rl.grading, logra_jax.rl.math_answer; print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_memory_of_the_checker_is_limited():
    code = "from logra_jax.rl import grading; grading._be_modest(); bytearray(3 << 30)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in out.stderr


@pytest.mark.parametrize("on_cpu", [True, False])
def test_worker_ends_its_own_endless_loop(on_cpu):
    # No parent to kill it, and alarms that graded code has switched off: the timer of its CPU time is left.
    code = (
        "import os, signal; from logra_jax.rl import grading; os.cpu_count = lambda: 2\n"
        "def spin(request):\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "    signal.setitimer(signal.ITIMER_PROF, 0)\n"
        "    while True: pass\n"
        f"grading._limited(spin, {{}}, 0.2, {on_cpu})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert out.returncode == -signal.SIGVTALRM
