r"""Is the last \boxed{...} of a completion the gold answer? Runs inside grading workers only."""

import functools
import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify.grader import should_treat_as_complex

from logra_jax.rl.math_equal import OPEN_ENDED, PERCENT, TooLarge, bound, equal

MAX_BOX = 600  # characters of an answer that are parsed: some 0.5 s at worst
MAX_DEPTH = 20  # of its brackets

_WITH_UNITS = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
_WITHOUT_UNITS = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = (int(part) for part in match.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


# Other spellings of what the parser knows: thousands set apart by spaces, the mixed number 3 1/2, upright constants, a
# second name of the empty set, the degree character, functions of degrees (a unit elsewhere), letters behind \\.
_DEGREE = r"(?:\{\s*\\circ\s*\}|\\circ)"
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<![\d.,])\d{1,3}(?:(?: |~|\\ )\d{3})+(?![\d.,])", lambda match: re.sub(r"\D", "", match[0])),
        (r"(?<![\d.,}/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", _improper),
        (r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        ("°", r"^\\circ"),
        (rf"(\\(?:sin|cos|tan|cot|sec|csc)\s*\(?)\s*(\d+(?:\.\d+)?)\s*\^\s*{_DEGREE}", r"\1(\2\\pi/180)"),
        (r"\\\\(?=[A-Za-z])", r"\\\\ "),
    )
]


_PLAIN = re.compile(r"(-?)(?:\\[dtc]?frac\{(\d+)\}\{(\d+)\}|((?!0\d)\d+(?:\.\d+)?))", re.ASCII)


class BadGold(Exception):
    """The gold answer itself cannot be compared with; the row says nothing about the completion."""


def score(gold: str, completion: str) -> float:
    r"""1.0 when the last complete \boxed{...} of the completion equals the gold answer, else 0.0.

    The gold answer is the last box in `gold`, or all of it. No box and an empty box score 0.
    Raises BadGold when the gold answer is empty or too large to evaluate.
    """
    target = last_box(gold)
    target = gold if target is None else target
    if not _clean(target[:MAX_BOX]):
        raise BadGold("the gold answer is empty")
    answer = last_box(completion)
    if answer is None:
        return 0.0
    if max(len(answer), len(target)) > MAX_BOX:
        return float(answer.strip() == target.strip())
    target, answer = _clean(target), _clean(answer)
    if not answer:
        return 0.0
    if _squash(answer) == _squash(target):
        return 1.0
    if _depth(answer) > MAX_DEPTH:
        return 0.0
    if ":" in answer and ":" in target:
        return float(_same_ratio(target, answer))
    want = _parse(target)
    if want is None:
        return 0.0
    try:
        bound(want)
    except TooLarge as error:
        raise BadGold("the gold answer is too large to evaluate") from error
    got = _parse(answer)
    if got is None:
        return 0.0
    try:
        bound(got)
        # To evaluate them was the question, and may take for ever.
        if got.has(*OPEN_ENDED) and not want.has(*OPEN_ENDED):
            return 0.0
        return float(equal(want, got))
    except (
        TooLarge,
        RecursionError,
        ArithmeticError,
        ValueError,
        TypeError,
        AttributeError,
        NotImplementedError,
    ):
        return 0.0  # sympy raises any of these on expressions that it cannot handle: not shown to be equal


def check_gold(gold: str) -> None:
    """Raises BadGold for a gold answer that no other way of writing it could be found equal to.

    That is one that is empty, too long or too large to evaluate, or neither mathematics nor words.
    """
    target = last_box(gold)
    target = _clean(gold if target is None else target)
    if not target:
        raise BadGold("the gold answer is empty")
    if len(target) > MAX_BOX or _depth(target) > MAX_DEPTH:
        raise BadGold(f"the gold answer has over {MAX_BOX} characters, or brackets more than {MAX_DEPTH} deep")
    if ":" in target:
        return
    want = _parse(target)
    if want is None and not re.fullmatch(r"[\s\w.,;:()'’-]*", re.sub(r"\\text\w*\s*\{([^{}]*)\}", r"\1", target)):
        raise BadGold("the gold answer is neither mathematics that can be read nor words")
    try:
        bound(want)
    except TooLarge as error:
        raise BadGold("the gold answer is too large to evaluate") from error


