"""FLOPs of one update at a model's true layer shapes, counted in compiled programs: sketched, dense, and the KL probe.

    python scripts/flops.py [--preset qwen2.5-math-7b] [--tokens 4096] [--rank 256] [--remat full]

Nothing is run and no weight exists: gradient and probe of one row are compiled for a CPU, from shapes, with one and
with two unrolled layers. The difference is a layer; the rest is embedding, head and loss. XLA counts the body of a
loop once, however often it runs: so the loss takes all positions at once, and attention is compiled with two sizes of
its block of queries, whose difference is what so many queries cost. The optimizer's part is compiled for one layer.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from logra_jax import cli, optim
from logra_jax.models import CausalLM, layers
from logra_jax.models.config import ModelConfig
from logra_jax.models.presets import PRESETS
from logra_jax.rl import loss
from logra_jax.rl.batch import Batch
from logra_jax.rl.policy import Policy

Tree = Any


class Cost(NamedTuple):
    """FLOPs of one row: the products of all layers, their attention, and everything outside of layers."""

    products: float
    attention: float
    rest: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Setup(NamedTuple):
    """What is counted: a model's shapes, tokens per row, rank, remat policy."""

    shape: ModelConfig
    tokens: int
    rank: int
    remat: str

    def model(self, depth: int) -> CausalLM:
        """So many layers of it. Unrolled by at least two, or the recomputation of a single one is optimised away."""
        shape = self.shape.replace(num_hidden_layers=depth)
        return CausalLM(shape, "bfloat16", self.remat, scan_unroll=2)

    def weights(self, model: CausalLM) -> tuple[optim.SketchSpec, Tree, Tree]:
        """Spec, trained and frozen weights."""
        spec = optim.SketchSpec(rank=self.rank, names=model.weight_names())
        return spec, *spec.split(model.abstract_params())


