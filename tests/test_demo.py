"""The packaged demo: its files agree with each other, with arithmetic, and with the script that made them."""

import importlib.resources
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from logra_jax.models import load_hf

ROOT = Path(__file__).resolve().parents[1]
DEMO = Path(str(importlib.resources.files("logra_jax"))) / "demo"
WORKED = "8*6=48,8*6+4=52,5*6+5=35#3528"


def rows(name):
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines()]


def operands(row):
    match = re.fullmatch(r"([1-9]\d\d)\*([1-9])=", row["prompt"])
    assert match, row
    return int(match[1]), int(match[2])


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "scripts" / "make_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_in_the_package():
    model = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {path.name for path in (DEMO / "model").iterdir()} == model
    assert {path.name for path in DEMO.iterdir()} >= {"demo.yaml", "train.jsonl", "heldout.jsonl", "model"}
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 6e6
    link = ROOT / "configs" / "demo.yaml"
    assert link.is_symlink()
    assert link.resolve() == (DEMO / "demo.yaml").resolve()


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_answers_are_products(name):
    for row in rows(name):
        assert set(row) == {"prompt", "answer"}
        a, b = operands(row)
        # repeated addition, so that the product operator of the script is not asked twice
        assert row["answer"] == str(sum(a for _ in range(b)))


def test_held_out_pairs_are_new():
    train = [operands(row) for row in rows("train.jsonl")]
    held_out = [operands(row) for row in rows("heldout.jsonl")]
    assert len(held_out) == len(set(held_out)) == 460
    assert len(train) == len(set(train)) > 6000
    assert not set(train) & set(held_out)
    # a sample of the whole task, not a corner of it
    assert {b for _, b in held_out} == {b for _, b in train}
    assert abs(np.mean([a for a, _ in held_out]) - np.mean([a for a, _ in train])) < 50


def test_files_are_those_of_the_script(script):
    train, held_out, validation = script.pairs()
    assert [operands(row) for row in rows("train.jsonl")] == train
    assert [operands(row) for row in rows("heldout.jsonl")] == held_out
    assert len(validation) > 200
    assert not set(validation) & {*train, *held_out}
    kept_out = len(held_out) + len(validation)
    assert 0.08 < kept_out / (kept_out + len(train)) < 0.12


def test_script_writes_the_packaged_files(script, tmp_path):
    loaded = load_hf(DEMO / "model", compute_dtype="float32")
    config = dict(sorted(script.HF_CONFIG.items()))
    script.write_model(tmp_path / "model", config, *loaded[:2], script.tokenizer())
    script.write_rows(tmp_path, *script.pairs()[:2])
    for path in (path for path in DEMO.rglob("*.*") if path.suffix != ".yaml"):
        assert (tmp_path / path.relative_to(DEMO)).read_bytes() == path.read_bytes(), path


def test_worked_answers_are_right(script):
    assert script.worked(588, 6) == WORKED
    assert script.guess(588, 6) == "#3528"
    for row in rows("heldout.jsonl"):
        answer = script.worked(*operands(row))
        steps, _, final = answer.partition("#")
        assert final == row["answer"]
        for equation in steps.split(","):
            d, b, carry, value = re.fullmatch(r"(\d)\*(\d)(?:\+(\d))?=(\d+)", equation).groups()
            assert sum(int(d) for _ in range(int(b))) + int(carry or 0) == int(value)
        assert len(answer) + 1 <= script.MAX_NEW_TOKENS  # with the end token


@pytest.mark.parametrize(("way", "length"), [("worked", 6 + 29 + 1), ("guess", 6 + 5 + 1)])
def test_demonstrations_end_once_and_count_the_answer_only(script, way, length):
    tokens, answered = script.demonstrations(np.random.default_rng(3), script.pairs()[0], getattr(script, way), 64)
    assert tokens.shape == answered.shape == (64, length)
    for row, mask in zip(tokens, answered, strict=True):
        end = int(np.flatnonzero(row == 1)[0])
        assert (row[end + 1 :] == 0).all()
        assert (row[:end] > 1).all()
        np.testing.assert_array_equal(np.flatnonzero(mask), np.arange(6, end + 1))


@pytest.mark.parametrize("loader", [AutoTokenizer, PreTrainedTokenizerFast])
def test_tokenizer_round_trip(loader):
    tokenizer = loader.from_pretrained(DEMO / "model", local_files_only=True)
    assert len(tokenizer) == 17
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_tokens_to_ids(list("0123456789+*=,#")) == list(range(2, 17))
    text = "588*6=" + WORKED
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 1], skip_special_tokens=True) == text
    assert tokenizer.chat_template is None
    for row in rows("heldout.jsonl"):
        assert len(tokenizer(row["prompt"])["input_ids"]) == 6


def test_checkpoint_is_small_and_in_qwen2_layout():
    config = json.loads((DEMO / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 1
    tensors = load_file(DEMO / "model" / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].shape == (32, 128)
    assert tensors["model.layers.3.mlp.down_proj.weight"].shape == (128, 576)
    assert tensors["model.layers.0.self_attn.k_proj.bias"].shape == (64,)
    assert all(tensor.dtype == np.float32 for tensor in tensors.values())
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())
    # table; per layer q and o, k and v, their biases, three MLP matrices, two norms; the last norm
    per_layer = 2 * 128 * 128 + 2 * 128 * 64 + 128 + 2 * 64 + 3 * 128 * 576 + 2 * 128
    assert sum(tensor.size for tensor in tensors.values()) == 32 * 128 + 4 * per_layer + 128 == 1_087_616
