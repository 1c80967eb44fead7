"""Make the demo from nothing: a 1.1 M parameter Qwen2 checkpoint, its tokenizer, rows to train and judge it.

    python scripts/make_demo.py [--out logra_jax/demo] [--seed 0]
    python scripts/make_demo.py --hybrid --out out/hybrid    # a Qwen3.5 model, three of its four layers linear

The task is a three-digit number times a digit, `588*6=`. The model is warm-started on two ways of answering:

    worked   8*6=48,8*6+4=52,5*6+5=35#3528     digit by digit with carries; right most of the time once learned
    guess    #3528                             mostly wrong: so few steps do not teach the products by heart

What counts is what follows the last `#`. Guesses are the more frequent demonstrations, so the model starts by
guessing, and being wrong, often; reinforcement learning has something to find (work it out) and something to
sharpen (work it out better).

Which operand pair goes where is decided by a hash, once for all seeds:

    train        about 90 %   demonstrations of the warm start, and the prompts of train.jsonl
    held out     460 pairs    heldout.jsonl: never trained on; used here for the last figure printed
    validation   the rest     never trained on; greedy accuracy on them decides when the warm start stops

The same seed gives the same bytes on the same machine with the same versions. Takes about two minutes on two
CPU cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models

from logra_jax.models import CausalLM, ModelConfig, load_hf, save_hf
from logra_jax.rl.rollout import Sampler

CHARACTERS = "0123456789+*=,#"
PAD, EOS = 0, 1
IDS = {character: i + 2 for i, character in enumerate(CHARACTERS)}
VOCAB_SIZE = 32  # rows of the table; 17 of them are tokens, the rest is padding as in real checkpoints

MAX_NEW_TOKENS = 33
# Of a batch of 256: 45 % and 55 %. The more guesses, the longer reinforcement learning takes to prefer the other way.
WORKED_ROWS, GUESS_ROWS = 115, 141
LEARNING_RATE, WARMUP, MOST_STEPS = 3e-3, 50, 1000
HELD_OUT_ROWS = 460
HELD_OUT_SHARE = 0.1

HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": EOS,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.08,
    "intermediate_size": 576,
    "max_position_embeddings": 64,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
# Of the same size: one group of three gated delta layers and one of full attention.
HYBRID_CONFIG = HF_CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 32,
    "model_type": "qwen3_5_text",
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
}
GENERATION_CONFIG = {"do_sample": True, "temperature": 1.0, "eos_token_id": EOS, "pad_token_id": PAD}
TOKENIZER_CONFIG = {
    "clean_up_tokenization_spaces": False,
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    # Said outright: the class that transformers picks for this architecture would add a token for it.
    "unk_token": None,
}


def prompt(a: int, b: int) -> str:
    return f"{a}*{b}="


def guess(a: int, b: int) -> str:
    return f"#{a * b}"


def worked(a: int, b: int) -> str:
    """Schoolbook multiplication from the last digit on: `d*b+carry=value`, the first without a carry."""
    steps, carry = [], 0
    for i, digit in enumerate(int(d) for d in reversed(str(a))):
        value = digit * b + carry
        steps.append(f"{digit}*{b}={value}" if i == 0 else f"{digit}*{b}+{carry}={value}")
        carry = value // 10
    return ",".join(steps) + guess(a, b)


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
    """(train, held out, validation) operand pairs, split by a hash of the prompt.

    Pairs whose hash is in the lowest tenth are kept from training. In the order of their hashes the first 460
    are the held-out ones, the others the validation rows: each is a random sample of all pairs.
    """

    def hash_of(pair: tuple[int, int]) -> int:
        return int.from_bytes(hashlib.blake2b(prompt(*pair).encode(), digest_size=8).digest(), "little")

    everything = [(a, b) for a in range(100, 1000) for b in range(2, 10)]
    train = [pair for pair in everything if hash_of(pair) >= HELD_OUT_SHARE * 2**64]
    kept_out = sorted((pair for pair in everything if hash_of(pair) < HELD_OUT_SHARE * 2**64), key=hash_of)
    return train, sorted(kept_out[:HELD_OUT_ROWS]), sorted(kept_out[HELD_OUT_ROWS:])


def tokenizer() -> Tokenizer:
    """One token per character. BPE without merges splits into characters; Fuse joins them without spaces."""
    made = Tokenizer(models.BPE(vocab={"<pad>": PAD, "<eos>": EOS, **IDS}, merges=[]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<eos>"])
    return made


def demonstrations(
    rng: np.random.Generator, train: list[tuple[int, int]], answer: Callable[[int, int], str], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32 [rows, length], right-padded, and the mask of the answer's tokens, end token included.

    Each way of answering has a block of its own, as long as its longest answer: guesses are a third as long.
    """
    length = len(prompt(999, 9) + answer(999, 9)) + 1
    tokens = np.full((rows, length), PAD, np.int32)
    answered = np.zeros((rows, length), np.float32)
    for row, i in enumerate(rng.integers(len(train), size=rows)):
        start = prompt(*train[i])
        ids = [IDS[c] for c in start + answer(*train[i])] + [EOS]
        tokens[row, : len(ids)] = ids
        answered[row, len(start) : len(ids)] = 1.0
    return tokens, answered


