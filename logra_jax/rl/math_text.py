r"""The answer of a completion as a text: its last \boxed{} without what carries no meaning, or a group.

Free of sympy.
"""

import re

MAX_BOX = 600  # characters of an answer that are parsed: some 0.5 s at worst
MAX_VOTE = 200  # of one that is rewritten outside of a worker that could be killed: some milliseconds at worst


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


def answer_text(completion: str) -> str | None:
    r"""The last \boxed{...} as a text that other spellings of the same answer, such as \dfrac for \frac, share.

    None without a complete box, and for an empty one. Two answers may be equal and not have the same text (0.5, 1/2).
    """
    box = last_box(completion)
    if box is None or len(box) > MAX_VOTE:  # a long one is taken as it stands
        return box and box.strip()
    return squash(clean(box)) or None


def last_box(text: str) -> str | None:
    r"""The content of the complete \boxed{...} that closes last, None without one; in linear time."""
    opened: list[int] = []  # start of the content for a box, -1 for any other brace
    found = None  # where it starts and ends: a copy of each of many nested ones would take quadratic time
    for token in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "{":
            opened.append(-1)
        elif token[0] == "}":
            start = opened.pop() if opened else -1
            if start >= 0:
                found = start, token.start()
        elif token[0].startswith("\\boxed"):
            opened.append(token.end())
    return None if found is None else text[slice(*found)]


def clean(text: str) -> str:
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


def squash(text: str) -> str:
    """Text without what carries no meaning: spacing (but not between digits), display sizes."""
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, without the spaces around it; None without a match, or if the group is not in it."""
    answer = None
    for match in pattern.finditer(text):
        answer = match[1]
    return None if answer is None else answer.strip()
