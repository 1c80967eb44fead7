"""Prompt files: what is read, what is refused and how it is said, padding, order."""

import json
import subprocess
import sys

import numpy as np
import pytest

from logra_jax.config import PACKAGED
from logra_jax.errors import UserError
from logra_jax.rl.prompts import PromptOrder, check_columns, load_prompts, read_rows, require_rows
from logra_jax.rl.tokenizer import decode, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(fixtures):
    return load_tokenizer(fixtures / "tiny-qwen3")


@pytest.fixture
def jsonl(tmp_path):
    def write(content, name="data.jsonl"):
        path = tmp_path / name
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return path

    return write


def rows(*pairs):
    return "".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in pairs)


def load(path, tokenizer, **changes):
    settings = {
        "prompt_column": "prompt",
        "answer_column": "answer",
        "template": "plain",
        "max_prompt_length": 64,
        "vocab_size": 320,
    }
    return load_prompts(path, tokenizer, **{**settings, **changes})


# reading


def test_ids_are_those_of_the_reference_tokenizer(jsonl, fixtures):
    """Texts and ids come from the reference files, written with torch's transformers."""
    for folder in sorted(path.parent for path in fixtures.glob("tiny-*/reference.npz")):
        tokenizer = load_tokenizer(folder)
        texts = json.loads((folder / "reference.json").read_text())["texts"]
        reference = np.load(folder / "reference.npz")
        prompts = load(jsonl(rows(*((t, "1") for t in texts))), tokenizer, max_prompt_length=256)
        for i in range(len(texts)):
            expected = reference["left_input_ids"][i][reference["left_attention_mask"][i] == 1]
            np.testing.assert_array_equal(prompts.tokens[i, -prompts.lengths[i] :], expected)


def test_rows_are_left_padded_and_carry_all_columns(jsonl, tokenizer):
    path = jsonl('{"prompt":"abc","answer":"1","level":3}\n{"prompt":"What is 3 * 14?","answer":42}\n')
    prompts = load(path, tokenizer)
    assert len(prompts) == 2
    assert prompts.tokens.dtype == prompts.lengths.dtype == prompts.ids.dtype == np.int32
    encoded = [tokenizer("abc")["input_ids"], tokenizer("What is 3 * 14?")["input_ids"]]
    assert prompts.lengths.tolist() == [len(e) for e in encoded]
    width = prompts.tokens.shape[1]
    assert width == -(-len(encoded[1]) // 8) * 8
    assert prompts.tokens[0].tolist() == [tokenizer.pad_token_id] * (width - len(encoded[0])) + encoded[0]
    assert prompts.texts == ["abc", "What is 3 * 14?"]
    assert prompts.columns == {
        "prompt": ["abc", "What is 3 * 14?"],
        "answer": ["1", "42"],
        "level": [3, None],
    }
    assert (prompts.read, prompts.dropped, prompts.truncated) == (2, 0, 0)
    taken = prompts.take(np.array([1, 1, 0]))
    assert taken.ids.tolist() == [1, 1, 0]
    assert taken.columns["answer"] == ["42", "42", "1"]
    np.testing.assert_array_equal(taken.tokens, prompts.tokens[[1, 1, 0]])


def test_chat_template_with_generation_prompt_and_system(jsonl, tokenizer):
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = jsonl(rows(("2+2", "4"), (messages, "x")))
    prompts = load(path, tokenizer, template="chat", system="be brief", prompt_format="Solve: {prompt} {}")
    assert prompts.texts == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nSolve: 2+2 {}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>system\nown<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    ]
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert prompts.tokens[0].tolist().count(special) == 3  # one token each, not spelled out
    np.testing.assert_array_equal(
        prompts.tokens[1, -prompts.lengths[1] :],
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
    )


def test_a_thinking_switch_reaches_the_template_that_has_one(jsonl, fixtures):
    path, tokenizer = jsonl(rows(("hi", "x"))), load_tokenizer(fixtures / "tiny-qwen3")
    tokenizer.chat_template = (
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}[no]{% endif %}"
    )
    for value, text in ((None, "hi"), (True, "hi"), (False, "hi[no]")):
        assert load(path, tokenizer, template="chat", enable_thinking=value).texts == [text]
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(UserError, match=r"data\.enable_thinking=false has no effect"):
        load(path, tokenizer, template="chat", enable_thinking=False)


