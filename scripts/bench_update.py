"""Memory and time of one update and one rollout with random weights, on whatever devices JAX finds.

    python scripts/bench_update.py --config configs/paper/qwen2.5-math-7b.yaml rollout.prompts=16 [--repeats 5]
    python scripts/bench_update.py --optimizers logra,adamw --json out.json [key=value ...]

Takes the settings of a training run; model.preset, or a folder with no more than a config.json, is enough. All answers
have full length. Each optimizer has a process of its own, so that peaks of memory are its own; one that runs out of
memory says so in its column. Times are medians of whole programs that were run and waited for, one after the other:

    update                 the trainer's update
    probe                  update - the same without KL control
    gradient, per pass     (update without KL control, all rows - the same with one micro-batch) / (passes - 1)
    apply                  update without KL control - gradient of all passes
    rollout                the trainer's sampling, prompt pass included

FLOPs are those of one layer's products in the lowered gradient (layers unrolled, full remat as in the limit), against
3 + r (d + k) / (d k) units per matrix for LoGRA, 4 for a dense gradient. --brief leaves out the differences and FLOPs.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from logra_jax import cli, plan
from logra_jax.config import Config, load_config
from logra_jax.errors import UserError

GIB, MARK = 2**30, "result: "


def main() -> int:
    """Run each optimizer in its own process, then print the table."""
    parser = cli.make_parser("python scripts/bench_update.py", __doc__)
    parser.add_argument("--optimizers", default="logra,adamw", metavar="NAME,...", help="default: logra,adamw")
    parser.add_argument("--repeats", type=cli.positive, default=5, help="timed runs of each program (default: 5)")
    parser.add_argument("--brief", action="store_true", help="whole update and rollout only: fewer programs to compile")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for each optimizer")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    found = parser.parse_intermixed_args()
    config = load_config(found.config, found.settings)
    if found.worker:
        cli.use_memory(config.mesh.memory_fraction)
        report = lambda figures: print(MARK + json.dumps(figures), flush=True)
        report(measure(config, found.worker, found.repeats, brief=found.brief, report=report) | {"done": True})
        return 0
    names = found.optimizers.split(",")
    if unknown := [name for name in names if name not in plan.OPTIMIZERS]:
        raise UserError(f"--optimizers: {', '.join(unknown)} not known; known are {', '.join(plan.OPTIMIZERS)}")
    columns = {name: in_process(name, found.timeout) for name in names}
    print(table(columns))
    if found.json:
        Path(found.json).write_text(json.dumps(columns, indent=1))
    return 0 if any("error" not in column for column in columns.values()) else 1


def in_process(name: str, timeout: float | None) -> dict[str, Any]:
    """The figures of one optimizer, or {"error": why there are none or not all}."""
    print(f"measuring {name} ...", file=sys.stderr, flush=True)
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    command = [sys.executable, *sys.argv, f"--worker={name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
        said, code, errors = done.stdout, done.returncode, done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired as late:
        said, code, errors = (late.stdout or b"").decode(), 0, [f"not done after {timeout:g} s"]
    if code == 2:  # bad input
        raise UserError(errors[-1].removeprefix("error: "))
    lines = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    found = json.loads(lines[-1]) if lines else {}
    if code == -signal.SIGKILL:
        found["error"] = "out of memory (killed)"
    elif not found.pop("done", False):
        found.setdefault("error", errors[-1][:200] if errors else f"exit code {code}")
    return found


def measure(
    config: Config,
    name: str,
    repeats: int,
    brief: bool = False,
    report: Callable[[dict], object] = lambda figures: None,
) -> dict[str, Any]:
    """Figures of one optimizer in bytes, milliseconds and FLOPs; "error" says what ended the measurement early.

    report: called with the figures so far, as a process may be ended before it has them all.
    """
    import jax

    from logra_jax import build, fit, footprint

    cli.use_compilation_cache()
    config = footprint.with_optimizer(config, name)
    shape = build.read_model_config(config)
    found: dict[str, Any] = {}

    def parts_of(config: Config) -> footprint.Parts:
        return footprint.Parts(config, shape, shape.vocab_size, jax.devices())

    parts = parts_of(config)
    device = parts.mesh.devices.flat[0]
    found["devices"], found["kind"] = parts.mesh.size, device.device_kind
    try:
        update = _compiled(found, "update", parts.update)
        report(found)
        runner = Runner(parts)
        found["update_ms"] = runner.time_update(parts, update, repeats)
        found["update_peak"] = _peak(device)
        report(found)
        rollout = _compiled(found, "rollout", parts.rollout)
        found["rollout_ms"] = runner.time_rollout(parts, rollout, min(repeats, 2))
        found["rollout_peak"] = _peak(device)
        found["decode_tokens_s"] = config.rollout.rows * config.rollout.max_new_tokens * 1e3 / found["rollout_ms"]
        report(found)
        if not brief:
            del update, rollout
            if name != "lora":  # whose products are not those of the formula
                found |= layer_flops(config, shape)
            found |= phases(config, parts_of, runner, found["update_ms"], repeats)
    except (jax.errors.JaxRuntimeError, UserError) as error:
        cause = error.__cause__ or error  # a program that cannot be compiled is a UserError
        found["error"] = "out of memory" if fit.ran_out(cause) else str(cause).splitlines()[0][:200]
    return found


def _compiled(found: dict[str, Any], name: str, compile: Callable[[], Any]) -> Any:
    from logra_jax.footprint import total

    start = time.perf_counter()
    program = compile()
    found[f"{name}_compile_s"] = time.perf_counter() - start
    found[f"{name}_compiled"] = total(program.memory_analysis())
    return program


def _peak(device: Any) -> int | None:
    """Most bytes that were in use at a time, where the device counts them."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


