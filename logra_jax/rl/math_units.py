r"""What an answer counts or is measured in, and may leave out: \text{ cm}^2, \mathrm{m/s}, apples, km."""

import re

# Words that say more than what is counted: with one of them, a text is no unit.
_SAYS_MORE = re.compile(
    r"(?i)\b(?:and|or|not|no|if|when|where|for|to|is|from|between|than|more|less|most|least|over|under|above|below|about|"
    r"wrong|dozen|pairs?|half|thirds?|quarters?|hundreds?|thousands?|millions?|billions?|trillions?|times|squared|cubed|"
    r"plus|minus|negative|mod|base|[ap]\.? ?m)\b"
)
_ONE_LETTER = "mgslLhNJWVAKCFT"  # that are units; the others are variables in any font
_GAP = r"(?:\s|\\[,;:! ])*"
_POWER = rf"(?:{_GAP}\^\s*(?:\{{-?\d\}}|\d))?"
_TEXT = rf"\\(?:text(?:rm|normal)?|mbox|mathrm)\s*\{{[A-Za-z\s./'²³-]*\}}{_POWER}"
_TEXTS = re.compile(rf"(?<=[\w)}}\]%]){_GAP}{_TEXT}(?:{_GAP}(?:/|\\cdot|\\times)?{_GAP}{_TEXT})*")
# Outside of \text{}, where letters are variables: a plain number, then words of the language or names of units.
_NUMBER = r"[-+]?[\d.,]*\d|[-+]?\\[dtc]?frac\{\d+\}\{\d+\}"
_NAMES = "mm cm dm km mi ft in yd mg kg lb lbs oz ml mL dl min mins sec secs hr hrs mph kph kmh Hz sq cu deg rad cc gal"
_NAME = rf"(?:{'|'.join(_NAMES.split())}|[A-Za-z]{{4,}})"
_BARE = re.compile(
    rf"({_NUMBER})\s*(?:{_NAME}(?:\s+{_NAME})*|(?<=\s)[mgslLh]){_POWER}(?:\s*/\s*(?:{_NAME}|[mgslLh]){_POWER})?\.?"
)


def without_units(text: str) -> str:
    """The text without units. What is left of two quantities in a row, 2 hours 30 minutes, is two numbers in a row."""
    text = _TEXTS.sub(lambda match: " " if _is_unit(match[0]) else match[0], text).strip()
    bare = _BARE.fullmatch(text)
    return text if bare is None or _SAYS_MORE.search(text) else bare[1]


def _is_unit(text: str) -> bool:
    words = re.findall("[A-Za-z]+", re.sub(r"\\[a-z]+", "", text))
    letters = [word for word in words if len(word) == 1 and not (word == "a" and len(words) > 1)]
    return _SAYS_MORE.search(text) is None and all(letter in _ONE_LETTER for letter in letters)
