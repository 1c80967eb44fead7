r"""The answer of a completion as a text: its last \boxed{} without what carries no meaning, or a group.

Free of sympy.
"""

import re
import unicodedata

MAX_BOX = 600  # characters of an answer that are parsed: some 0.5 s at worst
MAX_VOTE = 200  # of one that is rewritten outside of a worker that could be killed: some milliseconds at worst


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = (int(part) for part in match.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


def _scaled(match: re.Match[str]) -> str:
    number, scale, unit = match[1], match[2] or match[4], match[3]
    return rf"{number}\cdot 10^{{{3 * _SCALES.index(scale) + 3}}}" + (rf"\text{{{unit}}}" if unit else "")


# Other spellings of what the parser knows: spaces, minus signs, money, colours and fonts, thousands set apart by spaces
# or said in words, the mixed number 3 1/2, fractions of one character, upright constants, second names, the degree
# character and its scales of temperature, functions of degrees (a unit elsewhere), letters behind \\.
_DEGREE = r"(?:\{\s*\\circ\s*\}|\\circ)"
_SCALES = ["thousand", "million", "billion", "trillion"]
_SCALE = "|".join(_SCALES)
_SPELLINGS = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"~|(?<!\\)\\(?:[\s,;:]|q?quad(?![A-Za-z]))", " "),
        ("[−–]", "-"),
        (r"[£€¥]|\\(?:pounds|euro|textdollar)(?![A-Za-z])", ""),
        (r"\\(?:text)?color\s*\{\w*\}|\\(?:bf|rm|it)(?![A-Za-z])", ""),
        (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,])", lambda match: match[0].replace(" ", "")),
        (rf"(\d)\s*(?:\\text\s*\{{\s*({_SCALE})\b([^{{}}]*)\}}|({_SCALE})\b)(?!\s*\d)", _scaled),
        (r"\\text\s*\{\s*percent\s*\}|\bpercent\b", r"\\%"),
        (r"\\sqrt\s+(\d+)", r"\\sqrt{\1}"),
        ("[¼-¾⅐-⅞]", lambda match: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("⁄"))),
        (r"\\[dtc]?frac\s*(\d)\s+(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"(?<![\d.,}/_^])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", _improper),
        (r"\\(?:mathrm|text(?:rm|it)?)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\[cd]?dots(?![A-Za-z])|\.\.\.|…", r"\\ldots"),
        (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
        ("°", r"^\\circ"),
        (rf"(\^\s*{_DEGREE})\s*[CF]\b", r"\1"),
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
    text = re.sub(r"\\?\$", " ", re.sub(r"\\boxed\s*(?=\{)", "", text)).strip()
    text = re.sub(r"^(?:\\[,;:! ]|\s)+|(?:\\[,;:! ]|\s)+$", "", text)
    text = re.sub(r"(?:[.,;\s]|\\\\)+$|(?<=\w)[.,;]\s*(?=\}$)", "", text)  # the end of a sentence or line
    text = re.sub(r"^\s*(?:\\approx|\\simeq|=)\s*", "", text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    number = r"[-+]?[\d.,/]*\d\s*(?:\\?%)?"
    text = re.sub(rf"\\text\s*\{{\s*({number})\s+([A-Za-z][A-Za-z ]*)\}}", r"\1\\text{ \2}", text)  # 5 apples
    text = re.sub(rf"\\(?:text|math)(?:rm|bf|it|sf|tt|normal)?\s*\{{\s*({number})\s*\}}", r"\1", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    return re.sub(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))", _repeating, text).strip()


def _repeating(match: re.Match[str]) -> str:
    whole, start, period = match[1], match[2], match[3] or match[4]
    bottom = (10 ** len(period) - 1) * 10 ** len(start)
    top = int(whole + start + period) - int((whole + start) or "0")
    return rf"\frac{{{top}}}{{{bottom}}}"


def squash(text: str) -> str:
    """Text without what carries no meaning: spacing (but not between digits), display sizes."""
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", text))


def last_group(pattern: re.Pattern[str], text: str) -> str | None:
    """Group 1 of the last match, without the spaces around it; None without a match, or if the group is not in it."""
    answer = None
    for match in pattern.finditer(text):
        answer = match[1]
    return None if answer is None else answer.strip()