class Runner:
    """Random weights on the devices, passed from program to program: an update writes over those it is given."""

    def __init__(self, parts: Any):
        import jax

        keys = iter(jax.random.split(jax.random.key(0), 1000))
        # Leaf by leaf and layer by layer: drawing may not take more memory than what is measured.
        draw = lambda leaf: random_leaf(next(keys), leaf)
        self.train, self.frozen = jax.tree.map(draw, parts.train), jax.tree.map(draw, parts.frozen)

    def time_update(self, parts: Any, compiled: Any, repeats: int) -> float:
        """Median milliseconds of an update."""
        import jax
        import jax.numpy as jnp

        zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
        init = jax.jit(parts.tx.init, out_shardings=parts.state_shardings.opt_state)
        state = jax.tree.map(zeros, parts.state._replace(train=None, opt_state=None))
        state = state._replace(train=self.train, opt_state=init(self.train))
        batch, self.train = self._batch(parts), None
        times = []
        for turn in range(repeats + 1):
            start = time.perf_counter()
            state, metrics = compiled(state, self.frozen, batch)
            jax.block_until_ready((state, metrics))
            if turn:  # the first run warms up
                times.append(time.perf_counter() - start)
        self.train = state.train
        return statistics.median(times) * 1e3

    def time_rollout(self, parts: Any, compiled: Any, repeats: int) -> float:
        """Median milliseconds of a rollout."""
        import jax
        import jax.numpy as jnp

        from logra_jax import optim

        prompts, width = parts.config.rollout.prompts, parts.config.data.max_prompt_length
        tokens = jax.device_put(jnp.ones((prompts, width), jnp.int32), parts.rows)
        numbers = jax.device_put(jnp.full(prompts, width, jnp.int32), parts.rows)
        times = []
        for turn in range(repeats + 1):
            start = time.perf_counter()
            jax.block_until_ready(compiled(optim.merge(self.train, self.frozen), tokens, numbers, numbers))
            if turn:
                times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    @staticmethod
    def _batch(parts: Any) -> Any:
        """Random answers of full length, with advantages of either sign."""
        import jax
        import numpy as np

        from logra_jax.rl.packing import pack

        shapes, rng = parts.batch(), np.random.default_rng(0)
        rows, width = shapes.rollout_logprobs.shape
        values = {
            "tokens": rng.integers(0, parts.vocab_size, shapes.tokens.shape),
            "prompt_lengths": np.full(rows, shapes.tokens.shape[1] - width),
            "lengths": np.full(rows, width),
            "valid": np.ones(rows),
            "advantages": rng.normal(size=rows),
            "probe": np.arange(shapes.probe.size),
        }
        place = lambda x, leaf: jax.device_put(np.broadcast_to(x, leaf.shape).astype(leaf.dtype), leaf.sharding)
        fields = {key: leaf for key, leaf in shapes._asdict().items() if leaf is not None and key != "packing"}
        batch = shapes._replace(**{key: place(values.get(key, 0), leaf) for key, leaf in fields.items()})
        if shapes.packing is None:
            return batch
        columns, (_, devices, row) = shapes.tokens.shape[1], shapes.packing.source.shape
        packed = pack(
            np.full(rows, columns - width), np.full(rows, width), np.ones(rows, bool),
            prompt_width=columns - width, width=columns, row=row, devices=devices,
        )  # fmt: skip
        return batch._replace(packing=jax.tree.map(place, packed, shapes.packing))


def random_leaf(key: Any, leaf: Any) -> Any:
    """An array like the abstract `leaf`, in its dtype: normal numbers, one matrix at a time."""
    import jax

    def matrix(key: Any, shape: tuple[int, ...]) -> Any:
        return jax.random.normal(key, shape, leaf.dtype) * 0.02

    def draw(key: Any) -> Any:
        if leaf.ndim < 3:
            return matrix(key, leaf.shape)
        return jax.lax.map(lambda key: matrix(key, leaf.shape[1:]), jax.random.split(key, leaf.shape[0]))

    return jax.jit(draw, out_shardings=leaf.sharding)(key)


