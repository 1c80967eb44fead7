"""Do two parsed answers mean the same? Runs inside grading workers only.

math-verify's comparison rounds numbers and differences to an absolute precision, so that two tiny numbers are
"equal", and solves relations, where two failures are "equal". Numbers, expressions and single relations are
therefore compared here, exactly or relatively; chains, unions, words and the rest are left to math-verify.
"""

import math
from typing import Any

import sympy
from math_verify import verify
from math_verify.grader import is_assignment_relation, is_equation, take_last_relation
from sympy import Float, Rational, Symbol, Tuple
from sympy.core.function import AppliedUndef
from sympy.core.relational import Eq, GreaterThan, LessThan, Relational, StrictGreaterThan, StrictLessThan

MAX_DIGITS = 50_000  # of any exact number that an answer may stand for
MAX_TERMS = 10_000  # of a product, or of a power of a sum
MIN_DIGITS = 6  # significant digits from which a decimal may stand for the number that it is a rounding of
MAX_SET = 64  # members of a set that are matched one by one
OPEN_ENDED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Derivative, sympy.Limit)
PERCENT = sympy.UnevaluatedExpr(Rational(1, 100))
PRECISION = 40  # decimal digits of numeric evaluation; numbers agree when they agree to 3/4 of them

_FLIPPED = {GreaterThan: LessThan, LessThan: GreaterThan, StrictGreaterThan: StrictLessThan}
_FLIPPED |= {StrictLessThan: StrictGreaterThan}
_POINTS = ("7/5", "-5/3", "11/4", "-13/7", "3/8", "-2/9", "17/3", "23/10", "-19/6", "1/7", "29/9", "-31/8")


class TooLarge(Exception):
    """Evaluating an expression would take more than MAX_DIGITS digits or MAX_TERMS terms."""


def bound(expr: Any) -> float:
    """Number of decimal digits (of numerator plus denominator) that evaluating `expr` may take; cheap.

    Symbols count as one digit. Raises TooLarge for what exact arithmetic could not finish.
    """
    if isinstance(expr, sympy.MatrixBase):
        return max((bound(entry) for entry in expr), default=1.0)
    if isinstance(expr, Rational):
        digits = (expr.p.bit_length() + expr.q.bit_length()) * math.log10(2)
    elif isinstance(expr, Float):
        digits = float(abs(sympy.log(abs(expr), 10).evalf(5))) + 17 if expr else 1.0
    elif not getattr(expr, "args", ()):
        digits = 1.0
    else:
        parts = [bound(part) for part in expr.args]
        digits = sum(parts)
        if isinstance(expr, sympy.Pow | sympy.exp):
            power = _size(expr.exp)
            digits = parts[0] * max(power, 1.0) + parts[-1]
            if expr.free_symbols and power > MAX_TERMS:
                raise TooLarge
        elif isinstance(expr, sympy.factorial | sympy.gamma):
            digits = _factorial_digits(_size(expr.args[0]))
        elif isinstance(expr, sympy.factorial2 | sympy.subfactorial | sympy.RisingFactorial | sympy.FallingFactorial):
            digits = _factorial_digits(sum(_size(part) for part in expr.args))
        elif isinstance(expr, sympy.binomial):
            n, k = (_size(part) for part in expr.args)
            digits = (1.0 + math.log10(n + 1.0)) * max(1.0, min(k, abs(n - k)))
        elif isinstance(expr, sympy.Product):
            for _, low, high in expr.limits:
                if _size(high - low) > MAX_TERMS:
                    raise TooLarge
    if not digits <= MAX_DIGITS:
        raise TooLarge
    return digits


def _size(expr: Any) -> float:
    """|expr| as a float (inf past its range, 1 for anything with symbols); expr has passed `bound`."""
    if expr.free_symbols:
        return 1.0
    value = abs(expr.evalf(15))
    return float(value) if value.is_Number else 1.0


def _factorial_digits(n: float) -> float:
    return math.lgamma(n + 2.0) / math.log(10) if n < 1e6 else math.inf


