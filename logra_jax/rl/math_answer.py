r"""Is the last \boxed{...} of a completion the gold answer? Runs inside grading workers only."""

import functools
import itertools
import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify.grader import should_treat_as_complex

from logra_jax.rl.math_equal import OPEN_ENDED, PERCENT, TooLarge, bound, equal
from logra_jax.rl.math_text import MAX_BOX, clean, last_box, squash
from logra_jax.rl.math_units import without_units

MAX_DEPTH = 20  # of its brackets

# The parser's own removal of units takes all from the first \text on, and a last variable that is named like one.
_FORM = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")

_PLAIN = re.compile(r"(-?)(?:\\[dtc]?frac\{(\d+)\}\{(\d+)\}|((?!0\d)\d+(?:\.\d+)?))", re.ASCII)
# Of numbers, as 21_3.
_BASES = re.compile(r"\d_\{?(\d+)", re.ASCII), re.compile(r"\d_\{?\s*\\text\s*\{(\w+)\}", re.ASCII)
_MARKS = re.compile(r"(?<=[A-Za-z])'"), re.compile(r"\\ldots")  # primes and omissions: parsed as nothing
_CLOCK = re.compile(r"\s*\d{1,2}(\s*:\s*\d{2})+[^\d:]*")


class BadGold(Exception):
    """The gold answer itself cannot be compared with; the row says nothing about the completion."""


def score(gold: str, completion: str) -> float:
    r"""1.0 when the last complete \boxed{...} of the completion equals the gold answer, else 0.0.

    The gold answer is the last box in `gold`, or all of it. No box and an empty box score 0.
    Raises BadGold when the gold answer is empty or too large to evaluate.
    """
    target = last_box(gold)
    target = gold if target is None else target
    if not clean(target[:MAX_BOX]):
        raise BadGold("the gold answer is empty")
    answer = last_box(completion)
    if answer is None:
        return 0.0
    if max(len(answer), len(target)) > MAX_BOX:
        return float(answer.strip() == target.strip())
    return float(_same(clean(target), clean(answer)))


@functools.lru_cache(maxsize=4096)  # answers to one prompt are often the same
def _same(target: str, answer: str) -> bool:
    """Whether two cleaned answers mean the same. Raises BadGold."""
    if not answer:
        return False
    if squash(answer) == squash(target):
        return True
    if _depth(answer) > MAX_DEPTH:
        return False
    for way in _BASES:  # below, what follows a number's _ is left out
        if len({tuple(bases) for text in (answer, target) if (bases := way.findall(text))}) > 1:
            return False
    if any(len(mark.findall(answer)) != len(mark.findall(target)) for mark in _MARKS):
        return False
    is_ratio = ":" in answer and ":" in target
    want = _ratio(target) if is_ratio else _parse(target)
    if want is None:
        return False
    _bound_gold(want)
    got = _ratio(answer, times=not isinstance(want, sympy.Tuple)) if is_ratio else _parse(answer)
    if got is None:
        return False
    try:
        bound(got)
        if is_ratio:
            return _same_ratio(want, got)
        # To evaluate them was the question, and may take for ever.
        if got.has(*OPEN_ENDED) and not want.has(*OPEN_ENDED):
            return False
        return equal(want, got)
    except (
        TooLarge,
        RecursionError,
        ArithmeticError,
        ValueError,
        TypeError,
        AttributeError,
        NotImplementedError,
    ):
        return False  # sympy raises any of these on expressions that it cannot handle: not shown to be equal


def check_gold(gold: str) -> None:
    """Raises BadGold for a gold answer that no other way of writing it could be found equal to.

    That is one that is empty, too long or too large to evaluate, or neither mathematics nor words.
    """
    target = last_box(gold)
    target = clean(gold if target is None else target)
    if not target:
        raise BadGold("the gold answer is empty")
    if len(target) > MAX_BOX or _depth(target) > MAX_DEPTH:
        raise BadGold(f"the gold answer has over {MAX_BOX} characters, or brackets more than {MAX_DEPTH} deep")
    want = _ratio(target) if ":" in target else _parse(target)
    if (
        want is None
        and ":" not in target
        and not re.fullmatch(r"[\s\w.,;:()'’-]*", re.sub(r"\\text\w*\s*\{([^{}]*)\}", r"\1", target))
    ):
        raise BadGold("the gold answer is neither mathematics that can be read nor words")
    _bound_gold(want)


