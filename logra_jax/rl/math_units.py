r"""What an answer counts or is measured in, and may leave out: \text{ cm}^2, \mathrm{m/s}, apples, km."""

import re

# Words that say more than what is counted: with one of them, a text is no unit.
_SAYS_MORE = re.compile(
    r"(?i)\b(?:and|or|not|no|if|when|where|for|to|is|from|between|than|more|less|most|least|over|under|above|below|about|"
    r"by|up|off|but|then|also|only|wait|never|maybe|perhaps|except|unless|until|through|versus|vs|either|neither|both|wrong|"
    r"false|incorrect\w*|otherwise|alternatively|greater|fewer|"
    r"doz|dozen|score|gross|pairs?|couple|twice|half|thirds?|quarters?|(?:fif|six|seven|eigh|nin|ten|twelf|hundred)ths?|"
    r"thousandths?|hundreds?|thousands?|mil|bn|mn|lakhs?|crores?|\w+illion\w*|"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty|sixty|seventy|eighty|"
    r"ninety|zero|\w+teen)s?|"
    r"times|squared|cubed|plus|minus|negative|factorial|root|power|(?:doubl|tripl|multipli|divid)\w*|mod|modulo|rem|"
    r"remainder|base|binary|octal|hex|pi|sin|cos|tan|ln|log|sqrt|alpha|beta|gamma|theta|infinity|[ap]\.? ?m)\b"
)
_NAMES = "mm cm dm km mi ft in yd mg kg lb lbs oz ml mL dl min mins sec secs hr hrs mph kph kmh Hz sq cu deg rad cc gal"
_KNOWN = {*_NAMES.split(), *["kWh", "mol", "Pa", "rpm", "st", "nd", "rd", "th"]}
_ONE_LETTER = "mgslLhNJWVAKCFT"  # that are units; the others are variables in any font
_GAP = r"(?:\s|\\[,;:! ])*"
_POWER = rf"(?:{_GAP}\^\s*(?:\{{-?\d\}}|\d))?"
_TEXT = rf"\\(?:text(?:rm|normal)?|mbox|mathrm)\s*\{{(?:[A-Za-z\s./'²³-]|\^\d|\^\{{-?\d\}})*\}}{_POWER}"
_TEXTS = re.compile(rf"(?<=[\w)}}\]%]){_GAP}{_TEXT}(?:{_GAP}(?:/|\\cdot|\\times)?{_GAP}{_TEXT})*")
_GOES_ON = re.compile(
    rf"{_GAP}(?:[\w(]|\\(?:[dtc]?frac|sqrt|left|pi)(?![A-Za-z]))"
)  # after a unit: no end of a quantity
_CHOICE = re.compile(r"\(?[A-Z]\)?\s*")
# Outside of \text{}, where letters are variables: a plain number, then words of the language or names of units.
_NUMBER = r"[-+]?[\d.,]*\d|[-+]?\\[dtc]?frac\{\d+\}\{\d+\}"
_NAME = rf"(?:{'|'.join(_NAMES.split())}|[A-Za-z]{{4,}})"
_BARE = re.compile(
    rf"({_NUMBER})\s*(?:{_NAME}(?:\s+[A-Za-z]{{2,}})*|(?<=\s)[mgslLh]){_POWER}(?:\s*/\s*(?:{_NAME}|[mgslLh]){_POWER})?\.?"
)


def without_units(text: str) -> str:
    """The text without units, if it adds up no different ones. One between two numbers, 2 hours 30 minutes, stays."""
    found = [match for match in _TEXTS.finditer(text) if _is_unit(match)]
    if len({re.sub(r"\s", "", match[0]) for match in found}) < 2 or not re.search(r".[-+]", text):
        for match in reversed(found):
            text = f"{text[: match.start()]} {text[match.end() :]}"
    text = text.strip()
    bare = _BARE.fullmatch(text)
    return text if bare is None or _SAYS_MORE.search(text) else bare[1]


def _is_unit(match: re.Match[str]) -> bool:
    """Whether it has words that are units, stands after a quantity, and ends it."""
    before, unit = match.string[: match.start()], match[0]
    plain = re.sub(r"\\[a-z]+", "", unit)
    words = re.findall("[A-Za-z]+", plain)
    if not words:
        return re.search(r"[\^²³/'-]", unit) is None
    if _SAYS_MORE.search(unit) or _GOES_ON.match(match.string, match.end()):
        return False
    if not re.search(r"\d", before) and (
        before.lstrip("( ").startswith("\\text") or _CHOICE.fullmatch(before) or len(words[0]) == 1
    ):
        return False  # a word, the letter of a choice, or factors
    if re.search(r"_\{?$|\\(?!(?:pi|circ)$)[A-Za-z]+$", before):
        return False  # an index, or what a command is given
    apart = re.search(r"[^A-Za-z]*[\s,;:!][^A-Za-z]*$", plain[: plain.index(words[0])]) is not None
    long = len(words[0]) > 3 or words[0] in _KNOWN or words[0] in _ONE_LETTER or (apart and len(words[0]) > 1)
    return long and all(len(word) > 1 or word in _ONE_LETTER or word == "a" for word in words[1:])