def test_blank_lines_crlf_bom_and_line_separators_inside_texts(jsonl, tokenizer):
    odd = "caf\u00e9 \u2028 \u0085 π"
    content = "\ufeff" + json.dumps({"prompt": odd, "answer": "1"}, ensure_ascii=False)
    content += '\r\n\r\n  \r\n{"prompt":"b","prompt":"c","answer":"2"}'
    prompts = load(jsonl(content), tokenizer)
    assert prompts.texts == [odd, "c"]
    assert prompts.ids.tolist() == [0, 1]


def test_parquet_reads_like_jsonl(tmp_path, jsonl, tokenizer):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": ["one", "two"], "answer": [1, 2], "extra": [[1], None]}), path)
    assert check_columns(path, {"answer_column": "answer", "task_column": None}) == ["prompt", "answer", "extra"]
    prompts = load(path, tokenizer)
    same = load(jsonl(rows(("one", 1), ("two", 2))), tokenizer)
    np.testing.assert_array_equal(prompts.tokens, same.tokens)
    assert prompts.columns["answer"] == ["1", "2"]
    assert prompts.columns["extra"] == [[1], None]
    pq.write_table(pa.table({"prompt": ["one", "two"], "answer": ["1", None]}), path)
    with pytest.raises(UserError, match=r"data\.parquet: row 2.*'answer' is null"):
        load(path, tokenizer)
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"data\.parquet"):
        load(path, tokenizer)
    pq.write_table(pa.table({"prompt": ["one"] * 99, "answer": [str(i) for i in range(99)]}), path)
    damaged = bytearray(path.read_bytes())
    damaged[4:24] = b"\xff" * 20  # its first page; the schema stands at its end
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"data\.parquet is not a readable Parquet file"):
        load(path, tokenizer)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"pip install pyarrow.*\[parquet\]"):
        check_columns(path, {"prompt_column": "prompt"})
    with pytest.raises(UserError, match="pip install pyarrow"):
        next(read_rows(path))


