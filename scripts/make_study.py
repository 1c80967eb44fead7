"""Make two more tasks of the demo's size for scripts/study.py: a checkpoint, its tokenizer, rows to train and judge it.

    python scripts/make_study.py add --out out/study/add
    python scripts/make_study.py sort --out out/study/sort

    add    47+85+36=    worked  7+5+6=18,4+8+3+1=16#168    guess  #168
    sort   384712559=   #123455789

A model for `add` starts as that of the demo (see make_demo.py): it can work a sum out, and mostly guesses. A model for
`sort` has one way of answering and has not practised it enough. What counts is what follows the last `#`. Questions
are drawn once for all seeds; 460 are held out, 260 decide when the warm start stops. Takes a minute or two on two CPU
cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from make_demo import (
    EOS,
    GUESS_ROWS,
    HELD_OUT_ROWS,
    HF_CONFIG,
    IDS,
    WORKED_ROWS,
    make_sampler,
    tokenizer,
    warm_start,
    write_model,
)
from make_tiny import padded

from logra_jax.models import CausalLM, ModelConfig

QUESTIONS, VALIDATION = 7200, 260

Question = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """What is asked, the ways to answer with their rows in a batch of demonstrations."""

    draw: Callable[[np.random.Generator], Question]
    prompt: Callable[[Question], str]
    solution: Callable[[Question], str]
    ways: tuple[tuple[Callable[[Question], str], int], ...]
    largest: Question  # none has a longer answer
    learning_rate: float  # of the warm start


def added(numbers: Question) -> str:
    """Schoolbook addition of two-digit numbers: the ones, then the tens and what is carried."""
    ones, tens = [n % 10 for n in numbers], [n // 10 for n in numbers]
    tens.append(sum(ones) // 10)
    return ",".join(f"{'+'.join(map(str, column))}={sum(column)}" for column in (ones, tens)) + f"#{sum(numbers)}"


def text(digits: Question) -> str:
    return "".join(map(str, digits))


TASKS = {
    "add": Task(
        draw=lambda rng: tuple(int(n) for n in rng.integers(10, 100, size=3)),
        prompt=lambda numbers: "+".join(map(str, numbers)) + "=",
        solution=lambda numbers: str(sum(numbers)),
        ways=((added, WORKED_ROWS), (lambda numbers: f"#{sum(numbers)}", GUESS_ROWS)),
        largest=(99, 99, 99),
        learning_rate=3e-3,
    ),
    "sort": Task(
        draw=lambda rng: tuple(int(n) for n in rng.integers(0, 10, size=9)),
        prompt=lambda digits: f"{text(digits)}=",
        solution=lambda digits: text(tuple(sorted(digits))),
        ways=((lambda digits: f"#{text(tuple(sorted(digits)))}", WORKED_ROWS + GUESS_ROWS),),
        largest=9 * (9,),
        learning_rate=4e-4,  # learnt slowly enough to be stopped on the way
    ),
}


def questions(task: Task) -> tuple[list[Question], list[Question], list[Question]]:
    """(train, held out, validation), no question twice."""
    rng = np.random.default_rng(0)
    found: dict[Question, None] = {}
    while len(found) < QUESTIONS:
        found[task.draw(rng)] = None
    drawn, kept = list(found), HELD_OUT_ROWS + VALIDATION
    return drawn[kept:], drawn[:HELD_OUT_ROWS], drawn[HELD_OUT_ROWS:kept]


def encode(letters: str) -> list[int]:
    return [IDS[letter] for letter in letters]


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a checkpoint and rows for the study.")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="random weights and order of demonstrations")
    parser.add_argument("--stop-at", type=float, default=0.42, help="validation accuracy that ends the warm start")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    task, config = TASKS[args.task], dict(sorted(HF_CONFIG.items()))
    train, held_out, validation = questions(task)
    model = CausalLM(ModelConfig.from_hf(config), compute_dtype="float32")
    sampler = make_sampler(model, max(len(answer(task.largest)) for answer, _ in task.ways) + 1, len(IDS) + 2)
    letters = {number: letter for letter, number in IDS.items()}

    def draw(rng: np.random.Generator) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        blocks = []
        for answer, rows in task.ways:
            chosen = [train[i] for i in rng.integers(len(train), size=rows)]
            starts = [encode(task.prompt(question)) for question in chosen]
            whole = [[*s, *encode(answer(q)), EOS] for s, q in zip(starts, chosen, strict=True)]
            tokens = padded(whole, len(starts[0]) + len(answer(task.largest)) + 1, left=False)
            places, ends = np.arange(tokens.shape[1]), np.array([[len(row)] for row in whole])
            blocks.append((tokens, ((places >= len(starts[0])) & (places < ends)).astype(np.float32)))
        return tuple(blocks)

    def measure(params, rows=validation) -> tuple[float, str]:
        prompts = [encode(task.prompt(question)) for question in rows]
        width, count = len(prompts[0]), len(rows)
        tokens, lengths = np.array(prompts, np.int32), np.full(count, width, np.int32)
        found = sampler.generate(params, tokens, lengths, np.arange(count, dtype=np.int32), n=1, seed=0, update=0)
        texts = [
            "".join(letters.get(int(t), "") for t in row[width : width + int(length)])
            for row, length in zip(np.asarray(found.tokens), np.asarray(found.lengths), strict=True)
        ]
        right = [t.rpartition("#")[1:] == ("#", task.solution(q)) for t, q in zip(texts, rows, strict=True)]
        return sum(right) / count, f"worked out {sum('=' in t for t in texts) / count:.2f}"

    params = warm_start(model, args.seed, args.stop_at, draw, measure, learning_rate=task.learning_rate)
    print("held-out accuracy {:.3f}, {}".format(*measure(params, held_out)))
    args.out.mkdir(parents=True)
    for name, part in (("train", train), ("heldout", held_out)):
        lines = [json.dumps({"prompt": task.prompt(q), "answer": task.solution(q)}) + "\n" for q in part]
        (args.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    write_model(args.out / "model", config, model, params, tokenizer())
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