def last_box(text: str) -> str | None:
    r"""The content of the complete \boxed{...} that closes last, None without one; in linear time."""
    opened: list[int] = []  # start of the content for a box, -1 for any other brace
    found = None
    for token in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            opened.append(-1)
        elif token[0] == "}":
            start = opened.pop() if opened else -1
            if start >= 0:
                found = text[start : token.start()]
        elif token[0].startswith("\\boxed"):
            opened.append(token.end())
    return found


def _depth(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[({\[]|[)}\]]", text):
        depth += 1 if bracket in "({[" else -1
        deepest = max(deepest, depth)
    return deepest


def _clean(text: str) -> str:
    """Plain rewriting that changes no meaning and that the LaTeX parser needs."""
    text = re.sub(r"\\boxed\s*(?=\{)", "", text).strip().strip("$")
    text = re.sub(r"^(?:\\[,;:! ]|\s)+|(?:\\[,;:! ]|\s)+$", "", text)
    text = re.sub(r"[.,;\s]*(?:\\\\)?[.,;\s]*$|(?<=\w)[.,;]\s*(?=\}$)", "", text)  # the end of a sentence or line
    text = re.sub(r"^\s*(?:\\approx|\\simeq|=)\s*", "", text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    number = r"[-+−]?[\d.,/]*\d\s*(?:\\?%)?"
    text = re.sub(rf"\\text\s*\{{\s*({number})\s+([A-Za-z][A-Za-z ]*)\}}", r"\1\\text{ \2}", text)  # 5 apples
    text = re.sub(rf"\\(?:text|math)(?:rm|bf|it|sf|tt|normal)?\s*\{{\s*({number})\s*\}}", r"\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(\d*)\.(\d*)\\overline\{(\d+)\}", _repeating, text)


def _repeating(match: re.Match[str]) -> str:
    whole, start, period = match.groups()
    bottom = (10 ** len(period) - 1) * 10 ** len(start)
    top = int(whole + start + period) - int((whole + start) or "0")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _squash(text: str) -> str:
    """Text without what carries no meaning: spacing (but not between digits), display sizes."""
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _same_ratio(target: str, answer: str) -> bool:
    """a:b:c against d:e:f, up to a common factor; clock times as they are written."""
    if any(re.fullmatch(r"\s*\d{1,2}(\s*:\s*\d{2})+.*", text) for text in (target, answer)):
        return re.sub(r"\s", "", target) == re.sub(r"\s", "", answer)
    sides = [[_parse(part) for part in re.split(r"(?<!\\):", text)] for text in (target, answer)]
    if len(sides[0]) != len(sides[1]) or not all(isinstance(part, sympy.Expr) for side in sides for part in side):
        return False
    for side in sides:
        for part in side:
            bound(part)
    (first, *want), (other, *got) = sides
    return all(equal(a * other, b * first) for a, b in zip(want, got, strict=True))


@functools.lru_cache(maxsize=4096)  # a group shares its gold answer and often its wrong ones
def _parse(text: str) -> Any:
    """A sympy object for the WHOLE text, or None. Nothing is looked for inside a text that does not parse."""
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
    if re.search(r"\\sqrt\s*\[[^\]]*[\^!]", text):
        return None  # root indices are evaluated while parsing, however large
    for config in (_WITH_UNITS, _WITHOUT_UNITS):
        try:
            normal = normalize_latex(text, config)
            parsed = latex2sympy(normal, is_real=not should_treat_as_complex(normal), normalization_config=None)
        except Exception:  # the parser signals bad LaTeX by bare Exceptions
            continue
        if isinstance(parsed, sympy.Basic | sympy.MatrixBase) and not parsed.has(sympy.nan, sympy.zoo):
            return parsed
    return None
