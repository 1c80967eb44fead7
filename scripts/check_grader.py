r"""How often the maths grader is wrong, beside plain math-verify, and how fast it grades when answers are hostile.

    python scripts/check_grader.py                      # both; about two minutes, most of them math-verify's
    python scripts/check_grader.py --answers 10000      # how many answers to time
    python scripts/check_grader.py --only speed         # half of the answers new numbers, half from the pairs below

The pairs are those of tests/cases: reports about neighbouring graders, and pairs by kind with a verdict reasoned from
mathematics (or from a policy, which `why` names). A false positive is credit for a wrong answer. math-verify gets the
gold answer in a box, as its makers advise, and its own limit of 5 seconds.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from logra_jax.rl.reward import make_reward

CASES = Path(__file__).parents[1] / "tests" / "cases"
# %d makes every one of them new, so that none is answered from memory.
HOSTILE = (
    r"\boxed{9^{9^{9^{%d}}}}",
    r"\boxed{(1+x)^{1%d}}",
    r"\boxed{(10^{7}+%d)!}",
    r"\boxed{\binom{10^{8}}{5%d}}",
    r"\boxed{\int_0^1 x^{x^{x^{%d x}}} dx}",
    r"\boxed{\sum_{k=1}^{\infty}\frac{\sin(k^{%d})}{k^k}}",
    r"\boxed{\prod_{k=1}^{10^{7}} (k+%d)}",
    r"\boxed{\sqrt[3^{20^6}]{%d}}",
    r"\boxed{\lim_{x\to 0} \frac{\sin(x^{%d})^{x^x}}{x^{x^x}}}",
    "\\boxed{" * 3000 + "%d" + "}" * 3000,
    "\\boxed{" + "(" * 900 + "%d" + ")" * 900 + "}",
    "\\boxed{" + "\\frac{1}{1+" * 150 + "%d" + "}" * 150 + "}",
    "\\boxed{" + "+".join(f"x^{{{n}}}" for n in range(250)) + "+%d}",
    "{" * 100_000 + "%d",
)


def completion(row: dict) -> str:
    """The text of a case, some of which are too long to be written down."""
    if "terms" in row:
        return "\\boxed{" + "+".join(f"x^{{{power}}}" for power in range(row["terms"])) + "}"
    if "pieces" in row:
        return "".join(text * count for text, count in row["pieces"])
    return row["completion"] if "completion" in row else f"so \\boxed{{{row['box']}}}."


def cases() -> list[dict]:
    """All pairs with a verdict: kind, gold, completion, score."""
    rows = []
    for name in ("grader.jsonl", "grader_kinds.jsonl"):
        for line in (CASES / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["score"] in (0, 1):
                kind = row.get("kind", "reported")
                rows.append({"kind": kind, "gold": row["gold"], "text": completion(row), "score": row["score"]})
    return rows


def by_math_verify(gold: str, text: str) -> float:
    """What the library says with its defaults; what it raises is no credit."""
    from math_verify import parse, verify

    try:
        return float(verify(parse(gold if "\\boxed" in gold else f"\\boxed{{{gold}}}"), parse(text)))
    except Exception:
        return 0.0


def table(workers: int) -> int:
    """Print wrong verdicts by kind; returns the number of ours."""
    rows = cases()
    with make_reward("math", answer_column="answer", timeout_s=5.0, workers=workers) as grader:
        ours = grader.grade([""] * len(rows), [r["text"] for r in rows], {"answer": [r["gold"] for r in rows]})
    theirs = [by_math_verify(row["gold"], row["text"]) for row in rows]
    wrong: dict[str, Counter] = defaultdict(Counter)
    for row, *found in zip(rows, ours.tolist(), theirs, strict=True):
        wrong[row["kind"]]["pairs"] += 1
        for who, score in zip(("ours", "math-verify"), found, strict=True):
            if score != row["score"]:
                wrong[row["kind"]][f"{who} {'false negative' if row['score'] else 'false positive'}"] += 1
    heads = ["pairs"] + [f"{who} false {sign}" for who in ("ours", "math-verify") for sign in ("positive", "negative")]
    print("| kind |", " | ".join(heads), "|\n|---|" + "---|" * len(heads))
    total = sum(wrong.values(), Counter())
    for kind, counts in (*sorted(wrong.items()), ("all", total)):
        print("|", kind, "|", " | ".join(str(counts[head]) for head in heads), "|")
    return sum(total[head] for head in heads[1:3])


def speed(answers: int, workers: int, timeout: float, share: float = 0.01) -> dict[str, float]:
    """Grade that many answers, of them a share hostile, in one call; figures."""
    drawn = random.Random(0)
    rows = [row for row in cases() if row["kind"] != "reported"]
    hostile, count = itertools.cycle(HOSTILE), itertools.count(2)
    batch = [dict(drawn.choice(rows), bad=False) for _ in range(answers)]
    for row in drawn.sample(batch, answers // 2):  # half of them are pairs of tests/cases, half new numbers
        gold, wrong = drawn.randrange(10**6), drawn.randrange(2)
        top, bottom = drawn.randrange(1, 999), drawn.randrange(2, 999)
        gold, text = drawn.choice(
            [(str(gold), str(gold + wrong)), (rf"\frac{{{top}}}{{{bottom}}}", f"{top + wrong}/{bottom}")]
        )
        row |= {"gold": gold, "text": rf"so \boxed{{{text}}}", "score": 1.0 - wrong}
    for i in drawn.sample(range(answers), round(share * answers)):
        batch[i] = {"gold": "2", "text": next(hostile) % next(count), "score": 0.0, "bad": True}
    with make_reward("math", answer_column="answer", timeout_s=timeout, workers=workers) as grader:
        grader.grade([""], [r"\boxed{1}"], {"answer": ["1"]})  # workers are there
        began = time.monotonic()
        found = grader.grade([""] * answers, [r["text"] for r in batch], {"answer": [r["gold"] for r in batch]})
        seconds = time.monotonic() - began
        counts = grader.counts
    wrong = sum(score != row["score"] for row, score in zip(batch, found.tolist(), strict=True) if not row["bad"])
    return {
        "answers": answers, "hostile": round(share * answers), "seconds": round(seconds, 1),
        "per_second": round(answers / seconds, 1), "timeouts": counts.timeouts, "errors": counts.errors, "wrong": wrong,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["table", "speed"])
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=5.0, help="reward.timeout_s (default: its default, 5)")
    found = parser.parse_args()
    wrong = table(found.workers) if found.only != "speed" else 0
    if found.only != "table":
        print(json.dumps(speed(found.answers, found.workers, found.timeout)))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
