"""Updates go to a real vLLM server as factors and seeds; its log-probabilities are held against JAX's own weights.

    python scripts/check_vllm.py --python DIR/bin/python --model FOLDER
        [--updates 20] [--tensor-parallel 1] [--pipeline-parallel 1] [--rank 8] [--dtype float32] [--log FILE]

Factors are random, of a size that moves the policy visibly, with weight decay; so are updates of the last norm and of
biases, which travel whole. Every update is applied by `logra_jax.apply_updates` here and sent there. Answers of 4
prompts, at temperature 0.7, are scored with the JAX weights after every fifth update, and once more after a reload of
all weights from a folder and one update on top of it.
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax import cli
from logra_jax.errors import UserError
from logra_jax.models import ModelConfig, load_hf, save_hf
from logra_jax.models.hf import read_json
from logra_jax.models.names import name_table
from logra_jax.models.save import text_prefix
from logra_jax.optim import LowRank, SketchSpec, apply_updates, merge
from logra_jax.optim.projection import weight_keys
from logra_jax.optim.spec import leaves_with_paths, map_leaves
from logra_jax.sync.blob import Update
from logra_jax.sync.client import Client, Completion
from logra_jax.sync.naming import dense_by_name, factors_by_name, file_shapes
from logra_jax.sync.server import Server

TEMPERATURE, DECAY, SIZE = 0.7, 1e-4, 0.004
DENSE = "(^norm/scale|proj/bias)$"
LONGEST, ANSWER = 150, 12  # tokens; longer than a block of vLLM's cache, which must not outlive the weights


class Trainer:
    """The side that holds the weights: random updates, applied to them and packed."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.model, params = load_hf(folder, "float32")
        self.table = name_table(self.model.config)
        self.spec = SketchSpec(rank=rank, seed=2**32 - 5, names={path: form.names for path, form in self.table.items()})
        self.train, self.frozen = self.spec.split(params, dense=[DENSE])
        self.matrices = self.spec.matrices(self.train)
        limit, ids = self.model.config.max_position_embeddings, self.model.config.vocab_size
        lengths = (4, 40, min(LONGEST, limit - ANSWER), 1)
        self.prompts = [(np.arange(length) * (7 + i) % ids).tolist() for i, length in enumerate(lengths)]
        self.version = 0
        self.apply = jax.jit(apply_updates)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that updates bring, by name in the file."""
        return file_shapes(self.table, {path: leaf.shape for path, leaf in leaves_with_paths(self.train)})

    def step(self) -> dict[str, Any]:
        """One more update of the weights: the arguments of `VllmEngine.advance`, arrays by path."""
        rng = np.random.default_rng(self.version)
        decay = jnp.float32(DECAY)

        def one(matrix: Any, leaf: Any) -> Any:
            if matrix is None:
                return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) * SIZE
            factor = jnp.asarray(rng.normal(size=matrix.sketch_shape(self.spec.rank)) * SIZE, jnp.bfloat16)
            keys = weight_keys(self.spec, matrix, self.version)
            wide = factor.astype(jnp.float32)
            return LowRank(wide, keys, decay, self.spec.distribution, matrix.in_axes, matrix.out_axes)

        updates = map_leaves(one, self.matrices, self.train)
        self.train = self.apply(self.train, updates)
        nodes = jax.tree.leaves_with_path(updates, is_leaf=lambda node: isinstance(node, LowRank))
        path_of = partial(jax.tree_util.keystr, simple=True, separator="/")
        factors = {path_of(p): n.factor.astype(jnp.bfloat16) for p, n in nodes if isinstance(n, LowRank)}
        dense = {path: leaf for path, leaf in leaves_with_paths(self.train) if path not in self.matrices}
        self.version += 1
        drawn = int(self.spec.redraw(self.version - 1))
        return {
            "version": self.version, "factors": factors, "dense": dense,
            "seed": self.spec.seed, "drawn": drawn, "decay": float(decay),
        }  # fmt: skip

    def update(self) -> Update:
        """`step` as it travels, by names."""
        step = self.step()
        factors = factors_by_name(self.table, step.pop("factors"))
        return Update(
            base=self.version - 1, factors=factors, dense=dense_by_name(self.table, step.pop("dense")), **step
        )

    def params(self) -> Any:
        """The whole tree."""
        return merge(self.train, self.frozen)

    def logprobs(self, params: Any, prompt: list[int], answer: list[int]) -> np.ndarray:
        """Of the answer's tokens at the temperature, float32."""
        tokens = np.zeros((1, LONGEST + ANSWER), np.int32)  # one program for all; nothing looks at what comes later
        tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
        scores = np.asarray(self.scores(params, tokens))[len(prompt) - 1 :]
        return scores[np.arange(len(answer)), answer]

    @cached_property
    def scores(self) -> Any:
        """Program for log-probabilities `[t, v]` of the next token, of tokens `[1, t]`."""

        def scores(params: Any, tokens: Any) -> Any:
            with jax.default_matmul_precision("highest"):
                logits = self.model.hidden(params, tokens)[0] @ self.model.head(params)
            return jax.nn.log_softmax(logits / TEMPERATURE, axis=-1)

        return jax.jit(scores)