# what is refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('\n{"prompt":"a","answer":"1"}\n\n{"prompt": \n', r"data\.jsonl: line 4: not valid JSON"),
        ('{"prompt":"a","answer":"1"}\n[]\n', r"data\.jsonl: line 2: expected a JSON object, found a list"),
        ('{"prompt":"a","answer":"1"}\n{"prompt":"b"}\n', r"data\.jsonl: line 2: no column 'answer'"),
        ('{"prompt":"a","answer":"1"}\n{"answer":"b"}\n', r"data\.jsonl: line 2: no column 'prompt'"),
        ('{"prompt":"a","answer":null}\n', r"data\.jsonl: line 1: column 'answer' is null"),
        ('{"prompt":"a","answer":NaN}\n', r"data\.jsonl: line 1: column 'answer' is a float"),
        ('{"prompt":"a","answer":["1"]}\n', r"data\.jsonl: line 1: column 'answer' is a list"),
        ('{"prompt":"a","answer":true}\n', r"data\.jsonl: line 1: column 'answer' is a bool"),
        ('{"prompt":5,"answer":"1"}\n', r"data\.jsonl: line 1: .*text as the prompt, not a int"),
        (
            '{"prompt":"","answer":"1"}\n',
            r"data\.jsonl: line 1: the tokenizer has no token for anything",
        ),
        ("[" * 100_000, r"data\.jsonl: line 1: not usable JSON"),
        (b'{"prompt":"a","answer":"1"}\n{"prompt":"\xff","answer":"1"}\n', r"line 2: not UTF-8"),
        ("", r"data\.jsonl holds no rows"),
        ("\n \n", r"data\.jsonl holds no rows"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(jsonl, tokenizer, content, message):
    with pytest.raises(UserError, match=message):
        load(jsonl(content), tokenizer)


@pytest.mark.parametrize(
    ("prompt", "beside", "what"),
    [
        (
            [{"type": "text", "text": "Name it."}, {"type": "image_url", "image_url": {"url": "a.png"}}],
            {},
            "'image_url'",
        ),
        ([{"type": "video", "video": "a.mp4"}], {}, "'video'"),
        ([{"image": "a.png"}], {}, "'image'"),
        ("Name it.", {"images": ["a.png"]}, "column 'images'"),
    ],
)
def test_prompts_with_images_are_refused(jsonl, tokenizer, prompt, beside, what):
    plain = {"prompt": [{"role": "user", "content": "a"}], "answer": "1", "images": []}
    row = plain | {"prompt": [{"role": "user", "content": prompt}]} | beside
    path = jsonl(json.dumps(plain) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"data\.jsonl: line 2: .*{what}.*only text is supported"):
        load(path, tokenizer, template="chat")


def test_messages_do_not_repeat_the_row(jsonl, tokenizer):
    with pytest.raises(UserError) as caught:
        load(jsonl('{"prompt":"a","answer":"1"}\n{"prompt":"secret word" oops}\n'), tokenizer)
    assert "secret" not in str(caught.value)


def test_columns_are_checked_before_anything_else(jsonl, tmp_path):
    path = jsonl('\n{"question":"a","answer":"1"}\n{broken\n')
    said = r"no column 'topic'; it has question, answer\. Set data\.task_column to one of them"
    with pytest.raises(UserError, match=said):
        check_columns(path, {"answer_column": "answer", "task_column": "topic"})
    assert check_columns(path, {"prompt_column": "question"}) == ["question", "answer"]
    with pytest.raises(UserError, match="no prompt file"):
        check_columns(tmp_path / "absent.jsonl", {"prompt_column": "prompt"})


def test_prompts_that_do_not_fit(jsonl, tokenizer):
    long = "x " * 200
    path = jsonl(rows(("short", "1"), (long, "2"), ("last", "3")))
    kept = load(path, tokenizer, max_prompt_length=20)
    assert kept.ids.tolist() == [0, 2]
    assert (kept.read, kept.dropped, kept.truncated) == (3, 1, 0)
    assert kept.columns["answer"] == ["1", "3"]

    cut = load(path, tokenizer, max_prompt_length=20, overlong="truncate")
    assert (cut.read, cut.dropped, cut.truncated) == (3, 0, 1)
    assert cut.tokens.shape == (3, 20)
    assert cut.lengths[1] == 20
    assert cut.tokens[1].tolist() == tokenizer(long)["input_ids"][-20:]
    assert cut.texts[1] == tokenizer.decode(cut.tokens[1])

    exact = len(tokenizer(long)["input_ids"])
    assert load(path, tokenizer, max_prompt_length=exact).dropped == 0
    assert load(path, tokenizer, max_prompt_length=exact - 1).dropped == 1


def test_nothing_left_is_an_error_with_counts_and_limit(jsonl, tokenizer):
    path = jsonl(rows(("x " * 200, "1"), ("y " * 200, "2")))
    with pytest.raises(UserError, match=r"2 of 2.*25\b"):
        load(path, tokenizer, max_prompt_length=25)


def test_fewer_rows_than_a_batch(jsonl, tokenizer):
    prompts = load(jsonl(rows(("a", "1"), ("b", "2"))), tokenizer)
    require_rows(prompts, 2)
    with pytest.raises(UserError, match=r"2 prompts.*takes 3"):
        require_rows(prompts, 3)


def test_settings_that_cannot_work(jsonl, tokenizer, fixtures):
    path = jsonl(rows(("hello", "1")))
    with pytest.raises(UserError, match="prompt_format"):
        load(path, tokenizer, prompt_format="no place")
    with pytest.raises(UserError, match="does not belong to this model"):
        load(path, tokenizer, vocab_size=10)
    with pytest.raises(UserError, match="role and content"):
        load(jsonl(rows(([{"role": "user"}], "1")), "other.jsonl"), tokenizer, template="chat")
    bare = load_tokenizer(fixtures / "tiny-qwen3")
    bare.chat_template = None
    with pytest.raises(UserError, match=r"data\.template=plain"):
        load(path, bare, template="chat")
    bare.chat_template = "{{ raise_exception('only poems') }}"
    with pytest.raises(UserError, match=r"line 1.*only poems"):
        load(path, bare, template="chat")


def test_an_end_token_that_the_tokenizer_appends_is_taken_off(jsonl, fixtures):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(fixtures / "tiny-qwen3")
    end, start = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", start), ("<|im_end|>", end)]
    )
    prompts = load(jsonl(rows(("abc", "1"), ("abc<|im_end|>", "1"))), tokenizer)
    assert tokenizer("abc")["input_ids"][-1] == end
    assert prompts.tokens[0, -1] != end
    assert prompts.tokens[0, -prompts.lengths[0]] == start
    assert prompts.tokens[1, -1] == end  # the prompt's own


