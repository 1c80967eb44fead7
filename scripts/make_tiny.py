"""Make a checkpoint of the demo's size for a mixture of Reasoning-Gym tasks: learnt from answers until it is right now
and then, so that reinforcement learning has something to sharpen.

    python scripts/make_tiny.py --out out/tiny [--mixture configs/tasks/tiny.yaml] [--stop-at 0.28] [--seed 0]

Every character is a token, and so is every run of words that questions have in common. Demonstrations are the
reference answers to the mixture's training questions but the last 480, on which greedy accuracy decides when the
warm start stops. Held-out questions are not looked at. Needs reasoning-gym (`pip install '.[tasks]'`).
"""

from __future__ import annotations

import argparse
import re
import string
from collections import Counter
from pathlib import Path

import numpy as np
from make_demo import EOS, HF_CONFIG, PAD, make_sampler, warm_start, write_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from logra_jax.models import CausalLM, ModelConfig
from logra_jax.rl.tasks import ENTRY, TASK, make_rows
from logra_jax.rl.verifier import make_verifier

ROWS, VALIDATION = 128, 480
EVERY, LEARNING_RATE = 25, 2e-3  # steps between measurements
CHARACTERS = string.ascii_letters + string.digits + " " + string.punctuation
COMMON = 100  # questions that have a word in common before it counts as one of the question's form


def phrases(questions: list[str]) -> list[str]:
    """The runs of common words, in which no character varies: what is left of a question is its content."""
    counts = Counter(word for question in questions for word in set(question.split(" ")))
    fixed = {word for word, count in counts.items() if count >= COMMON and re.search(r"[A-Za-z]{2}", word)}
    found: Counter[str] = Counter()
    for question in questions:
        run: list[str] = []
        for word in [*question.split(" "), ""]:
            if word in fixed:
                run.append(word)
            elif run:
                found[" ".join(run)] += 1
                run = []
    return sorted(phrase for phrase, count in found.items() if count >= COMMON)


def make_tokenizer(questions: list[str]) -> Tokenizer:
    """Characters and the questions' phrases."""
    # transformers reads a tokenizer of this architecture as one of bytes, in which a space is a letter of its own.
    letters = CHARACTERS.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}")
    vocab = {"<pad>": PAD, "<eos>": EOS, **{c: i + 2 for i, c in enumerate(letters)}}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<eos>"])
    made.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases(questions)])
    return made


def padded(rows: list[list[int]], width: int, left: bool) -> np.ndarray:
    """int32 ``[rows, width]``."""
    out = np.full((len(rows), width), PAD, np.int32)
    for line, row in zip(out, rows, strict=True):
        line[width - len(row) if left else 0 : width if left else len(row)] = row
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny checkpoint for a mixture of Reasoning-Gym tasks.")
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; must not exist")
    parser.add_argument("--mixture", type=Path, default=here / "configs/tasks/tiny.yaml")
    parser.add_argument("--seed", type=int, default=0, help="random weights and order of demonstrations")
    parser.add_argument("--stop-at", type=float, default=0.28, help="validation accuracy that ends the warm start")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists: give another --out")
    rows = make_rows(args.mixture, held_out=False)
    tokenizer = make_tokenizer([row["prompt"] for row in rows])
    prompts, answers = ([tokenizer.encode(row[key]).ids for row in rows] for key in ("prompt", "answer"))
    width, longest = max(map(len, prompts)), max(map(len, answers)) + 1
    vocab_size = tokenizer.get_vocab_size()
    changed = {"vocab_size": -(-vocab_size // 32) * 32, "max_position_embeddings": 128}
    config = dict(sorted((HF_CONFIG | changed).items()))
    print(f"{len(rows)} questions of up to {width} tokens, answers of up to {longest}; {vocab_size} tokens")
    model = CausalLM(ModelConfig.from_hf(config), compute_dtype="float32")
    sampler, verify = make_sampler(model, longest, vocab_size), make_verifier()

    def draw(rng: np.random.Generator) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        chosen = rng.integers(len(rows) - VALIDATION, size=ROWS)
        tokens = padded([[*prompts[i], *answers[i], EOS] for i in chosen], width + longest, left=False)
        starts = np.array([len(prompts[i]) for i in chosen])[:, None]
        ends = starts + np.array([len(answers[i]) + 1 for i in chosen])[:, None]
        places = np.arange(tokens.shape[1])[None]
        return ((tokens, ((places >= starts) & (places < ends)).astype(np.float32)),)

    def measure(params) -> tuple[float, str]:
        kept, lengths = rows[-VALIDATION:], np.array([len(p) for p in prompts[-VALIDATION:]], np.int32)
        tokens, ids = padded(prompts[-VALIDATION:], width, left=True), np.arange(VALIDATION, dtype=np.int32)
        found = sampler.generate(params, tokens, lengths, ids, n=1, seed=0, update=0)
        right: dict[str, list[bool]] = {}
        for row, answer, length in zip(kept, np.asarray(found.tokens), np.asarray(found.lengths), strict=True):
            text = tokenizer.decode(answer[width : width + int(length)].tolist())
            right.setdefault(row[TASK], []).append(verify(row[ENTRY], text, None) >= 1)
        shares = {task: sum(marks) / len(marks) for task, marks in sorted(right.items())}
        return sum(shares.values()) / len(shares), ", ".join(f"{task} {share:.2f}" for task, share in shares.items())

    params = warm_start(model, args.seed, args.stop_at, draw, measure, EVERY, LEARNING_RATE)
    write_model(args.out, config, model, params, tokenizer)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