def _bound_gold(want: Any) -> None:
    try:
        bound(want)
    except TooLarge as error:
        raise BadGold("the gold answer is too large to evaluate") from error


def _depth(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[({\[]|[)}\]]", text):
        depth += 1 if bracket in "({[" else -1
        deepest = max(deepest, depth)
    return deepest


def _ratio(text: str, times: bool = True) -> sympy.Basic | None:
    """a:b:c as a tuple, a time of day, unless there can be none, as a symbol; None where a part is no number."""
    if times and _CLOCK.fullmatch(text):
        return sympy.Symbol(re.sub(r"\s", "", text))
    parts = [_parse(part) for part in re.split(r"(?<!\\):", text)]
    return sympy.Tuple(*parts) if all(isinstance(part, sympy.Expr) for part in parts) else None


def _same_ratio(want: sympy.Basic, got: sympy.Basic) -> bool:
    """Up to a common factor; times of day as they are written."""
    if not isinstance(want, sympy.Tuple) or not isinstance(got, sympy.Tuple):
        return bool(want == got)
    if len(want) != len(got):
        return False
    pairs = list(zip(want, got, strict=True))
    zeros = all(equal(a, sympy.S.Zero) == equal(b, sympy.S.Zero) for a, b in pairs)  # 0:0 is like no other
    return zeros and all(equal(a * d, c * b) for (a, b), (c, d) in itertools.combinations(pairs, 2))


@functools.lru_cache(maxsize=4096)  # a group shares its gold answer and often its wrong ones
def _parse(text: str) -> Any:
    """A sympy object for the WHOLE text, or None. Nothing is looked for inside a text that does not parse."""
    text = without_units(text)
    if (plain := _PLAIN.fullmatch(text)) is not None:  # most answers, without the parser's ten milliseconds
        sign, top, bottom, number = plain.groups()
        if number is None and not int(bottom):
            return None
        value = (
            sympy.Rational(int(top), int(bottom))
            if number is None
            else (sympy.Float if "." in number else sympy.Integer)(number)
        )
        return -value if sign else value
    if (percent := re.fullmatch(r"(.*[^\\\s])\s*\\?%", text, re.DOTALL)) is not None:
        number = _parse(percent[1])  # the parser takes the sign for a part of the last factor only
        return number * PERCENT if isinstance(number, sympy.Expr) else None
    if re.search(r"(?<![\d_])\d+\s+\d", re.sub(r"\d{1,3}(?: \d{3})+(?!\d)", "0", text)):
        return None  # numbers side by side: the parser would add or multiply them
    if "\\" not in text and re.search(r"\)\s*\d|(?<![_^{}\d])\d+\s*[\[{]\d|\}\s*\{\d", text):
        return None  # also where they are in brackets
    if re.search(r"\\circ\s*\}?\s*\d", text):
        return None  # degrees and minutes
    if re.search(r"\\sqrt\s*\[[^\]]*[\^!]", text):
        return None  # root indices are evaluated while parsing, however large
    # The parser would read a product in brackets, 2(3), as a mixed number: as a sum.
    text = re.sub(r"((?<![_^\d.])\d[\d.]*|\))\s*((?:\\left\s*)?\()", r"\1\\cdot \2", text)
    try:
        normal = normalize_latex(text, _FORM)
        parsed = latex2sympy(normal, is_real=not should_treat_as_complex(normal), normalization_config=None)
    except Exception:  # the parser signals bad LaTeX by bare Exceptions
        return None
    usable = isinstance(parsed, sympy.Basic | sympy.MatrixBase) and not parsed.has(sympy.nan, sympy.zoo)
    return parsed if usable else None
