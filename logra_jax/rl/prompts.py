"""Prompts: a file or a mixture of tasks in, left-padded token ids out; their order needs no state but a count."""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from logra_jax.errors import UserError
from logra_jax.rl.layouts import number_text
from logra_jax.rl.tasks import is_mixture, make_rows

WIDTH_MULTIPLE = 8
LOOKED_AT = 1000  # prompts whose tokens are turned back into text, to see whether anything is lost
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # one of the two that stand for a character beyond 16 bits
# Columns, and keys of a message's parts, that belong to the prompt in data sets for multimodal models.
MEDIA = ("image", "images", "image_url", "video", "videos", "video_url", "audio", "audios")


@dataclass(frozen=True)
class PromptSet:
    """Tokenized prompts.

    ids: int32 [N], 0-based number of the row among the file's rows (blank lines not counted): the prompt's
        name in sampling keys, so dropping one prompt does not change the noise of the others.
    tokens: int32 [N, P], LEFT-padded; which entries are real follows from `lengths` alone.
    lengths: int32 [N].
    texts: the text behind the tokens (template included), one per prompt.
    columns: every column of the file, for the kept rows; None where a row lacks a column that was not asked
        for.
    read, dropped, truncated: rows in the file, rows left out and rows shortened for their length.
    unread: characters of the texts that the tokenizer has no tokens for, and leaves out or replaces.
    """

    ids: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    texts: list[str]
    columns: dict[str, list[Any]]
    read: int
    dropped: int
    truncated: int
    unread: str = ""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Sequence[int] | np.ndarray) -> "PromptSet":
        """The prompts at these positions (0 <= row < N), in this order; the counts are the whole file's."""
        index = [int(row) for row in rows]
        return PromptSet(
            ids=self.ids[index],
            tokens=self.tokens[index],
            lengths=self.lengths[index],
            texts=[self.texts[i] for i in index],
            columns={name: [values[i] for i in index] for name, values in self.columns.items()},
            read=self.read,
            dropped=self.dropped,
            truncated=self.truncated,
        )


class PromptOrder:
    """Which prompt comes when: every epoch a new permutation of the rows, without end.

    A pure function of (n_rows, seed, number of prompts consumed before), so resuming needs that count alone.
    """

    def __init__(self, n_rows: int, seed: int):
        """n_rows >= 1; seed >= 0."""
        if n_rows < 1:
            raise UserError("the prompt order needs at least one prompt")
        import grain

        # range() is the whole, already materialised split: a slice after shuffle() would leak rows on repeat.
        self._rows = grain.MapDataset.range(n_rows).seed(seed).shuffle().repeat()

    def rows(self, start: int, size: int) -> np.ndarray:
        """Entries start .. start + size - 1 of the endless sequence: int32 [size]. May straddle epochs."""
        return np.array([self._rows[i] for i in range(start, start + size)], dtype=np.int32).reshape(size)


def check_columns(path: str | Path, wanted: Mapping[str, str | None], *, held_out: bool = False) -> list[str]:
    """The columns of a prompt file, read from its first row (JSONL) or its schema (Parquet): cheap.

    A mixture of tasks is checked and made, which takes longer. held_out: see `load_prompts`.

    wanted: column names by the setting of data.* that gives them, None where it gives none.

    Raises UserError when a wanted column is absent, naming it, its setting and the columns found.
    """
    path = _existing(path)
    if _is_parquet(path):
        found = list(_parquet(path, "read_schema").names)
    else:
        first = next(read_rows(path, held_out=held_out), None)
        if first is None:
            raise UserError(f"{path} holds no rows")
        found = list(first[1])
    for setting, name in wanted.items():
        if name is not None and name not in found:
            raise UserError(
                f"{path} has no column {name!r}; it has {', '.join(found) or 'none'}. Set data.{setting} to one of them"
                f"{'' if setting == 'prompt_column' else ', or to null if there is none'}"
            )
    return found


def require_rows(prompt_set: PromptSet, needed: int) -> None:
    """Raises UserError, naming both numbers, when the set holds fewer prompts than one batch needs."""
    if len(prompt_set) < needed:
        raise UserError(
            f"{len(prompt_set)} prompts are left of {prompt_set.read} rows, but one batch takes {needed}; "
            "lower rollout.prompts or give more data"
        )


