"""What the README shows is run: the example trains, the commands it names exist, the tree is the tree."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

from logra_jax.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_optax_example_trains_in_25_lines():
    code = re.search(r"<!-- example.*?-->\n```python\n(.*?)```", README, re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    printed = io.StringIO()
    with (
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(printed),
    ):
        exec(compile(code, "README.md", "exec"), {})
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", printed.getvalue())]
    assert len(losses) > 50
    # Four classes start at log 4 = 1.386.
    assert losses[0] == pytest.approx(1.386, abs=1e-3)
    assert losses[-1] < 0.25 * losses[0]


def test_settings_of_methods_go_together(tmp_path):
    rows = re.findall(r"^\| [^|]*\(\d{4}\.\d{5}\) \| `([^`]*)`", README, re.M)
    assert len(rows) == 5
    mine = tmp_path / "my.yaml"
    mine.write_text(re.search(r"```yaml\n(steps:.*?)```", README, re.S)[1], encoding="utf-8")
    for row in rows:
        load_config(None, row.split())
        load_config(mine, row.split())


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:scripts|configs|docs)/[\w./-]+\.\w+", README))))
def test_files_that_it_names_exist(path):
    assert (ROOT / path).exists()


def test_commands_that_it_names_exist():
    modules = set(re.findall(r"python -m logra_jax\.(\w+)", README))
    assert {"train", "evaluate", "convert"} <= modules
    for module in modules:
        assert (ROOT / "logra_jax" / f"{module}.py").is_file()


def test_every_room_of_the_tree_is_named():
    tree = README.split("## Where things are")[1]
    for path in (ROOT / "logra_jax").iterdir():
        if path.name.startswith("_") or path.name == "errors.py":
            continue
        assert re.search(rf"\b{re.escape(path.name)}\b", tree), path.name
