"""Tokenizers from local model folders; transformers is imported lazily and without a word about torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logra_jax.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def load_tokenizer(folder: str | Path) -> Any:
    """The Hugging Face tokenizer of a local model folder, with its chat template; no network.

    Raises UserError when the folder or its tokenizer files are missing or unreadable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no model folder at {folder}; give the path of a Hugging Face model folder")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
            "copy the tokenizer files of the model into it"
        )
    # Without torch, transformers advises on import that models are unavailable; they are not wanted here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # transformers raises anything from OSError to KeyError on damaged files; its last line names the
        # cause.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot read the tokenizer in {folder}: {reason}") from error


def decode(tokenizer: Any, ids: Sequence[int] | np.ndarray) -> str:
    """Text of token ids for rewards and logs: special tokens dropped, ids without an entry ignored.

    A model may have more rows than the tokenizer has entries; such ids (and negative ones) have no text.
    """
    kept = [int(i) for i in ids if int(i) >= 0]
    return tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
