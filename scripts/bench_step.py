"""Time of one GRPO step, sketched and dense, in one process: rollout, update, whole step, compile time, memory.

    python scripts/bench_step.py [--repeats 30]
    python scripts/bench_step.py --layers 8 --hidden 512 --mlp 2048 --heads 8 --generations 4 --new 48 --rank 32 \\
        --no-probe

A random Qwen2 model (4 layers, hidden 128, MLP 512, 4/2 heads, vocabulary 512), 8 prompts x 8 answers, 16 + 32
tokens, float32, or as the options say. LoGRA (rank 16, KL probe of 8 responses included) and AdamW learn from the same
answers in turn, so that both see the same machine; absolute times are those of the machine, the ratio is the result.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import cli, optim
from logra_jax.models import CausalLM, ModelConfig
from logra_jax.rl.batch import Batch
from logra_jax.rl.kl import draw_probe
from logra_jax.rl.loss import LossSettings
from logra_jax.rl.policy import Policy
from logra_jax.rl.rollout import Sampler
from logra_jax.rl.update import TrainState, make_update

PROMPTS, PROMPT, VOCAB, PROBE = 8, 16, 512, 8


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 4, "hidden": 128, "mlp": 512, "heads": 4, "generations": 8, "new": 32, "rank": 16}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=cli.positive, default=size)
    parser.add_argument("--repeats", type=cli.positive, default=30, help="timed steps of each kind")
    parser.add_argument("--no-probe", action="store_true", help="LoGRA without KL control")
    return parser.parse_args()


def build(found: argparse.Namespace) -> CausalLM:
    """The model."""
    config = {
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": found.hidden,
        "intermediate_size": found.mlp,
        "num_hidden_layers": found.layers,
        "num_attention_heads": found.heads,
        "num_key_value_heads": found.heads // 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": PROMPT + found.new,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    return CausalLM(ModelConfig.from_hf(config, where="bench_step.py"))


def updates(model: CausalLM, params: dict, rank: int, probe: bool) -> dict[str, tuple]:
    """Name -> (jitted update, its state, frozen weights)."""
    spec = optim.SketchSpec(rank=rank, names=model.weight_names())
    policy = Policy(model, VOCAB, 1.0, PROMPT)
    budget = 2e-3 if probe else None
    choices = {
        "logra": (optim.logra(spec, update_ratio=1e-3, preserve_norm=True, kl_budget=budget), True),
        "adamw": (optim.guard_nonfinite(optax.adamw(1e-4)), False),
    }
    found = {}
    for name, (tx, sketched) in choices.items():
        train, frozen = spec.split(jax.tree.map(jnp.copy, params))
        update = make_update(policy, tx, spec, LossSettings(), sketched=sketched, kl_control=sketched and probe)
        found[name] = (update, TrainState(train, tx.init(train), jnp.zeros(())), frozen)
    return found


def main() -> int:
    """Measure and print a Markdown table."""
    found = options()
    model, answers = build(found), PROMPTS * found.generations
    params = model.init_params(jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = jnp.asarray(rng.integers(0, VOCAB, (PROMPTS, PROMPT)), jnp.int32)
    lengths, ids = jnp.full(PROMPTS, PROMPT, jnp.int32), jnp.arange(PROMPTS, dtype=jnp.int32)
    sampler = Sampler(model, max_new_tokens=found.new, end_ids=(), vocab_size=VOCAB, pad_id=0, temperature=1.0)
    generate = partial(
        sampler.generate, prompt_tokens=prompts, prompt_lengths=lengths, prompt_ids=ids, n=found.generations
    )

    kinds = updates(model, params, found.rank, not found.no_probe)
    states = {name: state for name, (_, state, _) in kinds.items()}
    compiled, compile_s = {}, {}
    rollout_s: list[float] = []
    update_s: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(-2, found.repeats):
        for name, (update, _, frozen) in kinds.items():
            start = time.perf_counter()
            rollout = generate(optim.merge(states[name].train, frozen), seed=0, update=turn + 2)
            jax.block_until_ready(rollout)
            sampled = time.perf_counter()
            batch = Batch(
                tokens=rollout.tokens,
                prompt_lengths=rollout.prompt_lengths,
                lengths=rollout.lengths,
                stopped=rollout.stopped,
                valid=jnp.ones(answers, bool),
                advantages=jnp.asarray(rng.normal(size=answers), jnp.float32),
                rollout_logprobs=rollout.logprobs,
                probe=jnp.asarray(draw_probe(0, turn + 2, PROMPTS, found.generations, PROBE)),
                check=jnp.zeros((), bool),
            )
            if name not in compiled:
                began = time.perf_counter()
                compiled[name] = update.lower(states[name], frozen, batch).compile()
                compile_s[name] = time.perf_counter() - began
            jax.block_until_ready(batch)
            began = time.perf_counter()
            states[name], metrics = compiled[name](states[name], frozen, batch)
            jax.block_until_ready((states[name], metrics))
            done = time.perf_counter()
            assert bool(metrics["ok"])
            if turn >= 0:  # the first turns warm up
                rollout_s.append(sampled - start)
                update_s[name].append(done - began)

    middle = {name: statistics.median(times) for name, times in update_s.items()}
    rollout = statistics.median(rollout_s)
    probe = "" if found.no_probe else " + KL probe"
    print(f"| | LoGRA rank {found.rank}{probe} | AdamW | ratio |\n|---|---|---|---|")
    pair = [a / b for a, b in zip(update_s["logra"], update_s["adamw"], strict=True)]
    print(f"| update, ms | {middle['logra'] * 1e3:.1f} | {middle['adamw'] * 1e3:.1f} | {statistics.median(pair):.2f} |")
    whole = {name: rollout + value for name, value in middle.items()}
    print(f"| rollout, ms | {rollout * 1e3:.1f} | {rollout * 1e3:.1f} | 1 |")
    ratio = whole["logra"] / whole["adamw"]
    print(f"| whole step, ms | {whole['logra'] * 1e3:.1f} | {whole['adamw'] * 1e3:.1f} | {ratio:.2f} |")
    ratio = compile_s["logra"] / compile_s["adamw"]
    print(f"| compile, s | {compile_s['logra']:.1f} | {compile_s['adamw']:.1f} | {ratio:.2f} |")
    for label, field in (
        ("arguments", "argument_size_in_bytes"),
        ("of them updated in place", "alias_size_in_bytes"),
        ("temporaries", "temp_size_in_bytes"),
    ):
        size = {name: getattr(program.memory_analysis(), field) / 2**20 for name, program in compiled.items()}
        print(f"| {label}, MiB | {size['logra']:.1f} | {size['adamw']:.1f} | {size['logra'] / size['adamw']:.2f} |")
    flops = {name: program.cost_analysis()["flops"] / 1e9 for name, program in compiled.items()}
    print(f"| GFLOP | {flops['logra']:.1f} | {flops['adamw']:.1f} | {flops['logra'] / flops['adamw']:.2f} |")
    return 0


if __name__ == "__main__":
    cli.run(main)
