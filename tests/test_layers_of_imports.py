"""Who may import whom: the optimizer stands alone, models know no trainer, and light modules need no jax."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "logra_jax"
FORBIDDEN = {
    "optim": ("logra_jax.models", "logra_jax.rl", "flax"),
    "models": ("logra_jax.rl",),
    "rl": ("flax",),
    "sync": ("logra_jax.rl", "jax", "flax", "optax"),
}
COMMANDS = ("train", "evaluate", "convert", "run", "build", "config", "settings", "cli")


def imported(file: Path) -> set[str]:
    """Full names of all that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports in this package are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_keep_to_their_layer(folder):
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert len(files) > 3
    banned = (*FORBIDDEN[folder], *(f"logra_jax.{name}" for name in COMMANDS))  # the whole config stays above
    for file in files:
        found = [name for name in imported(file) for ban in banned if f"{name}.".startswith(f"{ban}.")]
        assert not found, f"{file.name} imports {found}"


@pytest.mark.parametrize(
    "module",
    [
        "", ".errors", ".config", ".settings", ".optim.names", ".optim.twin", ".models.names", ".models.config",
        ".sync.blob", ".sync.naming", ".sync.pool", ".sync.server",
    ],
)  # fmt: skip
def test_light_modules_need_no_jax(module):
    code = f"import sys, logra_jax{module}; print({{'jax', 'jaxlib', 'flax', 'optax', 'torch'}} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
