"""Settings: every kind of bad input is refused by name and place, before anything heavy is imported."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from logra_jax import cli
from logra_jax.config import (
    SETTINGS,
    as_dict,
    check_lengths,
    check_paths,
    format_help,
    load_config,
    resolve_path,
    to_yaml,
)
from logra_jax.errors import UserError
from logra_jax.schema import lies_within
from logra_jax.settings import Config


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file and returns its path."""

    def write_(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_


@pytest.fixture
def minimal(write):
    return write("optimizer: {update_ratio: 6e-5}\n")


def test_defaults_are_those_of_the_classes(minimal):
    optimizer = dataclasses.replace(Config().optimizer, update_ratio=6e-5)
    assert load_config(minimal) == dataclasses.replace(Config(), optimizer=optimizer)


def test_without_a_file_it_is_the_packaged_demo():
    config = load_config(None)
    assert config.optimizer.rank == 16
    check_paths(config)


def test_values_from_file_and_command_line(write):
    path = write("steps: 7\nrollout:\n  prompts: 4\n  generations: 8\nreward: {kind: exact}\n")
    config = load_config(
        path,
        [
            "steps=9",
            "optimizer.learning_rate=1e-6",
            "optimizer.targets=[q_proj$,up_proj]",
            "reward.pattern=#(.*)$",
            "data.system=null",
            "kl.control=false",
            "checkpoint.async=false",
            "data.prompt_format=a=b {prompt}",
            "seed=${rollout.prompts}",
        ],
    )
    assert (config.steps, config.rollout.prompts, config.rollout.rows, config.seed) == (9, 4, 32, 4)
    assert config.optimizer.learning_rate == 1e-6
    assert config.optimizer.targets == ("q_proj$", "up_proj")
    assert config.reward.pattern == "#(.*)$"
    assert config.data.system is None
    assert config.data.prompt_format == "a=b {prompt}"
    assert config.kl.control is False
    assert config.checkpoint.async_ is False


@pytest.mark.parametrize("text", ["1e-6", '"1e-6"', "0.000001"])
def test_float_may_be_text(write, text):
    assert load_config(write(f"optimizer:\n  learning_rate: {text}\n")).optimizer.learning_rate == 1e-6


@pytest.mark.parametrize(("text", "value"), [("off", "off"), ("'off'", "off"), ("auto", "auto")])
def test_bare_off_is_not_a_truth_value(write, text, value):
    path = write(f"optimizer: {{update_ratio: 1e-3}}\nlog:\n  wandb: {text}\n")
    assert load_config(path).log.wandb == value


UNKNOWN = [
    ("learning_rate: 1e-6\n", 1, "learning_rate", "optimizer.learning_rate"),
    ("optimizer:\n  learning-rate: 1e-6\n", 2, "optimizer.learning-rate", "optimizer.learning_rate"),
    ("seed: 1\nrollout:\n  learning_rate: 1e-6\n", 3, "rollout.learning_rate", "optimizer.learning_rate"),
    ("optimizer:\n  rnak: 4\n", 2, "optimizer.rnak", "optimizer.rank"),
    ("temperature: 1\n", 1, "temperature", "rollout.temperature or eval.temperature"),
    ("optimzer:\n  rank: 4\n", 1, "optimzer", "optimizer.rank"),
    ("sed: 4\n", 1, "sed", "seed"),
    ("completely_else: 4\n", 1, "completely_else", "--help"),
    ("seed: {a: 1}\n", 1, "seed", "expected int"),
    ("optimizer: 4\n", 1, "optimizer", "section"),
]


@pytest.mark.parametrize(("text", "line", "key", "hint"), UNKNOWN)
def test_wrong_key_in_the_file(write, text, line, key, hint):
    path = write(text)
    with pytest.raises(UserError) as error:
        load_config(path)
    for part in (f"{path}, line {line}", key, hint):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learning_rate=1", "'learning_rate': did you mean optimizer.learning_rate?"),
        ("optimizer.learning-rate=1", "did you mean optimizer.learning_rate?"),
        ("optimizer.learnig_rate=1", "did you mean optimizer.learning_rate?"),
        ("kl.lr=1", "valid are kl.control"),
        ("optimizer=4", "is a section"),
        ("steps", "expected key=value"),
        ("steps=[1", "cannot be read"),
        ("seed=${nowhere}", "cannot be resolved"),
    ],
)
def test_wrong_key_on_the_command_line(minimal, override, hint):
    with pytest.raises(UserError) as error:
        load_config(minimal, [override])
    assert hint in str(error.value)


