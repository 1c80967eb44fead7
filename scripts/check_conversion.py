"""Load and export a folder with the names, dtypes and shards of Qwen3.8-27B, and watch the host's memory.

    python scripts/check_conversion.py [--shrink 8] [--fsdp 4] [--tensor 2] [--dtype stored] [--folder DIR]

The checkpoint is made here, from random bits: 851 tensors of the text model under `model.language_model.`, those of
an image encoder and a head for several tokens beside them, bfloat16 and float32, in 18 shards; every width of the
27B is divided by `--shrink`. It is loaded onto a mesh of fake CPU devices and exported; every tensor has to lie in its
place, and every file to come back to the byte. The devices' memory is this host's as well, so what the host needs is
the process's memory less the parameters; pages of mapped files, which the kernel drops at will, are not in it.
"""

import argparse
import ctypes
import json
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

M_MMAP_THRESHOLD = -3  # of malloc.h
LAYERS, EVERY, SHARDS = 64, 4, 18
TEXT, INDEX = "model.language_model.", "model.safetensors.index.json"
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype code and shape


def make_config(shrink: int) -> dict[str, Any]:
    """The 27B's config.json, with all widths divided by `shrink`."""
    text = {
        "model_type": "qwen3_5_text", "num_hidden_layers": LAYERS, "full_attention_interval": EVERY,
        "layer_types": (["linear_attention"] * (EVERY - 1) + ["full_attention"]) * (LAYERS // EVERY),
        "hidden_size": 5120 // shrink, "intermediate_size": 17408 // shrink, "vocab_size": 248320 // shrink,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256 // shrink, "attention_bias": False,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128 // shrink, "linear_value_head_dim": 128 // shrink, "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 262144, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "attn_output_gate": True, "output_gate_type": "swish", "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
    }  # fmt: skip
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
        "text_config": text, "vision_config": {"depth": 27, "dtype": "bfloat16"},
    }  # fmt: skip


