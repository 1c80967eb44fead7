"""The data command on small files in the published layouts: what it reads, keeps, drops, refuses, and says."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from logra_jax import cli, data
from logra_jax.errors import UserError
from logra_jax.rl.layouts import Unusable, after_hashes, in_last_box, normal
from logra_jax.rl.prompts import check_columns

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "GOLD_SECONDS", 100.0)  # no answer here needs long, however slow the machine is
    return tmp_path


def lines(name, *rows):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return name


def parquet(name, rows):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), name)
    return name


def run(*argv):
    """Rows of both sides and the report."""
    assert data.main([*argv, "--out", "out"]) == 0
    files = [Path("out", name) for name in ("train.jsonl", "heldout.jsonl")]
    sides = [[json.loads(line) for line in f.read_text("utf-8").split("\n")[:-1]] if f.exists() else [] for f in files]
    return *sides, json.loads(Path("out/report.json").read_text("utf-8"))


def refused(*argv):
    with pytest.raises(UserError) as caught:
        data.main([*argv, "--out", "out"])
    assert [name for name in os.listdir() if name.startswith(("out", ".out"))] == []
    return str(caught.value)


def plain(*pairs):
    return [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def test_gsm8k():
    lines(
        "gsm.jsonl",
        {"question": "How many?", "answer": "16 - 3 = <<16-3=13>>13\n13 + 5 = <<13+5=18>>18\n#### 18"},
        {"question": "How much?", "answer": "No #### 3\n#### 1,218,000"},
        {"question": "Lost?", "answer": "nothing"},
    )
    train, _, report = run("gsm.jsonl")
    assert train == [
        {"prompt": "How many?", "answer": "18", "id": "gsm.jsonl:1"},
        {"prompt": "How much?", "answer": "1218000", "id": "gsm.jsonl:2"},
    ]
    assert report["train"]["read"] == [{"source": "gsm.jsonl", "layout": "gsm8k", "files": 1, "rows": 3}]
    assert report["train"]["rows_dropped"] == [{"reason": "no #### in the answer", "place": "gsm.jsonl: line 3"}]
    check_columns("out/train.jsonl", {"prompt_column": "prompt", "answer_column": "answer"})  # the trainer takes it


def test_math_as_a_folder_of_files_and_as_math_500():
    for subject, number, box in (("algebra", 1, r"\boxed{\frac{1}{2}}"), ("geometry", 1, r"\fbox{3}, so \boxed 5")):
        os.makedirs(f"MATH/train/{subject}")
        row = {"problem": f"Find {subject}.", "level": "Level 3", "type": subject.title(), "solution": f"So {box}."}
        Path(f"MATH/train/{subject}/{number}.json").write_text(json.dumps(row))
    row = {"problem": "Find  $Algebra$", "solution": "..", "answer": "1/2", "subject": "Algebra", "level": 3}
    lines("math500.jsonl", row | {"unique_id": "test/1.json"})
    train, held_out, report = run("MATH", "--split", "train", "--test", "math500.jsonl")
    assert train == [
        {"prompt": "Find geometry.", "answer": "5", "id": "train/geometry/1.json:1", "level": "Level 3",
         "subject": "Geometry"},
    ]  # fmt: skip
    assert held_out == [
        {"prompt": "Find  $Algebra$", "answer": "1/2", "id": "test/1.json", "level": 3, "subject": "Algebra"}
    ]
    (dropped,) = report["train"]["rows_dropped"]
    assert dropped["reason"] == "in the held-out file"
    assert dropped["place"] == "MATH/train/algebra/1.json: row 1"
    assert dropped["other_place"] == "math500.jsonl: row 1"


def test_dapo_whose_rows_come_again_and_again():
    def row(i, problem, answer):
        return {
            "data_source": "math_dapo", "prompt": [{"content": DAPO_HEAD + problem + DAPO_TAIL, "role": "user"}],
            "ability": "MATH", "reward_model": {"ground_truth": answer}, "extra_info": {"index": f"u{i}"},
        }  # fmt: skip

    rows = [row(i % 3, f"What is {i % 3}?", str(i % 3)) for i in range(300)]
    rows.insert(5, row(9, "What is 9?", "9"))
    rows.insert(6, row(9, "What is  9?", "10"))  # one of the two is wrong
    rows.insert(7, row(8, "What is half?", "0.5"))
    rows.insert(8, row(8, "What is half?", "1/2"))  # the same
    train, _, report = run(parquet("data/dapo.parquet", rows))
    assert [r["prompt"] for r in train] == ["What is 0?", "What is 1?", "What is 2?", "What is half?"]
    assert [r["id"] for r in train] == ["u0", "u1", "u2", "u8"]
    part = report["train"]
    assert part["dropped"] == {"the same question with another answer": 2, "the same question again": 298}
    assert part["rows_dropped"][0]["answers"] == ["9", "10"]
    assert part["rows_dropped"][0]["place"] == "data/dapo.parquet: row 6"
    repeated = {entry["kept"]: entry["repeated"]["data/dapo.parquet"] for entry in part["rows_repeated"]}
    assert repeated["data/dapo.parquet: row 1"] == [4, *range(11, 305, 3)]
    assert part["kept"] + sum(part["dropped"].values()) == 304  # every row is accounted for


def test_a_system_message_makes_no_other_question():
    tail = ' Let\'s think step by step and output the final answer after "####".'
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is 1+1?{tail}"}
    solved = {"reward_model": {"ground_truth": "2"}}
    lines("train.jsonl", {"prompt": [system, user]} | solved, {"prompt": [{"role": "user", "content": "?"}]} | solved)
    lines("test.jsonl", {"prompt": [user]} | solved)
    train, held_out, _ = run("train.jsonl", "--test", "test.jsonl")
    assert [row["prompt"] for row in (*train, *held_out)] == ["?", "What is 1+1?"]
    lines("system.jsonl", {"prompt": [system, user]} | solved)
    shutil.rmtree("out")
    assert run("system.jsonl")[0][0]["prompt"] == [system, {"role": "user", "content": "What is 1+1?"}]


def test_answers_without_hashes_are_shown_the_way(here):
    lines("q.jsonl", {"question": "What is 1+1?", "answer": "2"})
    assert "--prompt-column question" in refused("q.jsonl")
    assert run("q.jsonl", "--prompt-column", "question")[0][0]["answer"] == "2"


def test_numbers_of_rows_are_no_ids():
    """Files of other trainers count their rows in extra_info.index, each from 0."""
    rows = [{"prompt": p, "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 0}} for p in ("a", "b")]
    lines("train.jsonl", rows[0])
    lines("test.jsonl", rows[1])
    train, held_out, _ = run("train.jsonl", "--test", "test.jsonl")
    assert [row["id"] for row in (*train, *held_out)] == ["train.jsonl:1", "test.jsonl:1"]


def test_numbers_are_written_as_people_write_them():
    lines("n.jsonl", *[{"prompt": str(i), "answer": n} for i, n in enumerate((0.00005, 1e16, -1e-7, 0.5, 2.0, 12))])
    answers = [row["answer"] for row in run("n.jsonl")[0]]
    assert answers == ["0.00005", "10000000000000000", "-0.0000001", "0.5", "2.0", "12"]


def test_raised_figures_and_fractions_make_another_question():
    prompts = ["2² + 1?", "22 + 1?", "1½ - 1?", "11⁄2 - 1?", "caf\u00e9", "cafe\u0301", "\uff21", "A"]
    lines("p.jsonl", *[{"prompt": prompt, "answer": str(i // 2 if i > 3 else i)} for i, prompt in enumerate(prompts)])
    assert [row["prompt"] for row in run("p.jsonl")[0]] == [*prompts[:4], prompts[4], prompts[6]]


def test_dapo_takes_the_first_column_that_says_an_answer():
    first = {"prompt": "What is 3+4?", "answer": "7", "solution": "worked out"}
    lines("dapo.jsonl", first, {"prompt": "What is 4+4?", "answer": "", "solution": "8"})
    train, _, report = run("dapo.jsonl")
    assert report["train"]["read"][0]["layout"] == "dapo"
    assert [row["answer"] for row in train] == ["7", "8"]


def test_plain_columns_and_messages():
    rows = [{"q": {"text": "2+2"}, "a": {"gold": 4}, "key": 7}, {"q": {"text": "3+3"}, "a": {"gold": None}, "key": 8}]
    lines("plain.jsonl", *rows)
    argv = ["plain.jsonl", "--prompt-column", "q.text", "--answer-column", "a.gold", "--id-column", "key"]
    train, _, report = run(*argv)
    assert train == [{"prompt": "2+2", "answer": "4", "id": "7"}]
    assert report["train"]["dropped"] == {"no text or number in column a.gold": 1}


def test_extraction_and_normal_text():
    assert after_hashes("<<1+1=2>>2 #### $1,000,000 ") == "$1000000"
    with pytest.raises(Unusable):
        after_hashes("2")
    assert in_last_box(r"\boxed{1}, \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert in_last_box(r"\boxed7") == "7"
    assert in_last_box(r"\boxed 12.") == "12"
    assert in_last_box(r"$\boxed 3$ so $\boxed 4 $.") == "4"
    for text in (r"\boxed{1", r"\boxed{3} so \boxed\frac{1}{2}", r"$\boxed 12.5$", r"$\boxed 5\pi$", r"\boxed 1,218"):
        with pytest.raises(Unusable):
            in_last_box(text)
    assert normal("What  is\n$x$?") == normal("what is x")
    assert normal(r"\left( \dfrac12 \right)") == normal(r"(\frac12)")
    assert normal(r"a \rightarrow b") != normal("a b")
    assert normal("x+1") != normal("x-1")
    assert len({normal(text) for text in ("1 23 4", "12 3 4", "1234", "$1$ $2$ $34$")}) == 4
    assert normal("1  +  23\n4") == normal("1 + 23 4")
    assert normal(r"10\,000 m") == normal("10 000m") == normal(r"10\ 000 m.") == normal("10000m")
    assert normal(r"1\ 23") == normal(r"1 \quad 23") != normal(r"12\ 3")
    assert normal(r"\int_0^1 x\,dx") == normal(r"\int_0^1 x dx")
    assert normal("Find 5!") != normal("Find 5") == normal("Find 5?")
    assert normal([{"role": "user", "content": "A b"}]) == normal("a B")


def test_the_split_is_by_question_stable_and_without_leaks():
    rows = plain(
        *((f"What is {i}?", str(i)) for i in range(400)), *((f"what is {i}", str(i)) for i in range(0, 400, 7))
    )
    train, held_out, _ = run(lines("a.jsonl", *rows), "--held-out", "0.1")
    assert len(train) + len(held_out) == 400
    assert 20 <= len(held_out) <= 60  # binomial: mean 40, standard deviation 6
    assert not {normal(r["prompt"]) for r in train} & {normal(r["prompt"]) for r in held_out}
    os.rename("out", "before")
    more = plain(*((f"More {i}?", "1") for i in range(100)))
    _, again, _ = run(lines("a.jsonl", *more, *rows), "--held-out", "0.1")
    assert [r["prompt"] for r in held_out] == [r["prompt"] for r in again if not r["prompt"].startswith("More")]
    os.rename("out", "second")
    _, other, _ = run("a.jsonl", "--held-out", "0.1", "--seed", "1")
    assert {r["prompt"] for r in other} != {r["prompt"] for r in again}


def test_subtracted_files_leave_both_sides():
    lines("train.jsonl", *plain(("a", "1"), ("b", "2"), ("c", "3")))
    lines("test.jsonl", *plain(("B", "2"), ("d", "4")))
    lines("other.jsonl", {"problem": "C", "answer": "3"}, {"problem": "d", "answer": "4"})
    train, held_out, report = run("train.jsonl", "--test", "test.jsonl", "--subtract", "other.jsonl")
    assert [r["prompt"] for r in train] == ["a"]
    assert [r["prompt"] for r in held_out] == ["B"]
    assert report["train"]["dropped"] == {"in the held-out file": 1, "in a subtracted file": 1}
    assert report["held_out"]["dropped"] == {"in a subtracted file": 1}


def test_bad_gold_is_dropped_refused_or_kept(capsys):
    lines("a.jsonl", *plain(("a", "1"), ("b", "9^{9^{9^{9}}}"), ("c", r"\frac{1}{"), ("d", " "), ("e", "a word")))
    message = refused("a.jsonl", "--bad-gold", "error")
    assert "3 answers cannot be used" in message
    assert "a.jsonl: row 2: the gold answer is too large to evaluate" in message
    train, _, report = run("a.jsonl")
    assert [r["prompt"] for r in train] == ["a", "e"]
    reasons = {entry["place"]: entry["reason"] for entry in report["train"]["rows_dropped"]}
    assert reasons["a.jsonl: row 3"].endswith("neither mathematics that can be read nor words")
    assert reasons["a.jsonl: row 4"].endswith("the gold answer is empty")
    said = capsys.readouterr().out
    assert "train: 2 questions kept" in said
    assert "read 5 rows of a.jsonl, layout plain" in said
    assert "a.jsonl: row 2" in said
    os.rename("out", "before")
    assert len(run("a.jsonl", "--bad-gold", "keep")[0]) == 5


def test_training_leaves_out_what_no_answer_could_be_compared_with(capsys):
    from logra_jax import build
    from logra_jax.config import load_config
    from logra_jax.rl.prompts import PromptSet

    config = load_config(None, ["data.train=a.jsonl"])
    count, zeros = 7, np.zeros(7, np.int32)
    prompts = PromptSet(np.arange(7), zeros[:, None], zeros, ["q"] * 7, {"answer": list("abcdefg")}, count, 0, 0)

    class Fake:
        def __init__(self, bad):
            self.bad = bad

        def unusable(self, columns):
            assert columns["answer"] == list("abcdefg")
            return self.bad

    assert build.gradable(config, "train", prompts, Fake({})) is prompts
    kept = build.gradable(config, "train", prompts, Fake({1: "empty", 4: "too large"}))
    assert kept.ids.tolist() == [0, 2, 3, 5, 6]
    assert "a.jsonl: 2 of 7 prompts are left out" in (said := capsys.readouterr().err)
    assert "row 2: empty; row 5: too large" in said
    with pytest.raises(UserError, match="no reference answer can be used: row 1: empty"):
        build.gradable(config, "train", prompts, Fake(dict.fromkeys(range(7), "empty")))
    assert build.tasks_of(config, "train", prompts) is None
    named = load_config(None, ["data.task_column=answer"])
    assert build.tasks_of(named, "train", prompts) == list("abcdefg")


def test_another_layout_than_said():
    lines("gsm.jsonl", {"question": "a", "answer": "#### 1"})
    message = refused("gsm.jsonl", "--layout", "math")
    assert "gsm.jsonl: is not of the layout math (problem, solution|answer)" in message
    assert "columns question, answer, which fit that of gsm8k" in message
    lines("odd.jsonl", {"instruction": "a", "output": "1"})
    assert "columns instruction, output, which fit none" in refused("odd.jsonl")
    assert "not of the layout plain (text, answer)" in refused("gsm.jsonl", "--prompt-column", "text")


def test_ids_that_name_two_questions():
    lines("a.jsonl", {"problem": "a", "answer": "1", "unique_id": "x"})
    lines("b.jsonl", {"problem": "b", "answer": "1", "unique_id": "x"})
    assert "'x' names two different questions, in train.jsonl and heldout.jsonl" in refused(
        "a.jsonl", "--test", "b.jsonl"
    )
    assert "'x' names two different questions, in train.jsonl" in refused("a.jsonl", "b.jsonl")


def test_files_of_one_name_are_told_apart_by_their_folders():
    row = {"prompt": "?", "answer": "1"}
    for file in ("a/train/x.jsonl", "b/train/x.jsonl", "y.jsonl"):
        lines(file, row | {"prompt": file})
    train, held_out, _ = run("a/train/x.jsonl", "y.jsonl", "--test", "b/train/x.jsonl")
    assert [r["id"] for r in train + held_out] == ["a/train/x.jsonl:1", "y.jsonl:1", "b/train/x.jsonl:1"]


def test_named_columns_are_those_of_the_sources_first():
    """A subtracted file may have a published layout; the sources may not."""
    lines("mine.jsonl", {"q": "a", "gold": "1"}, {"q": "b", "gold": "2"})
    lines("math.jsonl", {"problem": "B", "answer": "2"})
    argv = ["--prompt-column", "q", "--answer-column", "gold"]
    train, *_ = run("mine.jsonl", *argv, "--subtract", "math.jsonl")
    assert [r["prompt"] for r in train] == ["a"]
    os.rename("out", "before")
    assert "not of the layout plain (q, gold)" in refused("math.jsonl", *argv)
    both = {"problem": "of the layout", "answer": "1", "q": "of the columns", "gold": "2"}
    assert run(lines("both.jsonl", both), *argv)[0][0]["prompt"] == "of the columns"


def test_what_is_no_question_or_answer_is_not_kept():
    lines(
        "a.jsonl",
        *plain(("fine", 18), (" ", 1), (["text"], 1), ([], 1), ("nan", math.nan), ("inf", math.inf), ("list", ["1"])),
    )
    train, _, report = run("a.jsonl", "--bad-gold", "keep")
    assert [(r["prompt"], r["answer"]) for r in train] == [("fine", "18")]
    assert report["train"]["dropped"] == {
        "no text or messages in column prompt": 3, "no text or number in column answer": 3,
    }  # fmt: skip
    os.rename("out", "before")
    lines("dapo.jsonl", {"prompt": "a", "reward_model": {"ground_truth": ["34"]}}, {"prompt": "b", "solution": "2"})
    assert [r["answer"] for r in run("dapo.jsonl")[0]] == ["2"]


def test_half_a_character_is_refused_with_its_place(here):
    fine = r'{"prompt": "\ud83d\ude00", "answer": "1"}'
    for text in (r"\ud83d", r"\uDE00 \u00e9"):
        (here / "a.jsonl").write_text(f'{fine}\n{{"prompt": "{text}", "answer": "1"}}')
        assert "a.jsonl: line 2: not usable JSON" in refused("a.jsonl", "--held-out", "0.5")
    (here / "a.json").write_text(f"\ufeff[\n{fine}]", encoding="utf-8")  # a BOM is fine
    assert [r["prompt"] for r in run("a.json")[0]] == ["\U0001f600"]


def test_folders_as_the_hub_lays_them_out():
    row = {"question": "a", "answer": "#### 1"}
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            question = row | {"question": f"{subset} {split}"}
            parquet(f"openai/gsm8k/{subset}/{split}-00000-of-00001.parquet", [question])
    assert "holds main, socratic: choose one by --subset" in refused("openai/gsm8k")
    assert "holds test, train: choose one by --split" in refused("openai/gsm8k", "--subset", "main")
    assert "subset extra" in refused("openai/gsm8k", "--subset", "extra")
    both = ("openai/gsm8k", "--subset", "main", "--split", "train", "--test", "openai/gsm8k")
    assert "--test-split" in refused(*both)
    train, held_out, _ = run(*both, "--test-split", "test")
    assert [r["prompt"] for r in (*train, *held_out)] == ["main train", "main test"]


def test_the_hub_out_of_reach(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = refused("openai/gsm8k")
    assert "cannot be had from the Hugging Face hub: no network" in message
    assert "hf download --repo-type dataset openai/gsm8k" in message


def test_what_is_refused_before_anything_is_written(here):
    lines("a.jsonl", *plain(("a", "1"), ("b", "2")))
    assert "no such file or folder" in refused("absent.jsonl")
    assert "give one of them" in refused("a.jsonl", "--held-out", "0.5", "--test", "a.jsonl")
    assert "between 0 and 1" in refused("a.jsonl", "--held-out", "1.5")
    assert "--seed is of --held-out" in refused("a.jsonl", "--seed", "1")
    assert "which fit none" in refused("a.jsonl", "--id-column", "number")
    assert "--split chooses among the files of a folder" in refused("a.jsonl", "--split", "train")
    assert "--subset chooses" in refused("a.jsonl", "--subset", "main")
    assert "--test-split chooses" in refused("a.jsonl", "--test-split", "test")
    assert "--test-split chooses" in refused("a.jsonl", "--test", "a.jsonl", "--test-split", "test")
    assert "--layout math knows its columns" in refused("a.jsonl", "--layout", "math", "--id-column", "id")
    assert "no question is held out: a larger --held-out takes more" in refused("a.jsonl", "--held-out", "0.000001")
    assert "no question is left" in refused("a.jsonl", "--subtract", "a.jsonl")
    (here / "broken.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": \n')
    assert "broken.jsonl: line 2: not valid JSON" in refused("broken.jsonl")
    (here / "mixture.yaml").write_text("tasks: {}")
    assert "needs no conversion" in refused("mixture.yaml")
    (here / "out").mkdir()
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: data.main(["a.jsonl", "--out", "out"]))
    assert os.listdir("out") == []
