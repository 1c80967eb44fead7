"""The public names: they load when they are used, and none is missing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import logra_jax
from logra_jax import optim


def test_every_name_loads_and_is_listed() -> None:
    for name in optim.EXPORTS:
        assert getattr(logra_jax, name) is getattr(optim, name)
        assert getattr(optim, name).__module__ if callable(getattr(optim, name)) else True
    assert set(optim.EXPORTS) <= set(dir(logra_jax))
    assert "UserError" in dir(logra_jax)
    assert dir(optim) == sorted(optim.EXPORTS)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(optim.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {
        (alias.asname, node.module.rsplit(".", 1)[1])
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(optim.EXPORTS.items())


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'lograa'.*sketched_value_and_grad"):
        _ = logra_jax.lograa
    with pytest.raises(AttributeError, match="it has DEFAULT_TARGETS"):
        _ = optim.nothing


def test_importing_the_package_imports_no_jax() -> None:
    code = (
        "import sys, logra_jax; before = 'jax' in sys.modules; logra_jax.SketchSpec; "
        "print(before, 'jax' in sys.modules, 'flax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True", "False"]