def make_tensors(shrink: int) -> Tensors:
    """Every tensor of the 27B in the order of its layers, with all widths divided by `shrink`."""
    d, f, v = 5120 // shrink, 17408 // shrink, 248320 // shrink
    head, q, key, value = 256 // shrink, 6144 // shrink, 2048 // shrink, 6144 // shrink
    full = {
        "q_proj.weight": (2 * q, d), "k_proj.weight": (4 * head, d), "v_proj.weight": (4 * head, d),
        "o_proj.weight": (d, q), "q_norm.weight": (head,), "k_norm.weight": (head,),
    }  # fmt: skip
    linear = {
        "in_proj_qkv.weight": (2 * key + value, d), "in_proj_z.weight": (value, d), "in_proj_b.weight": (48, d),
        "in_proj_a.weight": (48, d), "conv1d.weight": (2 * key + value, 1, 4), "A_log": (48,), "dt_bias": (48,),
        "norm.weight": (128 // shrink,), "out_proj.weight": (d, value),
    }  # fmt: skip

    def layer(prefix: str, block: str, inner: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        mlp = {"gate_proj.weight": (f, d), "up_proj.weight": (f, d), "down_proj.weight": (d, f)}
        parts = {f"{prefix}{norm}_layernorm.weight": (d,) for norm in ("input", "post_attention")}
        return parts | {f"{prefix}{b}.{n}": s for b, of in ((block, inner), ("mlp", mlp)) for n, s in of.items()}

    shapes: dict[str, tuple[int, ...]] = {f"{TEXT}embed_tokens.weight": (v, d)}
    for n in range(LAYERS):
        last = n % EVERY == EVERY - 1
        shapes |= layer(f"{TEXT}layers.{n}.", *(("self_attn", full) if last else ("linear_attn", linear)))
    shapes |= {f"{TEXT}norm.weight": (d,), "lm_head.weight": (v, d)}
    assert len(shapes) == 851
    shapes |= layer("mtp.layers.0.", "self_attn", full) | {"mtp.fc.weight": (d, 2 * d), "mtp.norm.weight": (d,)}
    shapes |= {f"model.visual.blocks.{n}.attn.qkv.weight": (3456 // shrink, 1152 // shrink) for n in range(27)}
    wide = ("A_log", "linear_attn.norm.weight")
    return {name: ("F32" if name.endswith(wide) else "BF16", shape) for name, shape in shapes.items()}


def make_value(name: str, code: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, subnormal numbers among them, but neither infinities nor NaN."""
    integer, kind, bit = (np.uint32, np.float32, 23) if code == "F32" else (np.uint16, ml_dtypes.bfloat16, 7)
    bits = np.random.default_rng(zlib.crc32(name.encode())).integers(0, np.iinfo(integer).max, shape, integer)
    return (bits & ~integer(1 << bit)).view(kind)  # without the lowest bit, no exponent is all ones


def make_folder(folder: Path, shrink: int) -> Tensors:
    """Write the checkpoint; its tensors."""
    from logra_jax.models.tensor_file import write_tensor_file

    tensors = make_tensors(shrink)
    sizes = {name: int(np.prod(shape)) * (4 if code == "F32" else 2) for name, (code, shape) in tensors.items()}
    total, at, weight_map = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        weight_map[name] = f"model-{min(at * SHARDS // total, SHARDS - 1) + 1:05}-of-{SHARDS:05}.safetensors"
        at += size
    folder.mkdir(parents=True)
    for file in sorted(set(weight_map.values())):
        own = {name: tensors[name] for name, home in weight_map.items() if home == file}
        write_tensor_file(folder / file, own, lambda name: make_value(name, *tensors[name]), {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(make_config(shrink)))
    return tensors


def misplaced(params: Any, tensors: Tensors) -> list[str]:
    """Text tensors that are not, to the bit, where their layer is: n lies at n // 4, and n % 4 if there are several."""

    def wrong(name: str) -> bool:
        where = re.fullmatch(rf"(?:{TEXT})?(?:layers\.(\d+)\.)?(.+?)(\.weight)?", name)
        number, path = int(where[1] or 0), where[2].split(".")
        node = params if where[1] is None else params["layers"]
        for part in path:
            node = node[part]
        leaf = next(iter(node.values())) if where[3] else node
        if where[1] is not None:
            leaf = leaf[number // EVERY, number % EVERY] if path[0] != "self_attn" else leaf[number // EVERY]
        got, stored = np.asarray(leaf), make_value(name, *tensors[name])
        wanted = (stored if stored.ndim == 1 or "embed" in name else stored.reshape(len(stored), -1).T).astype(
            got.dtype
        )
        return got.shape != wanted.shape or got.tobytes() != wanted.tobytes()

    return [name for name in tensors if name.startswith((TEXT, "lm_head")) and wrong(name)]


def differing(source: Path, other: Path) -> list[str]:
    """Files that are in one of the folders only, or not the same in both."""
    names = {path.name for folder in (source, other) for path in folder.iterdir()}
    same = lambda name: all((f / name).is_file() for f in (source, other)) and _equal(source / name, other / name)
    return sorted(name for name in names if not same(name))


def _equal(a: Path, b: Path) -> bool:
    return a.stat().st_size == b.stat().st_size and bool(
        np.array_equal(np.memmap(a, np.uint8, "r"), np.memmap(b, np.uint8, "r"))
    )


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """A list that in the end holds by how many bytes this process's own memory grew at most, looked at every ms."""

    def own() -> int:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    libc = ctypes.CDLL(None)  # what has been freed goes back to the system, and does not count as if still in use
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    libc.malloc_trim(0)
    found, before, stop = [0], own(), threading.Event()

    def watch() -> None:
        while not stop.wait(1e-3):
            found[0] = max(found[0], own() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        stop.set()
        watcher.join()


def main() -> int:
    """Make, load, compare, export, compare; 1 if anything differs or the host needs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shrink", type=int, default=8, choices=[1, 2, 4, 8, 16, 32], help="default: 8")
    parser.add_argument("--fsdp", type=int, default=4, help="default: 4")
    parser.add_argument("--tensor", type=int, default=2, help="default: 2")
    parser.add_argument("--dtype", choices=["stored", "float32"], default="stored", help="default: as stored")
    parser.add_argument("--folder", type=Path, help="where to write it (default: a temporary folder)")
    found = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={found.fsdp * found.tensor}"
    with tempfile.TemporaryDirectory(dir=found.folder) as folder:
        return check(Path(folder), found.shrink, found.fsdp, found.tensor, found.dtype)


def check(folder: Path, shrink: int, fsdp: int, tensor: int, dtype: str) -> int:
    import jax

    from logra_jax.mesh import make_mesh, shardings
    from logra_jax.models import CausalLM, ModelConfig, load_hf, save_hf

    source, back = folder / "source", folder / "back"
    tensors = make_folder(source, shrink)
    files = [path.stat().st_size for path in source.glob("*.safetensors")]
    print(
        f"{len(tensors)} tensors, {len(files)} shards, {sum(files) / 1e9:.2f} GB, the largest {max(files) / 1e6:.1f} MB"
    )
    empty = CausalLM(ModelConfig.from_hf(make_config(shrink)))
    places = shardings(make_mesh(fsdp, tensor), empty.logical_axes(), empty.abstract_params())
    kinds: Any = {} if dtype == "stored" else dtype
    failed = False
    for turn in ("compiling", "compiled"):  # the compiler's own memory is not the conversion's
        start = time.perf_counter()
        with peak_memory() as loading:
            model, params = load_hf(source, kinds, compute_dtype="bfloat16", shardings=places)
        loaded = time.perf_counter()
        with peak_memory() as saving:
            save_hf(model, params, back, overwrite=True)
        times = loaded - start, time.perf_counter() - loaded
        own = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
        extra = loading[0] - own, saving[0]
        for what, size, seconds in zip(("load", "export"), extra, times, strict=True):
            print(
                f"{turn}: {what} takes {size / 1e6:.1f} MB of the host beside the parameters ({own / 1e6:.0f} MB): "
                f"{size / max(files):.2f} of the largest shard; {seconds:.1f} s"
            )
        if turn == "compiled":
            failed = max(extra) > 2 * max(files)
            wrong = misplaced(params, tensors), differing(source, back)
            for what, names in zip(("tensors out of place", "files that differ"), wrong, strict=True):
                print(f"{what}: {', '.join(names) or 'none'}")
        del params
    return int(failed or any(wrong))


if __name__ == "__main__":
    sys.exit(main())