def greedy_accuracy(sampler: Sampler, params, rows: list[tuple[int, int]]) -> tuple[float, float]:
    """Shares of right answers and of answers that were worked out, decoding greedily."""
    tokens = np.array([[IDS[c] for c in prompt(a, b)] for a, b in rows], np.int32)
    count, width = tokens.shape
    lengths, ids = np.full(count, width, np.int32), np.arange(count, dtype=np.int32)
    rollout = sampler.generate(params, tokens, lengths, ids, n=1, seed=0, update=0)
    letters = ["", "", *CHARACTERS] + [""] * (VOCAB_SIZE - 2 - len(CHARACTERS))
    right = by_work = 0
    for (a, b), row, length in zip(rows, np.asarray(rollout.tokens), np.asarray(rollout.lengths), strict=True):
        text = "".join(letters[t] for t in row[width : width + int(length)])
        right += text.rpartition("#")[1:] == ("#", str(a * b))
        by_work += "=" in text
    return right / count, by_work / count


def make_sampler(model: CausalLM, max_new_tokens: int, vocab_size: int) -> Sampler:
    """Greedy answers."""
    return Sampler(
        model,
        max_new_tokens=max_new_tokens,
        end_ids=(EOS,),
        vocab_size=vocab_size,
        pad_id=PAD,
        temperature=1.0,
        greedy=True,
    )


def warm_start(
    model: CausalLM,
    seed: int,
    stop_at: float,
    draw: Callable[[np.random.Generator], tuple[tuple[np.ndarray, np.ndarray], ...]],
    measure: Callable[[Any], tuple[float, str]],
    every: int = 10,
    learning_rate: float = LEARNING_RATE,
) -> Any:
    """Weights from random ones to the first whose accuracy reaches `stop_at`.

    draw: blocks of a batch, each tokens [rows, length] and the mask of those that are learnt. measure: accuracy on
    validation rows, and a remark, asked for after so many steps.
    """
    params = model.init_params(jax.random.key(seed))
    tx = optax.adamw(optax.linear_schedule(0.0, learning_rate, WARMUP))

    @jax.jit
    def step(params, state, blocks):
        def loss_fn(params):
            total = tokens_answered = jnp.zeros(())
            for tokens, answered in blocks:
                logits = model.logits(params, tokens[:, :-1])
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
                total += jnp.sum(losses * answered[:, 1:])
                tokens_answered += jnp.sum(answered[:, 1:])
            return total / tokens_answered

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(seed)
    state = tx.init(params)
    began = time.perf_counter()
    for count in range(1, MOST_STEPS + 1):
        params, state, loss = step(params, state, draw(rng))
        if count >= 80 and count % every == 0:
            accuracy, remark = measure(params)
            seconds = time.perf_counter() - began
            print(
                f"step {count:4d}  loss {float(loss):.3f}  validation accuracy {accuracy:.3f}"
                f"  {remark}  {seconds:.0f} s",
                flush=True,
            )
            if accuracy >= stop_at:
                return params
    raise SystemExit(f"validation accuracy did not reach {stop_at} in {MOST_STEPS} steps: nothing was written")


def write_rows(out: Path, train, held_out) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train.jsonl", train), ("heldout.jsonl", held_out)):
        lines = [json.dumps({"prompt": prompt(a, b), "answer": str(a * b)}) + "\n" for a, b in rows]
        (out / name).write_text("".join(lines), encoding="utf-8")


def write_model(folder: Path, config: dict, model: CausalLM, params, tokenizer: Tokenizer) -> None:
    """A Hugging Face folder with its tokenizer."""
    save_hf(model, params, folder, overwrite=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n", encoding="utf-8")
    settings = dict(sorted((TOKENIZER_CONFIG | {"model_max_length": config["max_position_embeddings"]}).items()))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    load_hf(folder)  # what was written can be read


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's checkpoint, tokenizer and rows.")
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--hybrid", action="store_true", help="a Qwen3.5 model; needs an --out of its own")
    parser.add_argument(
        "--out", type=Path, default=here / "logra_jax" / "demo", help="new folder (default: the packaged demo, again)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random weights and order of demonstrations")
    parser.add_argument("--stop-at", type=float, default=0.42, help="validation accuracy that ends the warm start")
    args = parser.parse_args()
    if args.hybrid and args.out == parser.get_default("out"):
        parser.error("--hybrid would replace the packaged demo: give another --out")
    if args.out != parser.get_default("out") and args.out.exists():
        parser.error(f"--out {args.out} exists: nothing is overwritten, choose another folder")
    config = dict(sorted((HYBRID_CONFIG if args.hybrid else HF_CONFIG).items()))
    train, held_out, validation = pairs()
    print(f"{len(train)} pairs to train, {len(held_out)} held out, {len(validation)} for validation")
    model = CausalLM(ModelConfig.from_hf(config), compute_dtype="float32")
    sampler = make_sampler(model, MAX_NEW_TOKENS, len(IDS) + 2)

    def draw(rng):
        ways = ((worked, WORKED_ROWS), (guess, GUESS_ROWS))
        return tuple(demonstrations(rng, train, answer, rows) for answer, rows in ways)

    def measure(params, rows=validation):
        accuracy, by_work = greedy_accuracy(sampler, params, rows)
        return accuracy, f"worked out {by_work:.2f}"

    params = warm_start(model, args.seed, args.stop_at, draw, measure)
    print("held-out accuracy {:.3f}, {}".format(*measure(params, held_out)))
    write_rows(args.out, train, held_out)
    write_model(args.out / "model", config, model, params, tokenizer())
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
