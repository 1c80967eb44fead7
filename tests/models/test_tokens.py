"""End and padding ids from config, generation config and tokenizer together."""

import json

import pytest

from logra_jax.errors import UserError
from logra_jax.models.tokens import end_and_pad_ids


def folder_with(path, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


TOKENIZER = {"model": {"vocab": {"a": 3, "</s>": 4}}, "added_tokens": [{"id": 9, "content": "<|im_end|>"}]}


@pytest.mark.parametrize(
    ("config", "files", "ends", "pad"),
    [
        ({"eos_token_id": 5}, {}, (5,), 5),
        ({"eos_token_id": [7, 5], "pad_token_id": 1}, {}, (5, 7), 1),
        ({"eos_token_id": 5}, {"generation_config": {"eos_token_id": [6, 5], "pad_token_id": 2}}, (5, 6), 2),
        (
            {"eos_token_id": 5, "pad_token_id": None},
            {"tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "a"}},
            (5, 9),
            3,
        ),
        ({}, {"tokenizer": TOKENIZER, "tokenizer_config": {"eos_token": {"content": "</s>"}}}, (4,), 4),
        ({"eos_token_id": 5}, {"tokenizer_config": {"eos_token": "<|im_end|>"}}, (5,), 5),
        ({}, {}, (), 0),
    ],
)
def test_all_sources_are_united(tmp_path, config, files, ends, pad):
    assert end_and_pad_ids(folder_with(tmp_path, **files), config) == (ends, pad)


@pytest.mark.parametrize("value", ["2", 1.5, True, [1, None], -1])
def test_an_id_that_is_no_number_is_refused(tmp_path, value):
    with pytest.raises(UserError, match=r"config.json: eos_token_id is"):
        end_and_pad_ids(tmp_path, {"eos_token_id": value})


def test_a_broken_side_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config.json is not valid JSON"):
        end_and_pad_ids(tmp_path, {})


@pytest.mark.parametrize(("name", "ends", "pad"), [("tiny-qwen2-tied", (308, 310), 308), ("tiny-llama", (0, 2), 0)])
def test_a_loaded_model_carries_them(load_checkpoint, name, ends, pad):
    model = load_checkpoint(name).model
    assert (model.end_ids, model.pad_id) == (ends, pad)