WRONG = [
    ("steps=ten", "expected int, found 'ten'"),
    ("steps=1.5", "expected int, found 1.5 (float)"),
    ("steps=true", "expected int, found true"),
    ("steps=null", "expected int, found null"),
    ("steps=0", "must lie in [1, inf), found 0"),
    ("seed=-1", "must lie in [0, 4294967296)"),
    ("seed=4294967296", "must lie in [0, 4294967296)"),
    ("optimizer.sketch_seed=4294967296", "must lie in [0, 4294967296)"),
    ("optimizer.learning_rate=fast", "expected float or null, found 'fast'"),
    ("optimizer.eps=.nan", "expected float, found nan"),
    ("optimizer.eps=.inf", "expected float, found inf"),
    ("optimizer.eps=true", "expected float, found true"),
    ("optimizer.targets=q_proj", "expected a list of texts"),
    ("optimizer.targets=[1]", "expected a list of texts"),
    ("optimizer.targets=[]", "optimizer.targets is empty"),
    ("optimizer.targets=['(']", "not a regular expression"),
    ("optimizer.name=logr", "expected logra or adamw or row_adam or galore or lora, found 'logr': did you mean logra?"),
    ("model.compute_dtype=float16", "did you mean"),
    ("kl.control=maybe", "expected true or false, found 'maybe'"),
    ("kl.control=1", "expected true or false, found 1 (int)"),
    ("rollout.temperature=0", "rollout.temperature: must lie in (0, inf)"),
    ("rollout.temperature=-1", "must lie in (0, inf)"),
    ("rollout.top_p=0", "must lie in (0, 1]"),
    ("rollout.top_p=1.1", "must lie in (0, 1]"),
    ("rollout.max_new_tokens=0", "must lie in [1, inf)"),
    ("loss.clip_low=1", "must lie in [0, 1)"),
    ("loss.clip_high=-0.1", "must lie in [0, inf)"),
    ("loss.reference_kl=-1", "must lie in [0, inf)"),
    ("kl.budget_start=0", "kl.budget_start: must lie in (0, inf)"),
    ("kl.budget_end=-1e-5", "kl.budget_end: must lie in (0, inf)"),
    ("optimizer.b2=1", "must lie in [0, 1)"),
    ("reward.kind=maths", "none of math, exact, reasoning_gym and module:function; did you mean math?"),
    ("data.prompt_format=hello", "must contain {prompt}"),
]


@pytest.mark.parametrize(("override", "message"), WRONG)
def test_wrong_values(minimal, override, message):
    with pytest.raises(UserError) as error:
        load_config(minimal, [override])
    assert override.split("=")[0] in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.within])
def test_no_number_may_be_negative(minimal, key):
    with pytest.raises(UserError, match="must lie in"):
        load_config(minimal, [f"{key}=-1"])


