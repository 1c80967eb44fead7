"""Eight fake CPU devices, strict JAX, and shape annotations checked by machine, before anything imports jax."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook(["logra_jax.optim", "logra_jax.models", "logra_jax.rl"], "beartype.beartype")

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of tiny Hugging Face checkpoints with float32 reference numbers from torch."""
    return HERE / "fixtures"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of exact numbers, computed in float64 numpy from the formulas alone."""
    return HERE / "golden"
