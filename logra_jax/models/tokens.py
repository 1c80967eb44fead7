"""End-of-text and padding ids of a model folder, gathered from every file that may name them. Free of jax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logra_jax.errors import UserError


def end_and_pad_ids(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """`(end ids, pad id)` of a folder whose config.json is `config`.

    The end ids are the union of `eos_token_id` in config.json and generation_config.json (a number or a list)
    and the tokenizer's `eos_token`, ascending; empty if none of them names one. The pad id is the first named
    by config.json, generation_config.json or the tokenizer, else the first end id, else 0: masks come from
    lengths, so its value never matters. Raises UserError for an id that is no number.
    """
    if isinstance(text := config.get("text_config"), dict):  # of a multimodal model, whose text is all that is sampled
        config = {**config, **text}
    sources: list[tuple[str, Mapping[str, Any]]] = [("config.json", config)]
    if generation := _optional_json(folder / "generation_config.json"):
        sources.append(("generation_config.json", generation))
    ends: set[int] = set()
    pads: list[int] = []
    for name, content in sources:
        ends.update(_ids(folder / name, "eos_token_id", content))
        pads += _ids(folder / name, "pad_token_id", content)
    if tokenizer := _optional_json(folder / "tokenizer_config.json"):
        vocabulary = _vocabulary(folder)
        ends.update(_token(tokenizer, "eos_token", vocabulary))
        pads += _token(tokenizer, "pad_token", vocabulary)
    ordered = tuple(sorted(ends))
    return ordered, next(iter([*pads, *ordered, 0]))


def _optional_json(path: Path) -> Mapping[str, Any]:
    """The content of a side file that a model folder may do without, or an empty mapping."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; fetch it again")
    return content


def _ids(path: Path, key: str, content: Mapping[str, Any]) -> list[int]:
    value = content.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
        raise UserError(f"{path}: {key} is {value!r}, expected a token id or a list of them")
    return values


def _token(tokenizer: Mapping[str, Any], key: str, vocabulary: Mapping[str, int]) -> list[int]:
    """The id of a special token, given as text or as a record with `content`, where the tokenizer has it."""
    token = tokenizer.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    return [vocabulary[text]] if isinstance(text, str) and text in vocabulary else []


def _vocabulary(folder: Path) -> dict[str, int]:
    tokenizer = _optional_json(folder / "tokenizer.json")
    model = tokenizer.get("model")
    plain = model.get("vocab") if isinstance(model, dict) else None
    vocabulary = dict(plain) if isinstance(plain, dict) else {}
    return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
