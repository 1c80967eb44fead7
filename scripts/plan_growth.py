"""How the memory of an update grows with context and rank: compiled bytes for GPUs that need not be there, as a plot.

    python scripts/plan_growth.py [--preset qwen2.5-math-7b] [--gpu h100-80gb] [--gpus 4] [--out docs/growth]

Float32 weights, bfloat16 compute, one answer per GPU and micro-batch, KL probe included; context grows at rank 256,
rank at 4096 tokens. A point takes up to a minute and is written to OUT.json at once: started again, the script goes
on where it was stopped. Draws OUT.png from what is there; --draw draws only. Needs the extra `plan`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from logra_jax import cli, plan
from logra_jax.config import Config, load_config
from logra_jax.errors import UserError
from logra_jax.gpus import GIB, find_gpu

CONTEXTS, RANKS = (2048, 4096, 8192, 16384, 32768), (16, 64, 256, 1024)
PROMPT, RANK, CONTEXT = 1024, 256, 4096


def main() -> int:
    """Measure what is missing, point by point, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen2.5-math-7b", help="default: qwen2.5-math-7b")
    parser.add_argument("--gpu", default="h100-80gb", help="default: h100-80gb")
    parser.add_argument("--gpus", type=cli.positive, default=4, help="default: 4")
    parser.add_argument("--optimizers", default=",".join(plan.OPTIMIZERS), help="default: all of the planner")
    parser.add_argument("--out", default="docs/growth", help="files without their suffix (default: docs/growth)")
    parser.add_argument("--draw", action="store_true", help="draw what has been measured")
    found = parser.parse_args()
    file = Path(f"{found.out}.json")
    what = {"preset": found.preset, "gpu": find_gpu(found.gpu).name, "gpus": found.gpus}
    data = json.loads(file.read_text()) if file.is_file() else what | {"points": []}
    if {key: data[key] for key in what} != what:
        raise UserError(f"{file} is about {data['preset']} on {data['gpus']} x {data['gpu']}: choose another --out")
    if not found.draw:
        measure_all(data, found.optimizers.split(","), file)
    draw(data, Path(f"{found.out}.png"))
    return 0


def measure_all(data: dict[str, Any], optimizers: list[str], file: Path) -> None:
    """Compile every point that `data` lacks, and write the file after each."""
    if not plan.has_compiler():
        raise UserError("there is no GPU compiler here: pip install 'logra-jax[plan]'; --draw draws what there is")
    plan.prepare_jax(data["gpus"])
    from logra_jax import build, footprint

    devices = footprint.absent_gpus(find_gpu(data["gpu"]), data["gpus"])
    wanted = [(name, context, RANK) for context in CONTEXTS for name in optimizers]
    wanted += [("logra", CONTEXT, rank) for rank in RANKS]
    for name, context, rank in dict.fromkeys(wanted):
        if any((p["optimizer"], p["context"], p["rank"]) == (name, context, rank) for p in data["points"]):
            continue
        config = footprint.with_optimizer(settings(data, context, rank), name)
        shape = build.read_model_config(config)
        measured = footprint.measure(config, shape, shape.vocab_size, devices, rollout=False)
        print(f"{name}, {context} tokens, rank {rank}: {measured.update / GIB:.2f} GiB", flush=True)
        point = {"optimizer": name, "context": context, "rank": rank, "update_gib": round(measured.update / GIB, 4)}
        data["points"].append(point)
        file.write_text(json.dumps(data, indent=1) + "\n")


def settings(data: dict[str, Any], context: int, rank: int) -> Config:
    """One answer of `context` tokens, prompt included, per GPU and micro-batch; two micro-batches."""
    gpus = data["gpus"]
    return load_config(
        str(Path(__file__).parent.parent / "configs/paper/qwen2.5-math-7b.yaml"),
        [
            f"model.preset={data['preset']}",
            f"model.max_position_embeddings={context}",
            f"data.max_prompt_length={PROMPT}",
            f"rollout.max_new_tokens={context - PROMPT}",
            f"rollout.prompts={2 * gpus}",
            f"loss.micro_batch={gpus}",
            f"kl.probe_tokens={CONTEXT}",
            f"optimizer.rank={rank}",
        ],
    )


def draw(data: dict[str, Any], file: Path) -> None:
    """Two panels: memory against context, and against rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    names = list(dict.fromkeys(point["optimizer"] for point in data["points"]))
    for name in names:
        own = [p for p in data["points"] if p["optimizer"] == name]
        for axes, key, fixed in ((left, "context", ("rank", RANK)), (right, "rank", ("context", CONTEXT))):
            points = sorted((p[key], p["update_gib"]) for p in own if p[fixed[0]] == fixed[1])
            if key == "rank" and name != "logra":
                axes.axhline(points[0][1], linestyle="--", color=f"C{names.index(name)}", label=name)
            else:
                axes.plot(*zip(*points, strict=True), "o-", color=f"C{names.index(name)}", label=name)
    for axes, label, ticks in (
        (left, f"tokens per answer (rank {RANK})", CONTEXTS),
        (right, f"rank ({CONTEXT} tokens)", RANKS),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{t // 1024}k" if t > 1024 else str(t) for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    left.set_ylabel("GiB per GPU, compiled update")
    left.legend()
    figure.suptitle(f"{data['preset']}, {data['gpus']} x {data['gpu']}", fontsize=10)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    cli.run(main)