def flops(function: Callable[..., Any], *arguments: Any) -> float:
    """What XLA counts in the compiled function."""
    return float(jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"])


def rows(tokens: int, count: int = 1) -> Batch:
    """One row whose answer is three quarters of it."""

    def array(*shape: int, dtype: str = "int32") -> Any:
        return jnp.zeros(shape, dtype)

    prompt = tokens // 4
    return Batch(
        array(count, tokens), array(count) + prompt, array(count) + tokens - prompt, array(count, dtype="bool"),
        array(count, dtype="bool"), array(count, dtype="float32"), array(count, tokens - prompt, dtype="float32"),
        array(0), array(dtype="bool"),
    )  # fmt: skip


def gradient(setup: Setup, depth: int, sketched: bool) -> float:
    """FLOPs of value and gradient of one row."""
    model = setup.model(depth)
    spec, train, frozen = setup.weights(model)

    def value_and_grad(train: Tree, frozen: Tree, batch: Batch) -> Any:
        policy = Policy(model, setup.shape.vocab_size, 1.0, setup.tokens // 4)
        value = lambda train: jnp.sum(policy.logprobs(optim.merge(train, frozen), batch)[0])
        if not sketched:
            return jax.value_and_grad(value)(train)
        return optim.sketched_value_and_grad(value, spec)(train, step=0)

    return flops(value_and_grad, train, frozen, rows(setup.tokens))


def probe(setup: Setup, depth: int) -> float:
    """FLOPs of the KL prediction on one row."""
    model = setup.model(depth)
    spec, train, frozen = setup.weights(model)
    sketches = jax.eval_shape(
        lambda train: {p: jnp.zeros(m.sketch_shape(setup.rank)) for p, m in spec.matrices(train).items()}, train
    )
    batch = rows(setup.tokens)
    length = batch.rollout_logprobs.shape[1]

    def predicted(train: Tree, frozen: Tree, sketches: dict[str, Any], batch: Batch) -> Any:
        policy = Policy(model, setup.shape.vocab_size, 1.0, setup.tokens // 4)
        hidden_head = lambda train: policy.hidden_head(optim.merge(train, frozen), batch)
        mask = jnp.ones((1, length))
        predict = optim.predict_kl(hidden_head, train, spec, step=0, mask=mask, chunk=length)
        return predict(jax.tree.map_with_path(lambda path, _: sketches[optim.spec.path_string(path)], train))

    return flops(predicted, train, frozen, sketches, batch)


def optimizer(setup: Setup, sketched: bool) -> float:
    """FLOPs per layer of all that follows the gradient, without the probe."""
    spec, train, _ = setup.weights(setup.model(1))
    if sketched:
        tx = optim.logra(spec, update_ratio=6e-5, preserve_norm=True, kl_budget=1e-4)
    else:
        tx = optim.guard_nonfinite(optax.adamw(1e-6))

    def step(train: Tree, grads: Tree, state: Tree) -> Any:
        known = {"predict_kl": lambda _: jnp.float32(1e-4)} if sketched else {}
        updates, state = tx.update(grads, state, train, **known)
        return optim.apply_updates(train, updates), state

    shapes = {path: matrix.sketch_shape(setup.rank) for path, matrix in spec.matrices(train).items()}
    grads = train
    if sketched:
        grads = jax.tree.map_with_path(
            lambda path, _: jax.ShapeDtypeStruct(shapes[optim.spec.path_string(path)], jnp.float32), train
        )
    return flops(step, train, grads, jax.eval_shape(tx.init, train))


def cost(setup: Setup, count: Callable[[int], float]) -> Cost:
    """The row's cost from count(layers), which is asked three times."""
    sizes = setup.tokens // 8, setup.tokens // 16
    layers.QUERY_BLOCK = sizes[0]
    one, two = count(1), count(2)
    layers.QUERY_BLOCK = sizes[1]
    per_query = (one - count(1)) / (sizes[0] - sizes[1])
    depth, body = setup.shape.num_hidden_layers, per_query * sizes[0]
    layer = two - one
    return Cost(depth * (layer - body), depth * per_query * setup.tokens, one - layer)


def main() -> int:
    """Count and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen2.5-math-7b")
    parser.add_argument("--tokens", type=cli.positive, default=4096, help="per row; a multiple of 64")
    parser.add_argument("--rank", type=cli.positive, default=256)
    parser.add_argument("--remat", choices=("none", "full", "projected"), default="full")
    parser.add_argument("--rows", type=cli.positive, default=32, help="rows of a device in the gradient")
    parser.add_argument("--probe", type=cli.positive, default=8, help="responses of the probe")
    parser.add_argument("--gpus", type=cli.positive, default=4, help="devices that share weights and probe")
    found = parser.parse_args()
    loss.CHUNK_ELEMENTS = 2**62
    shape = PRESETS[found.preset]
    setup = Setup(shape, found.tokens, found.rank, found.remat)
    dense_setup = setup._replace(remat="full") if found.remat == "projected" else setup

    costs = {
        "LoGRA": cost(setup, lambda depth: gradient(setup, depth, sketched=True)),
        "AdamW": cost(dense_setup, lambda depth: gradient(dense_setup, depth, sketched=False)),
        "KL probe": cost(setup, lambda depth: probe(setup, depth)),
    }
    after = {
        name: shape.num_hidden_layers * optimizer(setup, sketched=name == "LoGRA") / found.gpus
        for name in ("LoGRA", "AdamW")
    }
    spec, train, _ = setup.weights(setup.model(1))
    kernels = [matrix.shape[-2:] for matrix in spec.matrices(train).values()]
    unit = 2 * found.tokens * shape.num_hidden_layers * sum(k * d for k, d in kernels)
    count = {"LoGRA": found.rows, "AdamW": found.rows, "KL probe": found.probe / found.gpus}
    print(f"{found.preset}, {found.tokens} tokens per row, rank {found.rank}, remat {found.remat}; TFLOP per device")
    print("| | rows | products of layers (units) | attention | head, loss | optimizer | total |")
    print("|---|---|---|---|---|---|---|")
    totals = {}
    for name, one in costs.items():
        extra = after.get(name, 0.0)
        totals[name] = count[name] * one.total + extra
        parts = [f"{count[name] * x / 1e12:.1f}" for x in (one.attention, one.rest)]
        products = f"{count[name] * one.products / 1e12:.1f} ({one.products / unit:.2f})"
        cells = [name, f"{count[name]:g}", products, *parts, f"{extra / 1e12:.2f}", f"{totals[name] / 1e12:.1f}"]
        print(f"| {' | '.join(cells)} |")
    added = found.rank * sum(k + d for k, d in kernels) / sum(k * d for k, d in kernels)
    print(
        f"\na unit is one product of all layers with all tokens; limit of a checkpointed update: {3 + added:.2f} of 4"
    )
    print(f"LoGRA / AdamW without the probe: {totals['LoGRA'] / totals['AdamW']:.3f} (limit {(3 + added) / 4:.3f})")
    print(f"probe / LoGRA without it: {totals['KL probe'] / totals['LoGRA']:.4f}")
    return 0


if __name__ == "__main__":
    cli.run(main)