def load_prompts(
    path: str | Path,
    tokenizer: Any,
    *,
    prompt_column: str,
    answer_column: str | None,
    template: Literal["chat", "plain"] = "chat",
    enable_thinking: bool | None = None,
    prompt_format: str = "{prompt}",
    system: str | None = None,
    max_prompt_length: int,
    overlong: Literal["drop", "truncate"] = "drop",
    vocab_size: int,
    held_out: bool = False,
) -> PromptSet:
    """Reads, formats and tokenizes a prompt file (`.parquet`, `.yaml`, anything else is JSONL in UTF-8).

    A YAML file is a mixture of tasks (`rl.tasks`); held_out says which part of it to take.

    The prompt column holds a string, put into `prompt_format` at `{prompt}`, or (template "chat" only) a list
    of chat messages, taken as it is. Images, videos and sounds, in a message or a column beside it, are refused.
    "chat" renders the tokenizer's chat template with the generation prompt, after a `system` message if one is
    given and the row brings none; enable_thinking is passed on to the template, which must know it, unless None.
    "plain" tokenizes the text with the tokenizer's own special tokens in front.
    The answer column must hold a string or a finite number (kept as its text) in every row; None means that no
    column is checked.

    Prompts longer than max_prompt_length tokens are left out ("drop") or keep their last max_prompt_length
    tokens ("truncate"); both are counted. The padded width P is the longest kept prompt rounded up to a
    multiple of 8, at most max_prompt_length. Ids must lie below vocab_size, the number of embedding rows of
    the model.

    Raises UserError, with file and line (or row, for Parquet), for anything wrong with the file.
    """
    path = _existing(path)
    if "{prompt}" not in prompt_format:
        raise UserError(f"data.prompt_format {prompt_format!r} has no {{prompt}} in it")
    if max_prompt_length < 1:
        raise UserError(f"data.max_prompt_length must be at least 1, not {max_prompt_length}")
    check_columns(path, {"prompt_column": prompt_column, "answer_column": answer_column}, held_out=held_out)
    encode = _encode_plain
    if template == "chat":
        encode = partial(_encode_chat, options=_template_options(tokenizer, enable_thinking))

    ids, tokens, texts, kept = [], [], [], []
    truncated, read, unread = 0, 0, set[str]()
    for place, row in read_rows(path, held_out=held_out):
        number, read = read, read + 1
        _check_row(place, row, prompt_column, answer_column)
        if answer_column is not None:
            row = {**row, answer_column: _answer(place, answer_column, row[answer_column])}
        text, encoded = encode(tokenizer, place, row[prompt_column], prompt_format, system)
        if not encoded:
            raise UserError(f"{place}: the tokenizer has no token for anything in this prompt")
        if read <= LOOKED_AT:
            unread |= set(text) - set(tokenizer.decode(encoded))
        if max(encoded) >= vocab_size or min(encoded) < 0:
            raise UserError(
                f"{place}: the tokenizer gives id {max(encoded)}, but the model has {vocab_size} rows; "
                "the tokenizer does not belong to this model"
            )
        if len(encoded) > max_prompt_length:
            if overlong == "drop":
                continue
            encoded = encoded[-max_prompt_length:]
            text = tokenizer.decode(encoded)
            truncated += 1
        ids.append(number)
        tokens.append(encoded)
        texts.append(text)
        kept.append(row)

    if read == 0:
        raise UserError(f"{path} holds no rows")
    dropped = read - len(kept)
    if not kept:
        raise UserError(
            f"{path}: {dropped} of {read} prompts are longer than data.max_prompt_length = "
            f"{max_prompt_length} tokens and none is left; raise the limit or set data.overlong: truncate"
        )
    lengths = np.array([len(row_tokens) for row_tokens in tokens], dtype=np.int32)
    return PromptSet(
        ids=np.array(ids, dtype=np.int32),
        tokens=_left_pad(tokens, max_prompt_length, tokenizer.pad_token_id),
        lengths=lengths,
        texts=texts,
        columns={name: [row.get(name) for row in kept] for name in _names(kept)},
        read=read,
        dropped=dropped,
        truncated=truncated,
        unread="".join(sorted(c for c in unread if not c.isspace())),
    )


def _left_pad(tokens: list[list[int]], max_prompt_length: int, pad_id: int | None) -> np.ndarray:
    longest = max(len(row) for row in tokens)
    width = min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, max_prompt_length)
    padded = np.full((len(tokens), width), 0 if pad_id is None else pad_id, dtype=np.int32)
    for i, row in enumerate(tokens):
        padded[i, width - len(row) :] = row
    return padded


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _check_row(place: str, row: dict[str, Any], prompt_column: str, answer_column: str | None) -> None:
    for name in (prompt_column, answer_column):
        if name is not None and name not in row:
            raise UserError(f"{place}: no column {name!r}; the row has {', '.join(row) or 'none'}")
    for name in MEDIA:
        if row.get(name) and name not in (prompt_column, answer_column):
            raise UserError(f"{place}: column {name!r} is not empty, but only text is supported; leave such rows out")


