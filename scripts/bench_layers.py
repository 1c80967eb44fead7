"""Time, FLOPs and memory per token of a gated delta layer against full attention, on whatever device JAX finds.

    python scripts/bench_layers.py [--preset qwen3.5-27b] [--scale 8] [--tokens 512,1024,2048,4096,8192,16384]
        [--dtype bfloat16] [--repeats 5] [--steps-up-to 2048]

The token mixers of a hybrid model, projections included, MLP left out, with random weights and one row of text;
--scale divides hidden size and numbers of heads, while a head keeps its size. Three programs, forward and with the
gradient by the input, run in turn so that all see the same machine:

    attention    full attention, blocks of 512 queries
    delta        the gated delta layer as trained, chunk by chunk
    steps        the same layer, its recurrence token by token; its gradient keeps a state per token, and is left out
                 for rows longer than --steps-up-to

Times are medians, ratios medians over the turns. FLOPs are counted in the traced program, loops with all their turns
(XLA counts their bodies once): products from their shapes, anything else one per element that it makes. Temporaries
are the compiler's.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from logra_jax import cli
from logra_jax.errors import UserError
from logra_jax.models import gated_delta
from logra_jax.models.config import ModelConfig
from logra_jax.models.decoder import DTYPES
from logra_jax.models.delta_rule import DeltaInputs, delta_rule_step
from logra_jax.models.gated_delta import GatedDelta
from logra_jax.models.layers import Attention, Sight, rope_angles
from logra_jax.models.presets import PRESETS, check_preset

ATTENTION, DELTA, STEPS = "attention", "delta", "steps"
PASSES = ("forward", "forward and gradient")
# Primitives that move numbers and compute none.
MOVES = (
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "dynamic_slice", "dynamic_update_slice",
    "gather", "iota", "pad", "reshape", "rev", "select_n", "slice", "split", "squeeze", "transpose",
)  # fmt: skip


class Flops(NamedTuple):
    """FLOPs of a program: in matrix products, and in everything else."""

    products: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.products + self.rest


def main() -> int:
    """Measure and print a Markdown table per pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-27b", help="a hybrid model (default: qwen3.5-27b)")
    parser.add_argument("--scale", type=cli.positive, default=8, help="divides hidden size and heads (default: 8)")
    parser.add_argument("--tokens", default="512,1024,2048,4096,8192,16384", metavar="N,...", help="lengths of the row")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the activations (default: float32)")
    parser.add_argument("--repeats", type=cli.positive, default=5, help="timed turns (default: 5)")
    parser.add_argument("--steps-up-to", type=int, default=2048, metavar="N", help="of the gradient of the recurrence")
    found = parser.parse_args()
    config = scaled(found.preset, found.scale)
    try:
        lengths = [cli.positive(text) for text in found.tokens.split(",")]
    except ValueError:
        raise UserError(f"--tokens is {found.tokens!r}; give lengths such as 512,1024") from None
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in PASSES}
    for tokens in lengths:
        print(f"measuring {tokens} tokens ...", file=sys.stderr, flush=True)
        every = (ATTENTION, DELTA, STEPS)
        programs = {PASSES[0]: every, PASSES[1]: every if tokens <= found.steps_up_to else every[:2]}
        for name, row in measure(config, programs, tokens, found.dtype, found.repeats).items():
            rows[name].append(row)
    device = jax.devices()[0]
    print(f"{found.preset} / {found.scale}, {found.dtype}, {device.device_kind}, {found.repeats} turns")
    for name in PASSES:
        print(f"\n{name}\n\n{table(rows[name])}")
    return 0


