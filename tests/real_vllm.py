"""What tests with real servers share: where vLLM is, and scripts/check_vllm.py with its trainer of random updates."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("LOGRA_VLLM_PYTHON", "")
ROOT = Path(__file__).parents[1]

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not PYTHON,
        reason="LOGRA_VLLM_PYTHON names no interpreter with vLLM; bash scripts/install_vllm_cpu.sh DIR makes one",
    ),
]


def load_script() -> Any:
    """scripts/check_vllm.py as a module."""
    spec = importlib.util.spec_from_file_location("check_vllm", ROOT / "scripts" / "check_vllm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