def _answer(place: str, column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{place}: column {column!r} is {kind}; a text or a finite number is needed")
    return number_text(value)


def _encode_plain(
    tokenizer: Any, place: str, prompt: Any, prompt_format: str, system: str | None
) -> tuple[str, list[int]]:
    if not isinstance(prompt, str):
        raise UserError(f"{place}: data.template=plain needs a text as the prompt, not a {type(prompt).__name__}")
    text = prompt_format.replace("{prompt}", prompt)
    if system is not None:
        text = f"{system}\n{text}"
    ids = list(tokenizer(text)["input_ids"])
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids[-1:] == [tokenizer.eos_token_id] and ids[-1:] != bare[-1:]:
        ids.pop()  # a prompt closed by its end token would ask the model to go on after the end
    return text, ids


def _template_options(tokenizer: Any, enable_thinking: bool | None) -> dict[str, Any]:
    """What the chat template is given beside the messages."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; set data.template=plain")
    if enable_thinking is None:
        return {}
    if "enable_thinking" not in str(tokenizer.chat_template):
        raise UserError(
            f"data.enable_thinking={str(enable_thinking).lower()} has no effect: the model's chat template has no such "
            "switch. Leave it out"
        )
    return {"enable_thinking": enable_thinking}


def _encode_chat(
    tokenizer: Any, place: str, prompt: Any, prompt_format: str, system: str | None, options: dict[str, Any]
) -> tuple[str, list[int]]:
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt_format.replace("{prompt}", prompt)}]
    else:
        messages = _messages(place, prompt)
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    except Exception as error:
        # Templates raise whatever they like (TemplateError, TypeError ..) for roles that they do not know.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{place}: the chat template refuses this prompt: {reason}") from error
    return text, list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _messages(place: str, prompt: Any) -> list[dict[str, Any]]:
    messages = list(prompt) if isinstance(prompt, list | tuple) else []
    if not messages or not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages):
        raise UserError(f"{place}: the prompt must be a text or a list of messages with role and content")
    for part in (part for message in messages if isinstance(message["content"], list) for part in message["content"]):
        given = part if isinstance(part, dict) else {}
        kind = given.get("type") or next((key for key in MEDIA if given.get(key)), "text")
        if kind != "text":
            raise UserError(f"{place}: the prompt holds a part of type {kind!r}, but only text is supported")
    return messages


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no prompt file at {path}")
    return path


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


@contextlib.contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    """What pyarrow says of a damaged file, when it is opened or on the way, as a UserError."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).splitlines()[0]}") from error


def _parquet(path: Path, part: Literal["read_schema", "ParquetFile"]) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading Parquet needs pyarrow: pip install pyarrow, or the extra [parquet]") from None
    with _parquet_errors(path):
        return getattr(pyarrow.parquet, part)(path)


def read_rows(path: Path, *, held_out: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for messages, row), one row at a time, of a file of any kind. Raises UserError."""
    if is_mixture(path):
        rows: Iterable[dict[str, Any]] = make_rows(path, held_out=held_out)
    elif _is_parquet(path):
        rows = _parquet_rows(path)
    else:
        yield from _jsonl_rows(path)
        return
    for number, row in enumerate(rows, start=1):
        yield f"{path}: row {number}", row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    file = _parquet(path, "ParquetFile")
    with _parquet_errors(path):
        for batch in file.iter_batches(1024):
            yield from batch.to_pylist()


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines end at \\n only (a text may hold other line separators); \\r, a BOM and blank lines are skipped.

    Messages name file and line, blank lines counted, and never repeat the row: it may be huge or private.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}: line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not UTF-8 text (byte {error.start} of the line)") from None
            if not text:
                continue
            row = parse(place, text)
            if not isinstance(row, dict):
                raise UserError(f"{place}: expected a JSON object, found a {type(row).__name__}")
            yield place, row


def parse(place: str, text: str) -> Any:
    """What a JSON text says. Raises UserError, also for half of a surrogate pair, which no tokenizer or file takes."""
    try:
        found = json.loads(text)
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not usable JSON: {type(error).__name__}") from None
    return found
