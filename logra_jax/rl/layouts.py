r"""Published layouts of questions with answers, as rows for the trainer.

gsm8k   question, answer: a worked answer that ends in `#### 18`, with marks of a calculator, `<<16-3=13>>`
math    problem, solution with the answer in its last \boxed{}, or answer; level, subject or type, unique_id
dapo    prompt: a list of messages (or a text), reward_model.ground_truth (or answer, solution), extra_info.index,
        where that is a text, as the id; GSM8K as prepared for other trainers, too
plain   any columns, by their names; `reward_model.ground_truth` reaches into a column
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from logra_jax.errors import UserError
from logra_jax.rl.math_text import last_box

# What DAPO-Math and others put around a problem: they ask for "Answer: ..." where the maths grader looks for a box.
_DAPO_HEAD = re.compile(r"\s*Solve the following math problem step by step\.[^\n]*\n\n")
_DAPO_TAIL = re.compile(
    r"\n\nRemember to put your answer on its own line after \"Answer:\"\.?\s*\Z"
    r"| Let's think step by step and output the final answer after \"####\"\.\s*\Z"  # of GSM8K in the same columns
)
_RAISED = re.compile("<(?:super|sub|fraction)>")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class Unusable(Exception):
    """A row that cannot be used; the text says why."""


@dataclass(frozen=True)
class Question:
    """prompt: a text or chat messages. id: the file's own, if it has one. more: columns to keep besides."""

    prompt: Any
    answer: str
    id: str | None
    more: dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """Names of columns of the plain layout, and how the answer stands in its column."""

    prompt: str = "prompt"
    answer: str = "answer"
    id: str | None = None
    extract: Literal["none", "hash", "boxed"] = "none"


def _prompt(row: Mapping[str, Any], name: str) -> Any:
    found = look_up(row, name)
    found = found.strip() if isinstance(found, str) else found
    messages = isinstance(found, list) and all(isinstance(part, dict) and part.get("content") for part in found)
    if not found or not (isinstance(found, str) or messages):
        raise Unusable(f"no text or messages in column {name}")
    return found


def _answer(row: Mapping[str, Any], *names: str) -> str:
    """The first of these columns that is there: a text, or a number as its text."""
    found = next((value for name in names if (value := look_up(row, name)) not in (None, "")), None)
    if isinstance(found, bool | list | dict | None) or (isinstance(found, float) and not math.isfinite(found)):
        raise Unusable(f"no text or number in column {' or '.join(names)}")
    return number_text(found) if isinstance(found, int | float) else str(found)


def number_text(number: int | float) -> str:
    """A number as people write it: the short form of Python, 5e-05, reads as 5 e - 5 in mathematics."""
    return format(Decimal(repr(number)), "f")


def _gsm8k(row: Mapping[str, Any]) -> Question:
    return Question(_prompt(row, "question"), after_hashes(look_up(row, "answer")), None, {})


def _math(row: Mapping[str, Any]) -> Question:
    answer = in_last_box(row.get("solution")) if row.get("answer") in (None, "") else _answer(row, "answer")
    more = {"level": row.get("level"), "subject": row.get("subject", row.get("type"))}
    return Question(_prompt(row, "problem"), answer, _id(row.get("unique_id")), _present(more))


def _dapo(row: Mapping[str, Any]) -> Question:
    prompt = _prompt(row, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("content")
    bare = lambda text: _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", text, count=1)).strip()
    if isinstance(prompt, str):
        prompt = bare(prompt)
    elif isinstance(prompt, list):
        asks = lambda message: message.get("role") == "user" and isinstance(message["content"], str)
        prompt = [{**message, "content": bare(message["content"])} if asks(message) else message for message in prompt]
    answer = _answer(row, "reward_model.ground_truth", "answer", "solution")
    index = look_up(row, "extra_info.index")  # where it is a number, files count each for itself
    return Question(prompt, answer, index if isinstance(index, str) else None, {})


def _plain(columns: Columns) -> Callable[[Mapping[str, Any]], Question]:
    take = {"none": lambda value: value, "hash": after_hashes, "boxed": in_last_box}[columns.extract]

    def convert(row: Mapping[str, Any]) -> Question:
        answer = _answer(row, columns.answer)
        id_ = None if columns.id is None else _id(look_up(row, columns.id))
        return Question(_prompt(row, columns.prompt), take(answer), id_, {})

    return convert


LAYOUTS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Question]]] = {
    "gsm8k": (("question", "answer"), _gsm8k),
    "math": (("problem", "solution|answer"), _math),
    "dapo": (("prompt", "reward_model|solution"), _dapo),
}