def phases(config: Config, parts_of: Callable, runner: Runner, whole: float, repeats: int) -> dict[str, float]:
    """Milliseconds of the parts of an update, by differences of whole programs; see the top of the file."""
    found = {}
    config = replace(config, kl=replace(config.kl, mismatch=False, check_every=0))
    if config.kl.control:
        config = replace(config, kl=replace(config.kl, control=False))
        parts = parts_of(config)
        without = runner.time_update(parts, parts.update(), repeats)
        found["probe_ms"] = whole - without
        whole = without
    micro, rows = config.loss.micro_batch, config.rollout.rows
    if micro and micro < rows:
        single = parts_of(replace(config, rollout=replace(config.rollout, prompts=micro, generations=1)))
        one = runner.time_update(single, single.update(), repeats)
        found["gradient_ms"] = (whole - one) / (rows // micro - 1)
        found["apply_ms"] = one - found["gradient_ms"]
        found["gradient_tokens_s"] = micro * (
            config.data.max_prompt_length + config.rollout.max_new_tokens
        ) * 1e3 / found["gradient_ms"]  # fmt: skip
    return found


def layer_flops(config: Config, shape: Any) -> dict[str, float]:
    """FLOPs per token of one layer in the lowered gradient, and the limits for its matrices.

    The difference of models of two layers and of one, on a row short enough for attention to count little.
    """
    import jax
    import jax.numpy as jnp

    from logra_jax import build, optim
    from logra_jax.models import CausalLM

    tokens, sketched = 128, config.optimizer.name == "logra"

    def flops(layers: int) -> float:
        sizes = shape.replace(num_hidden_layers=layers)
        model = CausalLM(sizes, "float32", "full", scan_unroll=layers)
        spec = build.make_spec(config, model)
        train, frozen = spec.split(model.abstract_params())

        def loss(train: Any, frozen: Any, ids: Any) -> Any:
            return jnp.sum(model.hidden(optim.merge(train, frozen), ids))

        def gradient(train: Any, frozen: Any, ids: Any) -> Any:
            if sketched:
                return optim.sketched_value_and_grad(loss, spec, materialize=False)(train, frozen, ids, step=0)
            return jax.value_and_grad(loss)(train, frozen, ids)

        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        return float(jax.jit(gradient).lower(train, frozen, ids).cost_analysis()["flops"])

    wide, mlp, r = shape.hidden_size, shape.intermediate_size, config.optimizer.rank
    matrices = [(wide, shape.q_size), (shape.q_size, wide), (wide, shape.kv_size), (wide, shape.kv_size)]
    matrices += [(wide, mlp), (wide, mlp), (mlp, wide)]
    unit = 2 * sum(k * d for k, d in matrices)
    limit = (3 * unit + 2 * sum(r * (d + k) for k, d in matrices)) if sketched else 4 * unit
    return {"layer_flops": (flops(2) - flops(1)) / tokens, "layer_flops_limit": limit, "layer_flops_dense": 4 * unit}


# Label, JSON key, and how the figure is shown.
ROWS: list[tuple[str, str, Callable[[float], str]]] = [
    ("update, compiled, GiB", "update_compiled", lambda x: f"{x / GIB:.2f}"),
    ("update, peak in use, GiB", "update_peak", lambda x: f"{x / GIB:.2f}"),
    ("rollout, compiled, GiB", "rollout_compiled", lambda x: f"{x / GIB:.2f}"),
    ("update and rollout, peak in use, GiB", "rollout_peak", lambda x: f"{x / GIB:.2f}"),
    ("update, ms", "update_ms", lambda x: f"{x:.0f}"),
    ("gradient, ms per pass", "gradient_ms", lambda x: f"{x:.1f}"),
    ("gradient, tokens/s", "gradient_tokens_s", lambda x: f"{x:.0f}"),
    ("probe, ms", "probe_ms", lambda x: f"{x:.1f}"),
    ("apply, ms", "apply_ms", lambda x: f"{x:.1f}"),
    ("rollout, ms", "rollout_ms", lambda x: f"{x:.0f}"),
    ("decode, tokens/s", "decode_tokens_s", lambda x: f"{x:.0f}"),
    ("one layer's gradient, MFLOP per token", "layer_flops", lambda x: f"{x / 1e6:.2f}"),
    ("limit of its matrices, MFLOP per token", "layer_flops_limit", lambda x: f"{x / 1e6:.2f}"),
    ("compiling the update, s", "update_compile_s", lambda x: f"{x:.0f}"),
]


def table(columns: dict[str, dict[str, Any]]) -> str:
    """A Markdown table; ratios to the last optimizer where there are two or more."""
    names = list(columns)
    last = names[-1]
    kinds = {f"{c['devices']} x {c['kind']}" for c in columns.values() if "kind" in c}
    lines = [f"| {', '.join(sorted(kinds)) or 'per device'} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for label, key, show in ROWS:
        values = [column.get(key) for column in columns.values()]
        if all(value is None for value in values):
            continue
        base = columns[last].get(key)
        cells = [
            "-" if value is None else show(value) + (f" ({value / base:.2f})" if base and name != last else "")
            for name, value in zip(names, values, strict=True)
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    if any("error" in column for column in columns.values()):
        lines.append(f"| ended by | {' | '.join(column.get('error', '-') for column in columns.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