def equal(gold: Any, got: Any) -> bool:
    """Whether two bounded parse results mean the same answer.

    May raise what sympy raises on expressions that it cannot handle.
    """
    if isinstance(got, Eq) and not isinstance(gold, Eq) and not _names(got):
        return False
    gold, got = _unwrap(gold, got)
    if not gold.free_symbols and any(len(symbol.name) > 1 for symbol in got.free_symbols):
        return False  # words that multiply zero, say
    if isinstance(gold, sympy.MatrixBase) or isinstance(got, sympy.MatrixBase):
        return (
            isinstance(gold, sympy.MatrixBase)
            and isinstance(got, sympy.MatrixBase)
            and gold.shape == got.shape
            and all(equal(a, b) for a, b in zip(gold, got, strict=True))
        )
    if isinstance(gold, sympy.FiniteSet) or isinstance(got, sympy.FiniteSet):
        return _equal_sets(gold, got)
    if isinstance(gold, sympy.And) and isinstance(got, sympy.And):
        return _equal_sets(sympy.FiniteSet(*gold.args), sympy.FiniteSet(*got.args))
    if isinstance(gold, Tuple) and isinstance(got, Tuple):
        return len(gold) == len(got) and all(equal(a, b) for a, b in zip(gold, got, strict=True))
    if isinstance(gold, sympy.Interval) and isinstance(got, sympy.Interval):
        ends = (gold.left_open, gold.right_open) == (got.left_open, got.right_open)
        return ends and equal(gold.start, got.start) and equal(gold.end, got.end)
    if isinstance(gold, Relational) and isinstance(got, Relational):
        return _equal_relations(gold, got)
    if not any(_is_word(side) or not isinstance(side, sympy.Expr) for side in (gold, got)):
        gold, got = _imaginary(gold), _imaginary(got)
        numbers = not gold.free_symbols | got.free_symbols
        same = _equal_numbers(gold, got) if numbers else _identical(gold, got)
        if same is not None:
            return same
    return _verify(gold, got)


def _verify(gold: Any, got: Any) -> bool:
    return bool(verify(_exact(gold), _exact(got), timeout_seconds=None))


def _unwrap(gold: Any, got: Any) -> tuple[Any, Any]:
    """`x = 5` answers 5, and 5 answers `x = 5`."""
    if is_equation(got) and not is_equation(gold):
        return gold, _value(take_last_relation(got))
    if is_assignment_relation(gold) and not is_equation(got):
        return _value(take_last_relation(gold)), got
    return gold, got


def _names(equation: Eq) -> bool:
    """Whether one side could be what the other is: not 2x, x + 1, x^2 or -x, and no number that is another one."""
    name, value = (equation.rhs, equation.lhs) if isinstance(equation.rhs, Symbol) else (equation.lhs, equation.rhs)
    if not isinstance(name, sympy.Expr):
        return True
    if name.is_number:
        return bool(value.is_number) and equal(name, value)
    return not name.is_Pow and not (isinstance(name, sympy.Add | sympy.Mul) and any(a.is_number for a in name.args))


def _value(relation: Any) -> Any:
    """What x is in `x = 5`, or in `5 = x`."""
    return relation.lhs if isinstance(relation.rhs, Symbol) and relation.lhs.is_number else relation.rhs


def _is_word(expr: Any) -> bool:
    """A symbol or a bare product of symbols: the parser reads words as products of their letters."""
    return isinstance(expr, Symbol) or (isinstance(expr, sympy.Mul) and all(isinstance(a, Symbol) for a in expr.args))


def _imaginary(expr: Any) -> Any:
    """The letter i, which the parser leaves a symbol, as the imaginary unit."""
    letters = {symbol: sympy.I for symbol in expr.free_symbols if symbol.name == "i"}
    return expr.xreplace(letters) if letters else expr