def choose(
    place: str, found: Iterable[str], wanted: str | None, columns: Columns
) -> tuple[str, Callable[[Mapping[str, Any]], Question]]:
    """Name and converter of a file's layout: the wanted one, else the one that its columns fit, first those named.

    Raises UserError, with the columns found and the layout that fits, if there is none, or another one.
    """
    found = list(found)
    needs = {name: need for name, (need, _) in LAYOUTS.items()}
    named = (columns.prompt, columns.answer, *([] if columns.id is None else [columns.id]))
    needs["plain"] = tuple(name if name in found else name.split(".")[0] for name in named)
    fitting = [name for name, need in needs.items() if all(set(part.split("|")) & set(found) for part in need)]
    if wanted in fitting or (wanted is None and fitting):
        name = wanted or (fitting[-1] if columns != Columns() else fitting[0])
        return name, _plain(columns) if name == "plain" else LAYOUTS[name][1]
    missing = f"is not of the layout {wanted} ({', '.join(needs[wanted])})" if wanted else "is of no known layout"
    fits = f"that of {' and '.join(fitting)}: leave --layout out" if fitting else (
        "none that is known: name its columns by --prompt-column, --answer-column and --id-column"
    )  # fmt: skip
    raise UserError(f"{place}: {missing}. It has the columns {', '.join(found) or 'none'}, which fit {fits}")


def look_up(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a key within one (`reward_model.ground_truth`); None where it is missing."""
    found: Any = row
    for part in [name] if name in row else name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def after_hashes(text: Any) -> str:
    """What follows the last `####`, without the calculator's marks and separators of thousands."""
    _, hashes, answer = _CALCULATOR.sub("", str(text)).rpartition("####")
    if not hashes:
        raise Unusable("no #### in the answer")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer.strip())


def in_last_box(text: Any) -> str:
    r"""The content of the last \boxed{}, or \fbox{}, or of a \boxed without braces around a number or letter."""
    text = re.sub(r"\\fbox(?=\s*\{)", r"\\boxed", str(text or ""))
    text = re.sub(r"\\boxed\s*(\d+|[A-Za-z])(?=\.?\s*(?:\$|\\[\])]|\Z))", r"\\boxed{\1}", text)
    answer = last_box(text)
    if answer is None or not re.match(r"\\boxed\s*\{", text[text.rfind("\\boxed") :]):
        raise Unusable("no complete \\boxed{} in the solution")
    return answer.strip()


def normal(prompt: Any) -> str:
    """A prompt's text without what makes no other question of it: case, spacing, dollars, sizes, closing points."""
    if isinstance(prompt, list):
        asked = [message for message in prompt if isinstance(message, dict) and message.get("role") != "system"]
        prompt = "\n".join(str(message.get("content")) for message in asked)
    # Compatible characters are one, but for 2² and 22, and 1½ and 11/2.
    composed = unicodedata.normalize("NFC", str(prompt))
    text = "".join(
        c if _RAISED.match(unicodedata.decomposition(c)) else unicodedata.normalize("NFKC", c) for c in composed
    )
    text = text.casefold()
    text = re.sub(r"\\(?:(?:left|right|displaystyle|textstyle)(?![a-z])|[,;:!])|\$", "", text)
    text = re.sub(r"(?:\\q?quad(?![a-z])|\\ |~|\s)+", " ", text)
    text = re.sub(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![.,]?\d)", lambda number: number[0].replace(" ", ""), text)
    text = re.sub(r"(?<!\d) | (?!\d)", "", text)  # 1 23 is not 12 3
    return re.sub(r"\\[dtc]frac", r"\\frac", text).rstrip(".?")  # 5! is not 5


def _id(value: Any) -> str | None:
    return None if value is None else str(value)


def _present(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if value is not None}
