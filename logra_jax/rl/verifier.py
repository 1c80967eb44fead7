"""A task's own verifier on a model's answer. Runs inside grading workers only.

Verifiers of reasoning-gym evaluate answers: some call `eval` on them, some sympy's parser, which does. What is
compiled while one runs must therefore be a formula or a literal, and writing files, starting processes and opening
sockets is refused; that the worker can be killed does the rest.
"""

import ast
import base64
import functools
import importlib
import math
import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

from logra_jax.rl.math_text import last_group
from logra_jax.rl.tasks import make_dataset

_FORMULA = (
    ast.Constant, ast.Name, ast.Load, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator, ast.BoolOp, ast.boolop,
    ast.Compare, ast.cmpop, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Call, ast.keyword,
)  # fmt: skip
# What sympy's parser wraps numbers and names in, and may be given a text.
_TEXTS = frozenset({"Integer", "Float", "Rational", "Symbol", "Function"})
# Functions that answers to integrals and the like are made of.
_FUNCTIONS = frozenset({
    "Abs", "exp", "log", "ln", "sqrt", "cbrt", "root", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan",
    "acot", "asec", "acsc", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "erf", "sign", "floor",
    "ceiling", "Max", "Min",
})  # fmt: skip
_OWN = "from sympy import *"  # what sympy's parser runs before it looks at a text
_EFFECTS = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "webbrowser.", "tempfile.", "signal.")
_HARMLESS = frozenset({"os.listdir", "os.scandir", "os.walk"})


class Refused(PermissionError):
    """An answer that tried to be more than an answer; an OSError, as imports take a file they may not write for one."""


class _Guard:
    """An audit hook of the interpreter, active while a verifier runs."""

    def __init__(self) -> None:
        self.active = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "compile" and arguments[0] is not None and str(arguments[1]).startswith("<"):
            self.active = False  # to look at it is to compile it
            try:
                check_formula(arguments[0])
            finally:
                self.active = True
        elif event == "open":
            mode, flags = arguments[1:3]
            if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
                raise Refused(event)
        elif event.startswith(_EFFECTS) and event not in _HARMLESS:
            raise Refused(event)


def check_formula(source: Any) -> None:
    """Raises Refused for an expression that is more than literals, names, operators and known functions.

    Statements are the SyntaxError that `eval` makes of them, whoever asks. What does not parse at all is let through:
    it will not compile either. What is too deep to be looked at is refused: the compiler goes a little deeper.
    """
    try:
        text = bytes(source).decode() if isinstance(source, bytes | bytearray) else source
        if not isinstance(text, str):
            raise Refused("code")
        if text == _OWN:
            return
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError):
        return
    except (RecursionError, MemoryError):
        raise Refused("deep nesting") from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        raise SyntaxError("no expression")
    for node in ast.walk(tree.body[0].value):
        if not isinstance(node, _FORMULA) or (isinstance(node, ast.Name) and node.id.startswith("_")):
            raise Refused(type(node).__name__)
        if isinstance(node, ast.Call):
            name = _called(node)
            texts = [a for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            if name not in _TEXTS | _FUNCTIONS or (texts and name not in _TEXTS):
                raise Refused(f"call of {name}")


def _called(node: ast.Call) -> str | None:
    """The name of what is called: sympy writes Function('f')(x) for a function that it does not know."""
    func = node.func.func if isinstance(node.func, ast.Call) else node.func
    return func.id if isinstance(func, ast.Name) else None


@functools.cache  # an audit hook cannot be taken off again
def make_verifier() -> Callable[[str, str, str | None], float]:
    """A function (entry, completion, pattern) -> reward. entry: that column of `rl.tasks.make_rows`.

    The answer is group 1 of the pattern's last match, all of the text without a pattern, spaces around it removed;
    no match is worth 0. What the verifier raises on an answer is raised here.
    """
    importlib.import_module("reasoning_gym")  # takes seconds: before the worker says that it is ready
    guard = _Guard()
    sys.addaudithook(guard)
    datasets: dict[str, Any] = {}  # some take a second to make

    def verify(entry: str, completion: str, pattern: str | None) -> float:
        answer = completion.strip() if pattern is None else last_group(re.compile(pattern), completion)
        if answer is None:
            return 0.0
        task, difficulty, question = _entry(entry)
        key = repr((task, difficulty))
        if key not in datasets:
            datasets[key] = make_dataset(task, difficulty)
        guard.active = True
        try:
            reward = float(datasets[key].score_answer(answer, question))
        finally:
            guard.active = False
        if not math.isfinite(reward):
            raise ValueError(f"the verifier of {task} returned {reward}")
        return reward

    return verify


@functools.lru_cache(maxsize=1024)  # a group of answers shares its question
def _entry(packed: str) -> Any:
    return pickle.loads(base64.b64decode(packed))
