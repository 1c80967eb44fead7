"""Tokens per second of the sampler, in turn with those of another version of this package and with other settings.

    python scripts/bench_rollout.py [--against FOLDER] [--repeats 9]

A random Qwen2 model (4 layers, hidden 128, MLP 512, 4/2 heads, vocabulary 512), float32. Two jobs:

    equal       8 prompts x 8 answers, 16 + 32 tokens, all of full length: this version against FOLDER's
    spread      32 prompts x 8 answers, 16 + 8 to 256 tokens, evenly spread: 64 slots that are refilled, against four
                batches of 64 without

FOLDER is a checkout of the version to compare with, which runs in a process of its own and takes turns with this one.
Its batches are as long as their longest answer, which is what its loop takes where all end by themselves. Absolute
times are those of the machine; the ratios, medians over the repeats, are the result. Those per second of a core hold
on a machine that does other things as well.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPEATS = 9
EQUAL_CALLS = 10  # in a row, because one takes but a moment
PROMPTS, PROMPT, GENERATIONS, VOCAB, NEW, LONGEST, SHORTEST, SLOTS = 8, 16, 8, 512, 32, 256, 8, 64


class Bench:
    """The jobs, compiled, by name; each returns its seconds."""

    def __init__(self, limits: bool):
        import jax
        import jax.numpy as jnp
        import numpy as np

        from logra_jax.models import CausalLM, ModelConfig
        from logra_jax.rl.rollout import Sampler

        config = {
            "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu",
        }  # fmt: skip
        self.model = CausalLM(ModelConfig.from_hf(config, where="bench_rollout.py"))
        self.params = self.model.init_params(jax.random.key(0))
        rng, groups = np.random.default_rng(0), 4
        prompts = jnp.asarray(rng.integers(0, VOCAB, (groups * PROMPTS, PROMPT)), jnp.int32)
        lengths, ids = jnp.full(len(prompts), PROMPT, jnp.int32), jnp.arange(len(prompts), dtype=jnp.int32)
        spread = np.linspace(SHORTEST, LONGEST, len(prompts) * GENERATIONS).round().astype(np.int32)
        spread = rng.permutation(spread)
        self.tokens = {"equal": EQUAL_CALLS * PROMPTS * GENERATIONS * NEW}

        def run(new: int, part: slice, **options: Any) -> Any:
            sampler = Sampler(
                self.model, max_new_tokens=new, end_ids=(), vocab_size=VOCAB, pad_id=0, temperature=1.0,
                **{name: value for name, value in options.items() if name == "slots"},
            )  # fmt: skip
            options.pop("slots", None)
            return sampler.generate(self.params, prompts[part], lengths[part], ids[part], GENERATIONS, 0, 0, **options)

        first = slice(0, PROMPTS)
        self.jobs = {"equal": lambda: [run(NEW, first) for _ in range(EQUAL_CALLS)]}
        rows = PROMPTS * GENERATIONS

        def batches() -> list[Any]:
            found = []
            for i in range(groups):
                part = slice(i * PROMPTS, (i + 1) * PROMPTS)
                own = {"limits": spread[i * rows : (i + 1) * rows]} if limits else {}
                found.append(run(LONGEST, part, **own))
            return found

        self.jobs["batches"] = batches
        self.tokens["batches"] = int(spread.sum())
        if limits:
            self.jobs["refilled"] = lambda: [run(LONGEST, slice(None), slots=SLOTS, limits=spread)]
            self.tokens["refilled"] = int(spread.sum())

    def time(self, name: str) -> list[float]:
        """Seconds of one job, on the clock and of all cores."""
        import jax

        start, cores = time.perf_counter(), time.process_time()
        jax.block_until_ready(self.jobs[name]())
        return [time.perf_counter() - start, time.process_time() - cores]


def serve() -> None:
    """Run the jobs that are asked for on standard input."""
    bench = Bench(limits=False)
    for line in sys.stdin:
        print(*bench.time(line.strip()), flush=True)


class Other:
    """The version in another folder."""

    def __init__(self, folder: Path):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def time(self, name: str) -> list[float]:
        """See `Bench.time`."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        print(name, file=stdin, flush=True)
        return [float(x) for x in stdout.readline().split()]

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="checkout of the version to compare with")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.serve:
        serve()
        return 0
    bench, other = Bench(limits=True), found.against and Other(found.against)
    kinds = {name: (bench, name) for name in bench.jobs}
    if other:
        kinds |= {f"{name}, other": (other, name) for name in ("equal", "batches")}
    seconds: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for turn in range(-1, found.repeats):
        for name, (runner, job) in kinds.items():
            taken = runner.time(job)
            if turn >= 0:  # the first turn compiles
                seconds[name].append(taken)
    if other:
        other.close()
    print("| job | tokens/s, median | least | most |\n|---|---|---|---|")
    for name, (_, job) in kinds.items():
        rates = sorted(bench.tokens[job] / taken for taken, _ in seconds[name])
        print(f"| {name} | {statistics.median(rates):.0f} | {rates[0]:.0f} | {rates[-1]:.0f} |")
    for new, old in (("equal", "equal, other"), ("refilled", "batches"), ("refilled", "batches, other")):
        if old in seconds:
            parts = []
            for i, label in enumerate(("on the clock", "per second of a core")):
                ratios = sorted(b[i] / a[i] for a, b in zip(seconds[new], seconds[old], strict=True))
                parts.append(f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f}) {label}")
            print(f"{new} / {old}, tokens/s: {'; '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