def answers(client: Client, trainer: Trainer, seed: int) -> list[list[Completion]]:
    """Two to each prompt."""
    ask = partial(client.generate, max_tokens=ANSWER, seed=seed, n=2, temperature=TEMPERATURE)
    return [ask(prompt) for prompt in trainer.prompts]


def difference(trainer: Trainer, params: Any, found: list[list[Completion]]) -> float:
    """Largest absolute difference of a log-probability from that of JAX under `params`."""
    worst = 0.0
    for prompt, several in zip(trainer.prompts, found, strict=True):
        for answer in several:
            expected = trainer.logprobs(params, prompt, answer.tokens)
            worst = max(worst, float(np.abs(expected - np.asarray(answer.logprobs)).max()))
    return worst


def on_cpu(ranks: int) -> dict[str, str]:
    """Variables of a server of so many ranks on a CPU; other machines do not read them."""
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    return variables | ({"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))} if ranks > 1 else {})


def check(client: Client, folder: Path, updates: int, rank: int) -> dict[str, Any]:
    """All figures of a running server that has the weights of `folder`."""
    trainer = Trainer(folder, rank)
    start = trainer.params()
    prefix = text_prefix(trainer.model)
    client.plan(trainer.shapes(), prefix=prefix)
    report: dict[str, Any] = {"before": difference(trainer, start, answers(client, trainer, 0))}
    synced, worst, last = [], 0.0, None
    for number in range(updates):
        last = trainer.update()
        synced.append(client.sync(last))
        if number % 5 == 4 or number == updates - 1:
            found = answers(client, trainer, number)
            assert {c.version for several in found for c in several} == {trainer.version}
            worst = max(worst, difference(trainer, trainer.params(), found))
    assert last is not None
    client.sync(last)  # again: nothing may change
    refusal = ""
    try:
        client.sync(replace(last, base=last.version + 5, version=last.version + 6))
    except UserError as error:
        refusal = str(error)
    assert "its weights are as they were" in refusal, refusal
    found = answers(client, trainer, 77)
    report |= {
        "updates": updates,
        "after": max(worst, difference(trainer, trainer.params(), found)),
        "moved": difference(trainer, start, found),
        "blob_bytes": synced[-1].bytes,
        "float32_bytes": sum(4 * int(np.prod(shape)) for shape in trainer.shapes().values()),
        "sync_ms": 1e3 * statistics.median(s.seconds for s in synced),
        "apply_ms": 1e3 * statistics.median(s.apply_seconds for s in synced),
    }
    with tempfile.TemporaryDirectory() as parent:
        save_hf(trainer.model, trainer.params(), Path(parent) / "all")
        client.reload(Path(parent) / "all", trainer.shapes(), trainer.version, prefix=prefix)
    client.sync(trainer.update())
    report["after_reload"] = difference(trainer, trainer.params(), answers(client, trainer, 5))
    return report


def main() -> int:
    """Start a server, check it, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with vLLM")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--dtype", default="float32", help="the server's")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"))
    arguments = parser.parse_args()
    positions = ModelConfig.from_hf(read_json(arguments.model, "config.json")).max_position_embeddings
    # Several stages need vLLM's compiled mode.
    more = [f"--pipeline-parallel-size={arguments.pipeline_parallel}"]
    more += ["--enforce-eager"] if arguments.pipeline_parallel == 1 else []
    options = {"tensor_parallel": arguments.tensor_parallel, "dtype": arguments.dtype, "more": more}
    options |= {"max_length": min(512, positions), "max_sequences": 16}
    variables = on_cpu(arguments.tensor_parallel * arguments.pipeline_parallel)
    with Server(arguments.python, arguments.model, arguments.log, options=options, variables=variables) as server:
        print(json.dumps(check(server.client, arguments.model, arguments.updates, arguments.rank)))
    return 0


if __name__ == "__main__":
    cli.run(main)