def scaled(preset: str, scale: int) -> ModelConfig:
    """The preset with hidden size and numbers of heads divided, at least one of each."""
    check_preset(preset)
    config = PRESETS[preset]
    sizes = config.linear_attention
    if sizes is None:
        raise UserError(f"--preset {preset} has no gated delta layers")
    keys, heads = max(1, sizes.key_heads // scale), max(1, config.num_key_value_heads // scale)
    return config.replace(
        hidden_size=max(1, config.hidden_size // scale),
        num_attention_heads=max(1, config.num_attention_heads // scale // heads) * heads,
        num_key_value_heads=heads,
        linear_attention=replace(sizes, key_heads=keys, value_heads=keys * (sizes.value_heads // sizes.key_heads)),
    )


def stepwise(inputs: DeltaInputs, state: Any, segments: Any = None, precision: Any = None) -> tuple[Any, Any]:
    """`delta_rule` of one text a row as its definition: a loop over tokens."""

    def step(state: Any, token: DeltaInputs) -> tuple[Any, Any]:
        out, state = delta_rule_step(DeltaInputs(*(x[:, None] for x in token)), state)
        return state, out[:, 0]

    state, out = jax.lax.scan(step, state, DeltaInputs(*(x.swapaxes(0, 1) for x in inputs)))
    return out.swapaxes(0, 1), state


def mixer(config: ModelConfig, name: str, dtype: str) -> tuple[Callable[..., Any], Any]:
    """(function of weights and x [1, time, hidden], its weights)."""
    graph, shapes = nnx.split(Attention(config) if name == ATTENTION else GatedDelta(config))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(k, leaf.shape) * config.initializer_range for k, leaf in zip(keys, leaves, strict=True)]

    def run(weights: Any, x: Any) -> Any:
        module: Any = nnx.merge(graph, weights)
        real = jnp.ones(x.shape[:2], bool)
        if name == ATTENTION:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
            return module(x, rope_angles(positions, config, dtype), Sight(real, jnp.zeros((), jnp.int32)), None)[0]
        with mock.patch.object(gated_delta, "delta_rule", stepwise if name == STEPS else gated_delta.delta_rule):
            return module(x, real, None, None)[0]

    return run, jax.tree.unflatten(tree, drawn)


def measure(
    config: ModelConfig, programs_of: dict[str, tuple[str, ...]], tokens: int, dtype: str, repeats: int
) -> dict[str, dict[str, float]]:
    """Pass -> figures of its programs on a row of so many tokens: microseconds, FLOPs, bytes, ratios to `delta`."""
    x = jax.random.normal(jax.random.key(1), (1, tokens, config.hidden_size), dtype)
    found: dict[str, dict[str, float]] = {}
    for kind, names in programs_of.items():
        programs, row = {}, found.setdefault(kind, {"tokens": tokens})
        for name in names:
            run, weights = mixer(config, name, dtype)
            call = run if kind == PASSES[0] else partial(gradient, run)
            traced = jax.jit(call).trace(weights, x)
            flops, compiled = count(traced.jaxpr.jaxpr), traced.lower().compile()
            row[f"{name} flops"], row[f"{name} share"] = flops.total / tokens, flops.products / flops.total
            row[f"{name} bytes"] = compiled.memory_analysis().temp_size_in_bytes
            programs[name] = partial(compiled, weights, x)
            jax.block_until_ready(programs[name]())
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(repeats):
            for name, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program())
                times[name].append((time.perf_counter() - start) * 1e6 / tokens)
        for name in names:
            row[name] = statistics.median(times[name])
            row[f"{name} ratio"] = statistics.median(a / b for a, b in zip(times[name], times[DELTA], strict=True))
    return found


def gradient(run: Callable[..., Any], weights: Any, x: Any) -> Any:
    """By the input, of half the sum of squares of what the layer returns."""
    return jax.grad(lambda x: 0.5 * jnp.sum(jnp.square(run(weights, x).astype(jnp.float32))))(x)


def count(jaxpr: Any) -> Flops:
    """FLOPs of a traced program, loops with all their turns."""
    products = rest = 0.0
    for eqn in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values()))]
        size = lambda variables: sum(math.prod(getattr(var.aval, "shape", ())) for var in variables)
        name, made = eqn.primitive.name, size(eqn.outvars)
        if parts := [count(x) for x in inner if isinstance(x, core.Jaxpr)]:
            turns = eqn.params.get("length", 1)
            products += turns * sum(part.products for part in parts)
            rest += turns * sum(part.rest for part in parts)
        elif name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            products += 2.0 * made * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        elif name not in MOVES:
            rest += size(eqn.invars[:1]) if name.startswith(("reduce_", "cum")) else made
    return Flops(products, rest)


def table(rows: list[dict[str, float]]) -> str:
    """A Markdown table: microseconds, ratios to the chunked layer, FLOPs per token, temporaries."""
    show: list[tuple[str, str, Callable[[float], str]]] = [
        ("tokens", "tokens", lambda x: f"{x:.0f}"),
        ("attention, us per token", ATTENTION, lambda x: f"{x:.1f}"),
        ("delta", DELTA, lambda x: f"{x:.1f}"),
        ("steps", STEPS, lambda x: f"{x:.1f}"),
        ("attention / delta", f"{ATTENTION} ratio", lambda x: f"{x:.2f}"),
        ("steps / delta", f"{STEPS} ratio", lambda x: f"{x:.2f}"),
        ("attention, MFLOP per token", f"{ATTENTION} flops", lambda x: f"{x / 1e6:.2f}"),
        ("delta", f"{DELTA} flops", lambda x: f"{x / 1e6:.2f}"),
        ("of them in products", f"{DELTA} share", lambda x: f"{x:.1%}"),
        ("attention, temporaries, MiB", f"{ATTENTION} bytes", lambda x: f"{x / 2**20:.0f}"),
        ("delta", f"{DELTA} bytes", lambda x: f"{x / 2**20:.0f}"),
        ("steps", f"{STEPS} bytes", lambda x: f"{x / 2**20:.0f}"),
    ]
    lines = [f"| {' | '.join(label for label, _, _ in show)} |", "|---" * len(show) + "|"]
    for row in rows:
        lines.append(f"| {' | '.join(as_text(row[key]) if key in row else '-' for _, key, as_text in show)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
