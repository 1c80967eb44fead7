"""GPUs that need not be present: public device facts, in the text form that XLA reads. Free of jax."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from logra_jax.errors import UserError

GIB = 2**30


class Target(NamedTuple):
    """What is planned for: a name for people, bytes of device memory, and the description for the compiler."""

    name: str
    memory: int
    proto: str


@dataclass(frozen=True)
class Gpu:
    """Facts about one kind of GPU.

    memory_gib: what the driver offers to programs, which is less than the name says. bandwidth: GB/s. cores:
    streaming multiprocessors. capability: of CUDA, major and minor. shared_kib: per multiprocessor, of which
    one block gets all but 1. threads: per multiprocessor.
    """

    product: str
    memory_gib: float
    bandwidth: float
    cores: int
    capability: tuple[int, int]
    l2_mib: int
    clock_ghz: float
    shared_kib: int
    threads: int

    @property
    def memory(self) -> int:
        """Bytes of device memory."""
        return round(self.memory_gib * GIB)

    def proto(self) -> str:
        """The description as a text proto (xla.gpu.GpuTargetConfigProto)."""
        major, minor = self.capability
        # From Hopper on, XLA emits the instructions of that one architecture (sm_90a, not sm_90).
        minor_field = f" minor: {minor}" if minor else ""
        feature = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_kib * 1024}
  threads_per_core_limit: {self.threads}
  core_count: {self.cores}
  fpus_per_core: {64 if self.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {round(self.bandwidth * 1e9)}
  l2_cache_size: {self.l2_mib * 2**20}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {(self.shared_kib - 1) * 1024}
  cuda_compute_capability {{ major: {major}{minor_field}{feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  name: "{self.product}"
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.product}"
"""


GPUS: dict[str, Gpu] = {
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", 79.11, 3352, 132, (9, 0), 50, 1.98, 228, 2048),
    "h200-141gb": Gpu("NVIDIA H200", 139.8, 4800, 132, (9, 0), 50, 1.98, 228, 2048),
    "b200-180gb": Gpu("NVIDIA B200", 178.3, 7700, 148, (10, 0), 126, 1.965, 228, 2048),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", 79.15, 2039, 108, (8, 0), 40, 1.41, 164, 2048),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", 39.39, 1555, 108, (8, 0), 40, 1.41, 164, 2048),
    "l40s-48gb": Gpu("NVIDIA L40S", 44.4, 864, 142, (8, 9), 96, 2.52, 100, 1536),
    "a6000-48gb": Gpu("NVIDIA RTX A6000", 47.4, 768, 84, (8, 6), 6, 1.8, 100, 1536),
    "l4-24gb": Gpu("NVIDIA L4", 22.0, 300, 58, (8, 9), 48, 2.04, 100, 1536),
    "a10g-24gb": Gpu("NVIDIA A10G", 22.1, 600, 80, (8, 6), 6, 1.71, 100, 1536),
    "rtx5090-32gb": Gpu("NVIDIA GeForce RTX 5090", 31.3, 1792, 170, (12, 0), 96, 2.41, 100, 1536),
    "rtx4090-24gb": Gpu("NVIDIA GeForce RTX 4090", 23.6, 1008, 128, (8, 9), 72, 2.52, 100, 1536),
    "rtx3090-24gb": Gpu("NVIDIA GeForce RTX 3090", 23.6, 936, 82, (8, 6), 6, 1.695, 100, 1536),
}


def find_gpu(text: str) -> Target:
    """The GPU of that name ("H100", "rtx-4090", "a100-40gb"), or that of a text proto file. Raises UserError."""
    file = Path(text)
    if file.is_file():
        return _read_proto(file)
    plain = re.sub(r"[\s_-]|nvidia|geforce", "", text.lower())
    found = [name for name in GPUS if plain and name.replace("-", "").startswith(plain)]
    if len(found) == 1:
        return Target(found[0], GPUS[found[0]].memory, GPUS[found[0]].proto())
    if found:
        raise UserError(f"--gpu {text}: there are {' and '.join(found)}: name one of them")
    near = difflib.get_close_matches(plain, [name.replace("-", "") for name in GPUS], n=1, cutoff=0.6)
    meant = "".join(f" (did you mean {name}?)" for name in GPUS if name.replace("-", "") in near)
    raise UserError(f"--gpu {text}: neither a file nor a known GPU{meant}; known are {', '.join(GPUS)}")


def _read_proto(file: Path) -> Target:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--gpu {file}: cannot be read: {error}") from None
    memory = re.search(r"device_memory_size:\s*(\d+)", text)
    if memory is None:
        raise UserError(f"--gpu {file}: has no device_memory_size: expected a GPU description as a text proto")
    name = re.search(r'device_description_str:\s*"([^"]*)"', text)
    return Target(name[1] if name else file.stem, int(memory[1]), text)