# tokenizers


def test_decode_ignores_ids_without_text(tokenizer):
    ids = tokenizer("42", add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, [*ids, 319, -1, 2**31 - 1, tokenizer.eos_token_id]) == "42"
    assert decode(tokenizer, np.array(ids, dtype=np.int32)) == "42"
    assert decode(tokenizer, []) == ""


def test_missing_or_damaged_tokenizers(tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path)


def test_loading_a_tokenizer_is_quiet_and_leaves_jax_alone(fixtures):
    code = (
        "import sys, logra_jax.rl.tokenizer as t\n"
        f"t.load_tokenizer({str(fixtures / 'tiny-qwen3')!r})\n"
        "print([m for m in ('jax', 'flax') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("[]\n", "")


# order


def test_every_epoch_is_another_permutation():
    order = PromptOrder(50, seed=3)
    epochs = order.rows(0, 200).reshape(4, 50)
    assert order.rows(0, 200).dtype == np.int32
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(50), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert not any((epoch == np.arange(50)).all() for epoch in epochs)


@pytest.fixture(scope="module")
def whole():
    return PromptOrder(30, seed=11).rows(0, 120)


@pytest.mark.parametrize("start", [0, 1, 20, 29, 30, 31, 87, 100])
def test_resuming_at_any_count_gives_the_unbroken_sequence(whole, start):
    resumed = PromptOrder(30, seed=11)
    np.testing.assert_array_equal(resumed.rows(start, 10), whole[start : start + 10])  # straddles epochs
    np.testing.assert_array_equal(resumed.rows(start + 10, 5), whole[start + 10 : start + 15])


def test_the_seed_decides():
    assert PromptOrder(50, 0).rows(0, 50).tolist() == PromptOrder(50, 0).rows(0, 50).tolist()
    assert PromptOrder(50, 0).rows(0, 50).tolist() != PromptOrder(50, 1).rows(0, 50).tolist()
    # Neighbouring seeds must not share epochs shifted by one.
    assert PromptOrder(50, 0).rows(50, 50).tolist() != PromptOrder(50, 1).rows(0, 50).tolist()
    assert PromptOrder(50, 2**40).rows(0, 0).shape == (0,)


def test_one_prompt_is_an_order_and_none_is_not():
    assert PromptOrder(1, 0).rows(5, 3).tolist() == [0, 0, 0]
    with pytest.raises(UserError, match="at least one"):
        PromptOrder(0, 0)


def test_a_part_of_the_rows_stays_that_part():
    """Only rows of the chosen part are ever drawn, in every epoch."""
    part = np.array([4, 8, 15])
    drawn = part[PromptOrder(len(part), 42).rows(0, 15)]
    assert set(drawn.tolist()) == {4, 8, 15}
    for epoch in drawn.reshape(5, 3):
        assert set(epoch.tolist()) == {4, 8, 15}


def test_what_the_tokenizer_cannot_read_is_kept_for_a_note(tmp_path):
    """The demo's tokenizer knows figures and a few signs, and leaves the rest out."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "12*3=", "answer": ""}\n{"prompt": "So 4 b\u00e9 5", "answer": ""}\n')
    tokenizer = load_tokenizer(PACKAGED / "model")
    found = load_prompts(
        path,
        tokenizer,
        prompt_column="prompt",
        answer_column=None,
        template="plain",
        max_prompt_length=20,
        vocab_size=32,
    )
    assert found.unread == "Sbo\u00e9"
