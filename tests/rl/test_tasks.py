"""Mixtures of Reasoning-Gym tasks: what is refused, what is made, who verifies, and what a verifier may not do."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import limits
import numpy as np
import pytest

from logra_jax.config import load_config
from logra_jax.errors import UserError
from logra_jax.rl.prompts import check_columns
from logra_jax.rl.reward import make_reward
from logra_jax.rl.tasks import (
    HELD_OUT_SEEDS,
    Mixture,
    Task,
    _draw,
    base_seed,
    generate,
    make_dataset,
    make_rows,
    read_mixture,
)  # fmt: skip

needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="extra tasks not installed")
CONFIGS = Path(__file__).parents[2] / "configs"
MIXTURE = """
seed: 3
train: 30
held_out: 10
tasks:
  sums: {task: chain_sum, weight: 2, difficulty: {min_terms: 3, max_terms: 4}}
  countdown: {difficulty: {min_numbers: 3, max_numbers: 3}}
  graph_color: {difficulty: {min_num_vertices: 4, max_num_vertices: 5}}
  word_ladder: {}
"""


def write(folder, text):
    path = folder / "mixture.yaml"
    path.write_text(text)
    return path


LAUGHS = "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 60)
)  # 2^60 mappings, told one by one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: 4\ntasks: {a: {weight: 0}}", r"mixture.yaml: tasks: a: weight must be a number above 0, found 0"),
        ("train: 4\ntasks: {a: {weight: -1}}", "weight must be"),
        ("train: 4\ntasks: {a: {weight: .nan}}", "weight must be a number above 0, found nan"),
        ("train: 4\ntasks: {a: {weight: .inf}}", "weight must be"),
        ("train: 4\ntasks: {a: {weight: yes}}", "weight must be"),
        ("train: 4\ntasks: {a: {weight: 1.0e+308}, b: {weight: 1.0e+308}}", "weight must be"),
        (f"train: 4\ntasks: {{a: {{weight: 1{'0' * 400}}}}}", "weight must be .* found 1000"),
        ("train: 4\ntasks: &t {a: *t}", "unknown key 'a'"),
        (f"train: 4\na0: &a0 {{}}\n{LAUGHS}tasks: {{}}", "unknown key"),
        ("train: 4\ntasks: {null: {}}", "the name of a task is a text, found None"),
        ("train: 4\ntasks: {'': {}}", "the name of a task is a text"),
        ("train: 4\ntasks: {a: {wieght: 1}}", "unknown key 'wieght': did you mean weight"),
        ("train: 4\ntasks: {a: {difficulty: 3}}", "difficulty: expected"),
        ("train: 4\nheldout: 2\ntasks: {a: {}}", "unknown key 'heldout': did you mean held_out"),
        ("train: 0\ntasks: {a: {}}", "train must be a whole number of at least 1"),
        ("train: 4.5\ntasks: {a: {}}", "train must be"),
        ("tasks: {a: {}}", "train must be .* found None"),
        ("train: 4\ntasks: {}", "tasks is empty"),
        ("train: 4\n", "tasks: expected"),
        ("train: 4\ntasks: {a: {}, b: {}, a: {weight: 2}}", "mixture.yaml: a is there twice"),
        ("train: 4\ntasks: {a: {}, b: {difficulty: {n: 1, n: 2}}}", "mixture.yaml: n is there twice"),
        ("train: 4\nheld_out: 1\ntasks: {a: {}, b: {}}", "held_out=1 leaves no question for b"),
        ("train: 4\ntasks: {a: {}, b: {weight: 1.0e-9}}", "train=4 leaves no question for b"),
        ("- a\n", "expected"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_mistakes_are_found_without_reasoning_gym(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        check_columns(write(tmp_path, text), {"prompt_column": "prompt"})


def test_counts_follow_the_weights():
    tasks = tuple(Task(name, name, weight, {}) for name, weight in (("a", 2.0), ("b", 1.0), ("c", 1.0)))
    mixture = Mixture(0, 1, 0, tasks)
    assert mixture.counts(8) == [4, 2, 2]
    assert mixture.counts(10) == [5, 3, 2]  # 5, 2.5, 2.5: the first of equal rests is rounded up
    assert mixture.counts(0) == [0, 0, 0]
    for total in range(30):
        counts = mixture.counts(total)
        assert sum(counts) == total
        assert all(abs(n - total * t.weight / 4) < 1 for n, t in zip(counts, tasks, strict=True))


def test_seeds_of_the_two_parts_never_meet():
    seeds = [base_seed(seed, name) for seed in range(50) for name in ("chain_sum", "lcm")]
    assert len(set(seeds)) == 100
    # A training question takes seed + i, with i below HELD_OUT_SEEDS // 2 (what `train` is limited to and its tries).
    assert max(seeds) + HELD_OUT_SEEDS // 2 <= HELD_OUT_SEEDS + min(seeds)


@needs_gym
def test_unknown_names_and_difficulties_name_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"here: reasoning-gym has no task 'chain_sums': did you mean chain_sum\?"):
        make_dataset("chain_sums", {}, place="here")
    with pytest.raises(UserError, match=r"chain_sum has no difficulty setting 'min_term': did you mean min_terms\?"):
        make_dataset("chain_sum", {"min_term": 3})
    with pytest.raises(UserError, match="chain_sum refuses its difficulty: max_terms must be >= min_terms"):
        make_dataset("chain_sum", {"min_terms": 9})
    with pytest.raises(UserError, match="no difficulty setting 'seed'"):
        make_dataset("chain_sum", {"seed": 9})
    path = write(tmp_path, "train: 2\ntasks: {lcm: {}, chain_sums: {}}")
    with pytest.raises(UserError, match=r"mixture.yaml: tasks: chain_sums: .*did you mean chain_sum\?"):
        generate(read_mixture(path), str(path))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mixture"), MIXTURE)


@needs_gym
def test_rows_are_a_mixture_without_repetitions(mixture):
    train, held_out = make_rows(mixture, held_out=False), make_rows(mixture, held_out=True)
    assert Counter(row["task"] for row in train) == {"sums": 12, "countdown": 6, "graph_color": 6, "word_ladder": 6}
    assert Counter(row["task"] for row in held_out) == {"sums": 4, "countdown": 2, "graph_color": 2, "word_ladder": 2}
    questions = [row["prompt"] for row in train + held_out]
    assert len(set(questions)) == 40
    assert len({row["task"] for row in train[:10]}) > 1  # shuffled
    assert all(row["answer"] for row in train if row["task"] != "graph_color")
    assert read_mixture(mixture).seed == 3
    # The rows of a sum say themselves what is right.
    for row in train:
        if row["task"] == "sums":
            assert eval(row["prompt"].split(":")[1].rstrip("= ")) == int(row["answer"])


@needs_gym
def test_names_of_one_task_share_no_question():
    """Of the 100 sums of two digits, one name takes 30 and the other 50."""
    easy = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = [(Task(name, "chain_sum", 1.0, easy), n) for name, n in (("a", 10), ("b", 20))]
    found = _draw([(task, 0, {"held_out": n, "train": 2 * n}) for task, n in tasks], "here")
    questions = [row["prompt"] for part in ("held_out", "train") for row in found[part]]
    assert len(set(questions)) == len(questions) == 90
    assert Counter(row["task"] for row in found["train"]) == {"a": 20, "b": 40}


@needs_gym
def test_questions_do_not_depend_on_the_process(mixture):
    """word_ladder draws from a set of words, whose order changes with the hash seed of a process."""
    code = f"from logra_jax.rl import tasks; print([r['entry'] for r in tasks.make_rows({str(mixture)!r}, held_out=0)])"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert eval(out.stdout) == [row["entry"] for row in make_rows(mixture, held_out=False)]


@needs_gym
def test_a_task_whose_verifier_takes_anything_is_refused():
    task = Task("halting", "game_of_life_halting", 1.0, {})
    found = _draw([(task, 0, {"held_out": 1, "train": 1})], "there")
    assert "there: tasks: halting: only 0 of 1 different held_out questions" in found


@needs_gym
def test_the_verifier_is_that_of_the_task_and_runs_nothing(mixture, tmp_path, monkeypatch):
    limits.as_needed(monkeypatch, lambda request: "9**9" in request["completion"])
    rows = make_rows(mixture, held_out=False)
    countdown = next(row for row in rows if row["task"] == "countdown")
    colour = next(row for row in rows if row["task"] == "graph_color")
    total = next(row for row in rows if row["task"] == "sums")
    written = tmp_path / "written"
    attack = f'__import__("os").system("touch {written}")'
    numbers = re.search(r"using all of these numbers: ([\d, ]+)", countdown["prompt"])[1].split(", ")
    vertices = re.search(r"Vertices: \[([\d, ]+)\]", colour["prompt"])[1].split(", ")
    tries = [
        (total, f"<answer>0</answer> no, <answer> {total['answer']} </answer>", 1.0),
        (total, f"<answer>{total['answer']}</answer> no, <answer>x</answer>", 0.0),
        (total, total["answer"], 0.0),  # not between the tags
        (countdown, f"<answer>{countdown['answer']}</answer>", 1.0),
        (countdown, f"<answer>{attack}</answer>", 0.01),  # the verifier's own score for what it cannot read
        (countdown, f"<answer>{'+'.join(numbers)}.__class__</answer>", 0.01),
        (countdown, "<answer>9**9**9**9**9</answer>", 0.0),
        (colour, "<answer>" + str({v: 1 + i for i, v in enumerate(vertices)}).replace("'", '"') + "</answer>", None),
        (colour, "<answer>[]</answer>", 0.01),
    ]
    with make_reward(
        "reasoning_gym", answer_column="answer", timeout_s=2.0, workers=1, pattern=r"<answer>([\s\S]*?)</answer>"
    ) as grader:
        columns = {name: [row[name] for row, _, _ in tries] for name in ("answer", "entry", "task")}
        rewards = grader.grade([row["prompt"] for row, _, _ in tries], [text for _, text, _ in tries], columns)
        assert grader.counts.timeouts == 1
    for found, (_, text, expected) in zip(rewards.tolist(), tries, strict=True):
        if expected is not None:
            assert found == np.float32(expected), text
    assert not written.exists()


def test_the_long_run_is_a_valid_mixture():
    config = load_config(CONFIGS / "reasoning_gym_hard.yaml")
    assert config.data.train == config.data.eval == "configs/tasks/hard.yaml"
    mixture = read_mixture(CONFIGS / "tasks/hard.yaml")
    assert len(mixture.tasks) == 24
    assert set(mixture.counts(mixture.held_out)) == {20}
    assert re.findall(config.reward.pattern, "<answer>1</answer>\n<answer>\n2</answer>") == ["1", "\n2"]
    if importlib.util.find_spec("reasoning_gym") is not None:
        for task in mixture.tasks:
            make_dataset(task.task, task.difficulty)  # its name and its difficulty are taken


@needs_gym
def test_code_is_no_formula():
    from logra_jax.rl.verifier import Refused, check_formula

    for text in ("2 + 3*x", "[['Q', '_'], [1, -2.5]]", "Integer (3 )*Symbol ('x' )", "Function ('f' )(Symbol ('x' ))"):
        check_formula(text)
    for text in ("__import__", "f.x", "open('a', 'w')", "sympify('1')", "[i for i in x]", "lambda: 0", "exec(1)"):
        with pytest.raises(Refused):
            check_formula(text)
    for text in ("import os", "1; 2", "x = 3", "if 1: 2", ""):
        with pytest.raises(SyntaxError):  # also where they would be executed
            check_formula(text)


def test_a_verifier_may_read_and_import_but_write_and_start_nothing(tmp_path):
    """What the second barrier stops, should an answer get past the first one."""
    code = f"""if True:
        import json, os, shutil, socket, subprocess, sys
        from logra_jax.rl.verifier import Refused, _Guard
        guard, folder = _Guard(), {str(tmp_path)!r}
        sys.addaudithook(guard)
        tries = dict(
            write=lambda: open(folder + "/a", "w"), append=lambda: open(folder + "/a", "ab"),
            create=lambda: os.open(folder + "/a", os.O_WRONLY | os.O_CREAT), system=lambda: os.system("true"),
            start=lambda: subprocess.run(["true"]), delete=lambda: os.remove(folder + "/b"),
            tree=lambda: shutil.rmtree(folder), socket=lambda: socket.create_connection(("127.0.0.1", 9)),
            read=lambda: open(folder + "/b").read(), look=lambda: os.listdir(folder),
            load=lambda: __import__("colorsys"),
        )
        open(folder + "/b", "w").close()
        refused = []
        for name, attempt in tries.items():
            guard.active = True
            try:
                attempt()
            except Refused:
                refused.append(name)
            finally:
                guard.active = False
        print(json.dumps(refused))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    wanted = ["write", "append", "create", "system", "start", "delete", "tree", "socket"]
    assert json.loads(done.stdout) == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_no_depth_is_compiled_that_cannot_be_looked_at():
    """In a process of its own, as the hook stays. Of some 3,000 signs the compiler takes a few more than the parser."""
    code = """if True:
        import sys
        from logra_jax.rl.verifier import _Guard
        guard, called = _Guard(), []
        sys.addaudithook(guard)
        for depth in range(2800, 3100):
            guard.active = True
            try:
                eval("-" * depth + "call()", {"call": lambda: called.append(depth) or 1})
            except (OSError, RecursionError, MemoryError):
                pass
            guard.active = False
        print(called)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