def _equal_sets(gold: Any, got: Any) -> bool:
    if not isinstance(gold, sympy.FiniteSet) or not isinstance(got, sympy.FiniteSet):
        if isinstance(gold, sympy.Set | Tuple) or isinstance(got, sympy.Set | Tuple):
            return _verify(gold, got)
        gold, got = (s if isinstance(s, sympy.FiniteSet) else sympy.FiniteSet(s) for s in (gold, got))
    if len(gold) != len(got) or len(gold) > MAX_SET:
        return False
    left = list(got)
    for member in gold:
        match = next((i for i, other in enumerate(left) if equal(member, other)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _equal_relations(gold: Relational, got: Relational) -> bool:
    """Equal up to a constant factor (negative ones turn inequalities round); one unknown: by solving, too."""
    sides = (gold.lhs, gold.rhs, got.lhs, got.rhs)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return type(gold) is type(got) and equal(gold.lhs, got.lhs) and equal(gold.rhs, got.rhs)
    if type(gold) is type(got) and equal(gold.lhs, got.lhs) and equal(gold.rhs, got.rhs):
        return True
    factor = _constant_ratio(_exact(gold.lhs - gold.rhs), _exact(got.lhs - got.rhs))
    if factor is not None:
        same = type(gold) if factor > 0 or isinstance(gold, Eq | sympy.Ne) else _FLIPPED[type(gold)]
        return same is type(got)
    one_unknown = len(gold.free_symbols) == 1 and gold.free_symbols == got.free_symbols
    return one_unknown and type(gold) is type(got) and _verify(gold, got)


def _constant_ratio(a: Any, b: Any) -> Any:
    """The c with a = c b at every point that can be evaluated, or None."""
    ratio = None
    agreed = 0
    for first, second in _values(a, b):
        if not first.is_real or not second.is_real:
            continue
        if first == 0 and second == 0:
            continue
        if first == 0 or second == 0:
            return None
        if ratio is None:
            ratio = first / second
        elif not _close(first / second, ratio):
            return None
        agreed += 1
    return ratio if agreed >= 3 else None


def _identical(a: Any, b: Any) -> bool | None:
    """Equal wherever both are real, by values at fixed points; None where too few points can be evaluated.

    Points where a value is complex decide only if the values agree: sqrt(1/n) and 1/sqrt(n) are the same
    answer to a question about n > 0, while |x| and x differ at real values.
    """
    agreed = 0
    for first, second in _values(_exact(a), _exact(b)):
        if _close(first, second):
            agreed += 1
        elif (first.is_real and second.is_real) or a.has(sympy.I) or b.has(sympy.I):
            return False
    return True if agreed >= 3 else None


def _values(a: Any, b: Any) -> Any:
    """Pairs of finite values of both expressions at fixed points, the symbols matched by name."""
    if a.has(*OPEN_ENDED, AppliedUndef) or b.has(*OPEN_ENDED, AppliedUndef):
        return
    symbols = sorted(a.free_symbols | b.free_symbols, key=lambda symbol: symbol.name)
    places = {name: i for i, name in enumerate(dict.fromkeys(symbol.name for symbol in symbols))}
    for n in range(len(_POINTS)):
        point = {
            s: Rational(_POINTS[(n + 5 * places[s.name]) % len(_POINTS)]) + places[s.name] // len(_POINTS)
            for s in symbols
        }
        pair = tuple(e.subs(point).evalf(PRECISION) for e in (a, b))
        if all(value.is_number and value.is_finite for value in pair):
            yield pair


def _equal_numbers(a: Any, b: Any) -> bool | None:
    """Constants: exactly when rational, else to 30 digits; a decimal may be the rounding of the other."""
    exact = [_exact(value).doit() for value in (a, b)]
    if any(value.is_infinite for value in exact):
        return exact[0] == exact[1]
    if all(isinstance(value, Rational) for value in exact) and exact[0] == exact[1]:
        return True
    numbers = [value if isinstance(value, Rational) else value.evalf(PRECISION) for value in exact]
    if not all(number.is_number and number.is_finite for number in numbers):
        return None
    if not all(isinstance(value, Rational) for value in exact) and _close(*numbers):
        return True
    if any(number == 0 or abs(number) < Rational(1, 10**20) for number in numbers) and not all(
        isinstance(value, Rational) for value in exact
    ):
        return sympy.simplify(exact[0] - exact[1]) == 0
    for decimal, other, written in ((exact[0], numbers[1], a), (exact[1], numbers[0], b)):
        if written.has(Float) and isinstance(decimal, Rational) and _is_rounding(decimal, other):
            return True
    plain = [_without_percent(value) for value in (a, b)]
    bare = [_exact(value) for value in plain]
    if (plain[0] is not a) != (plain[1] is not b) and all(isinstance(value, Rational) for value in bare):
        # 28 where 28 % is asked for, or the other way round: 0.28 % is no answer to 0.28, though
        return bare[0] == bare[1] and (plain[0] is not a or bool(abs(bare[0]) >= 1))
    return False


def _without_percent(expr: Any) -> Any:
    if isinstance(expr, sympy.Mul) and expr.args.count(PERCENT) == 1:
        return sympy.Mul(*(part for part in expr.args if part != PERCENT))
    return expr


def _is_rounding(decimal: Rational, other: Any) -> bool:
    """Whether `decimal` is `other` rounded or cut at its own last place, with MIN_DIGITS digits or more."""
    places = next((d for d in range(1, 60) if (decimal * 10**d).is_Integer), None)
    if places is None or decimal.is_Integer or not other.is_real:
        return False
    scaled = int(decimal * 10**places)
    if len(str(abs(scaled))) < MIN_DIGITS:
        return False
    return (
        abs(Rational(scaled) - other * 10**places) < 1
        and (scaled > 0) == bool(other > 0)
        and (abs(Rational(scaled) - other * 10**places) <= Rational(1, 2) or abs(scaled) < abs(other * 10**places))
    )


def _close(a: Any, b: Any) -> bool:
    scale = max(abs(a), abs(b))
    return bool(abs(a - b) <= scale * Rational(1, 10 ** (3 * PRECISION // 4)))


def _exact(expr: Any) -> Any:
    """Every decimal replaced by the rational that it is written as."""
    floats = expr.atoms(Float)
    return expr.xreplace({value: Rational(str(value)) for value in floats}) if floats else expr