def test_sequence_longer_than_the_model(minimal):
    config = load_config(minimal, ["data.max_prompt_length=4000", "rollout.max_new_tokens=3500"])
    check_lengths(config, 7500)
    with pytest.raises(UserError, match=r"7500 tokens.* 6000"):
        check_lengths(config, 6000)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], None),
        (["data.train="], "data.train is not set"),
        (["data.train=nowhere.jsonl"], "data.train=nowhere.jsonl: no such file"),
        (["data.eval=nowhere.jsonl"], "data.eval=nowhere.jsonl: no such file"),
        (["model.path="], "model.path is not set"),
        (["model.path=nowhere"], "model.path=nowhere: no folder"),
    ],
)
def test_missing_files(minimal, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "eval.jsonl", "config.json"):
        (tmp_path / name).write_text("{}")
    good = ["data.train=train.jsonl", "data.eval=eval.jsonl", f"model.path={tmp_path}"]
    config = load_config(minimal, [*good, *overrides])
    if message is None:
        check_paths(config)
    else:
        with pytest.raises(UserError, match=message):
            check_paths(config)


def test_packaged_files_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (resolve_path("demo:demo.yaml")).is_file()
    assert resolve_path("some/file") == Path("some/file")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "key: value"),
        ("a: [\n", "not valid YAML"),
        ("seed: 1\nseed: 2\n", "duplicate"),
        ("seed: \xff", "not valid YAML"),
    ],
)
def test_broken_file(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_written_file_reads_back_equal(minimal, write):
    config = load_config(
        minimal,
        ["optimizer.targets=[a b,c]", "data.system=say 'hi': #1 ü", "reward.kind=exact", "reward.pattern=\\$\\{(.*)"],
    )
    literal = dataclasses.replace(config, data=dataclasses.replace(config.data, system="${seed}\n x"))
    for kept in (config, literal):
        assert load_config(write(to_yaml(kept))) == kept


def test_help_lists_every_key_with_its_default():
    text = format_help()
    for key in SETTINGS:
        assert f"  {key} " in text
    assert "default 1.0e-08" in text
    assert set(as_dict(Config())["checkpoint"]) == {"every", "keep", "keep_best", "async"}


def test_intervals():
    assert lies_within("[0, 1)", 0)
    assert not lies_within("[0, 1)", 1)
    assert not lies_within("(0, 1]", 0)
    assert lies_within("(0, 1]", 1)
    assert lies_within("[1, inf)", 10**9)
    assert not lies_within("[1, inf)", float("inf"))


def test_command_line():
    found = cli.parse(["steps=40", "--resume", "seed=3", "--dry-run"], "p", "d")
    assert (found.config.steps, found.config.seed) == (40, 3)
    assert (found.resume, found.dry_run, found.overwrite) == (True, True, False)


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--resume", "--overwrite"], ["--conf", "x"]])
def test_unknown_flags_leave_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse(arguments, "p", "d")
    assert error.value.code == 2


def test_user_error_becomes_exit_code_2(capsys):
    def fail() -> int:
        raise UserError("file x: wrong")

    with pytest.raises(SystemExit) as error:
        cli.run(fail)
    assert error.value.code == 2
    assert capsys.readouterr().err == "error: file x: wrong\n"


def test_help_and_mistakes_need_no_jax():
    code = (
        "import sys; from logra_jax import cli\n"
        "try: cli.parse(sys.argv[1:], 'p', 'd')\n"
        "finally: assert not {'jax', 'flax', 'torch'} & set(sys.modules)"
    )
    for arguments, expected in ((["--help"], 0), (["nonsense=1"], 1)):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert "AssertionError" not in done.stderr


def test_a_run_in_place_of_its_model_is_shown_the_way(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    config = load_config(None, [f"model.path={tmp_path}"])
    with pytest.raises(UserError, match=rf"did you mean {tmp_path}/hf\?"):
        check_paths(config)


def test_the_package_itself_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "logra_jax"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "python -m logra_jax.train --help" in done.stderr
    listed = set(re.findall(r"logra_jax\.(\w+)", done.stderr))
    modules = {
        p.stem for p in Path(cli.__file__).parent.glob("*.py") if "cli.run(main)" in p.read_text(encoding="utf-8")
    }
    assert listed == modules
