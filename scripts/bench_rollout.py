"""Tokens per second of the sampler, in turn with another version of this package, other samplers, other settings.

    python scripts/bench_rollout.py [--against FOLDER] [--vllm PYTHON] [--sampler transformers] [--repeats 9]

A random Qwen2 model (4 layers, hidden 128, MLP 512, 4/2 heads, vocabulary 512), float32. Two jobs:

    equal       8 prompts x 8 answers, 16 + 32 tokens, all of full length: this version against FOLDER's
    spread      32 prompts x 8 answers, 16 + 8 to 256 tokens, evenly spread: 64 slots that are refilled, against four
                batches of 64 without

FOLDER is a checkout of the version to compare with, which runs in a process of its own and takes turns with this one.
Its batches are as long as their longest answer, which is what its loop takes where all end by themselves. Absolute
times are those of the machine; the ratios, medians over the repeats, are the result. Those per second of a core hold
on a machine that does other things as well.

--vllm PYTHON starts a server with that interpreter on the same model, and sends it the same prompts and lengths:
`equal` as 8 requests of 8 answers, `spread` as 256 requests, each with its own length, 64 at a time, which the server
batches. It goes through HTTP and JSON as training does. --sampler transformers takes `generate` of that library on
torch, where both are installed: padded batches as long as their longest answer, in a process of its own. All sample at
temperature 1, and give tokens; vLLM and this package also their log-probabilities. The model is tiny: what is compared
is mostly what a step costs beside its products.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPEATS = 9
EQUAL_CALLS = 10  # in a row, because one takes but a moment
PROMPTS, PROMPT, GENERATIONS, VOCAB, NEW, LONGEST, SHORTEST, SLOTS = 8, 16, 8, 512, 32, 256, 8, 64
GROUPS = 4  # batches of `spread`


def asked() -> tuple[Any, Any]:
    """Prompts, [32, 16], and the lengths of the 256 answers of `spread`."""
    import numpy as np

    rng, count = np.random.default_rng(0), GROUPS * PROMPTS
    prompts = rng.integers(0, VOCAB, (count, PROMPT)).astype(np.int32)
    spread = np.linspace(SHORTEST, LONGEST, count * GENERATIONS).round().astype(np.int32)
    return prompts, rng.permutation(spread)


class Bench:
    """The jobs, compiled, by name; each returns its seconds."""

    def __init__(self, limits: bool):
        import jax
        import jax.numpy as jnp

        from logra_jax.models import CausalLM, ModelConfig
        from logra_jax.rl.rollout import Sampler

        config = {
            "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 512,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_theta": 1e4, "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu",
        }  # fmt: skip
        self.model = CausalLM(ModelConfig.from_hf(config, where="bench_rollout.py"))
        self.params = self.model.init_params(jax.random.key(0))
        prompts, spread = asked()
        lengths, ids = jnp.full(len(prompts), PROMPT, jnp.int32), jnp.arange(len(prompts), dtype=jnp.int32)
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
            for i in range(GROUPS):
                part = slice(i * PROMPTS, (i + 1) * PROMPTS)
                own = {"limits": spread[i * rows : (i + 1) * rows]} if limits else {}
                found.append(run(LONGEST, part, **own))
            return found

        self.jobs["batches"] = batches
        self.tokens["batches"] = int(spread.sum())
        if limits:
            self.jobs["refilled"] = lambda: [run(LONGEST, slice(None), slots=SLOTS, limits=spread)]
            self.tokens["refilled"] = int(spread.sum())

    def save(self, folder: Path) -> None:
        """The model, for others."""
        from logra_jax.models import save_hf

        save_hf(self.model, self.params, folder, dtype="float32")

    def time(self, name: str) -> list[float]:
        """Seconds of one job, on the clock and of all cores."""
        import jax

        start, cores = time.perf_counter(), time.process_time()
        jax.block_until_ready(self.jobs[name]())
        return [time.perf_counter() - start, time.process_time() - cores]


class Torch:
    """The jobs with `generate` of transformers."""

    def __init__(self, folder: str):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        prompts = torch.from_numpy(asked()[0]).long()

        def run(new: int, part: slice) -> None:
            rows = prompts[part].repeat_interleave(GENERATIONS, dim=0)
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
            found = model.generate(
                rows, attention_mask=torch.ones_like(rows), min_new_tokens=new, max_new_tokens=new, **options
            )
            assert found.shape == (len(rows), PROMPT + new)

        self.jobs: dict[str, Callable[[], object]] = {
            "equal": lambda: [run(NEW, slice(0, PROMPTS)) for _ in range(EQUAL_CALLS)],
            "batches": lambda: [run(LONGEST, slice(i * PROMPTS, (i + 1) * PROMPTS)) for i in range(GROUPS)],
        }

    def time(self, name: str) -> list[float]:
        """See `Bench.time`."""
        start, cores = time.perf_counter(), time.process_time()
        self.jobs[name]()
        return [time.perf_counter() - start, time.process_time() - cores]


class Served:
    """The jobs with a vLLM server, whose cores are not counted."""

    def __init__(self, python: Path, folder: Path):
        from logra_jax.sync.server import Server

        options = {
            "dtype": "float32", "max_length": PROMPT + LONGEST, "max_sequences": SLOTS,
            "more": ("--enforce-eager", "--skip-tokenizer-init"),
        }  # fmt: skip
        self.server = Server(python, folder, log=folder / "vllm.log", options=options)
        self.server.__enter__()
        prompts, spread = asked()
        each = [(prompts[i // GENERATIONS].tolist(), int(new)) for i, new in enumerate(spread)]

        def run(requests: list[tuple[list[int], int]], n: int) -> None:
            draw = lambda i: self.server.client.generate(
                requests[i][0], n=n, seed=i * n, max_tokens=requests[i][1], temperature=1.0
            )
            with ThreadPoolExecutor(SLOTS) as threads:
                found = list(threads.map(draw, range(len(requests))))
            assert all(len(a.tokens) == new for several, (_, new) in zip(found, requests, strict=True) for a in several)

        first = [(prompt.tolist(), NEW) for prompt in prompts[:PROMPTS]]
        self.jobs: dict[str, Callable[[], object]] = {
            "equal": lambda: [run(first, GENERATIONS) for _ in range(EQUAL_CALLS)],
            "refilled": lambda: run(each, 1),
        }

    def time(self, name: str) -> list[float]:
        """Seconds on the clock."""
        start = time.perf_counter()
        self.jobs[name]()
        return [time.perf_counter() - start]

    def close(self) -> None:
        """End the server."""
        self.server.stop()


def serve(folder: str) -> None:
    """Run the jobs that are asked for on standard input: with this package, or with transformers and the folder."""
    bench = Torch(folder) if folder else Bench(limits=False)
    for line in sys.stdin:
        print(*bench.time(line.strip()), flush=True)


class Other:
    """A process of its own: the version in another folder, or transformers on a model."""

    def __init__(self, package: Path | None = None, model: str = ""):
        more = {} if package is None else {"PYTHONPATH": str(package.resolve())}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", model],
            env=os.environ | more,
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
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="interpreter of an environment with vLLM")
    parser.add_argument("--sampler", choices=("transformers",), help="another sampler, if it is installed")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.serve is not None:
        serve(found.serve)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return compare(found, Path(folder, "model"))


def compare(found: argparse.Namespace, folder: Path) -> int:
    """See `main`. folder: where the model goes that others load."""
    bench, others = Bench(limits=True), dict[str, Any]()
    kinds = {name: (bench, name) for name in bench.jobs}
    try:
        if found.against:
            others["other"] = Other(package=found.against)
        if found.vllm or found.sampler:
            bench.save(folder)
        if found.sampler:
            others[found.sampler] = Other(model=str(folder))
        if found.vllm:
            others["vllm"] = Served(found.vllm, folder)
        for label, runner in others.items():
            kinds |= {
                f"{job}, {label}": (runner, job) for job in ("equal", "refilled" if label == "vllm" else "batches")
            }
        seconds: dict[str, list[list[float]]] = {name: [] for name in kinds}
        for turn in range(-1, found.repeats):
            for name, (runner, job) in kinds.items():
                taken = runner.time(job)
                if turn >= 0:  # the first turn compiles
                    seconds[name].append(taken)
    finally:
        for runner in others.values():
            runner.close()
    print("| job | tokens/s, median | least | most |\n|---|---|---|---|")
    for name, (_, job) in kinds.items():
        rates = sorted(bench.tokens[job] / taken for taken, *_ in seconds[name])
        print(f"| {name} | {statistics.median(rates):.0f} | {rates[0]:.0f} | {rates[-1]:.0f} |")
    pairs = [("equal", f"equal, {label}") for label in others] + [("refilled", "batches")]
    for new, old in [*pairs, *(("refilled", name) for name in kinds if name.startswith(("batches,", "refilled,")))]:
        parts = []
        for i, label in enumerate(("on the clock", "per second of a core")[: len(seconds[old][0])]):
            ratios = sorted(b[i] / a[i] for a, b in zip(seconds[new], seconds[old], strict=True))
            parts.append(f"{statistics.median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f}) {label}")
        print(f"{new} / {old}, tokens/s: {'; '.join(parts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
