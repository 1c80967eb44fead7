"""Bytes of one policy sync, by factors and by full bfloat16 weights, as a Markdown table computed from the presets.

python scripts/sync_bytes.py [--presets qwen2.5-math-1.5b ...] [--ranks 16 64 256]
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"

from logra_jax import cli
from logra_jax.models import CausalLM
from logra_jax.models.names import name_table
from logra_jax.models.presets import PRESETS, check_preset
from logra_jax.optim import SketchSpec
from logra_jax.optim.spec import leaves_with_paths
from logra_jax.sync.naming import factor_bytes, file_shapes, weight_bytes

HEADER = ("model", "targets", "all weights, GB", "rank", "factors, MB", "all weights / factors")


def rows(preset: str, ranks: list[int]) -> list[tuple[str, ...]]:
    """One row for each rank: factors are those of the default targets, in bfloat16 as the full weights."""
    config = PRESETS[preset]
    table = name_table(config)
    names = {path: form.names for path, form in table.items()}
    params = CausalLM(config).abstract_params()
    leaves = dict(leaves_with_paths(params))
    targets = SketchSpec(rank=1, names=names).matrices(params)
    shapes = file_shapes(table, {path: leaves[path].shape for path in targets})
    whole = weight_bytes(file_shapes(table, {path: leaf.shape for path, leaf in leaves.items()}))
    found = []
    for rank in ranks:
        size = factor_bytes(shapes, rank)
        number = f"{len(shapes)}"
        found.append((preset, number, f"{whole / 1e9:.2f}", f"{rank}", f"{size / 1e6:.1f}", f"{whole / size:.0f}"))
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=["qwen2.5-math-1.5b", "qwen2.5-math-7b", "qwen3.8-27b"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256])
    arguments = parser.parse_args()
    for preset in arguments.presets:
        check_preset(preset)
    lines = [HEADER, ("---",) * len(HEADER), *(row for p in arguments.presets for row in rows(p, arguments.ranks))]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return 0


if __name__ == "__main__":
    cli.run(main)
