"""What training does where memory is short: refuses before it loads anything, warns, or says what to change."""

import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from logra_jax import build, cli, distributed, fit, train
from logra_jax.config import load_config
from logra_jax.footprint import Footprint
from logra_jax.gpus import GIB
from logra_jax.rl.rollout import Sampler


@pytest.fixture
def footprint(monkeypatch):
    """A run that needs 20 GiB for the update (12 of temporaries) and 15 + 1 for the rollout, on a full device."""
    gib = Footprint(weights=7, optimizer=1, gradients=1, temporaries=12, kv_cache=4, update=20, rollout=15, reference=0)
    asked = []

    def measure(config, *rest, **more):
        asked.append(config)
        return Footprint(**{key: value * GIB for key, value in vars(gib).items()})

    monkeypatch.setattr("logra_jax.footprint.measure", measure)
    return asked


def check(limit, monkeypatch, **model):
    monkeypatch.setattr(fit, "memory_limit", lambda devices: limit)
    config = load_config(None)
    config = replace(config, model=replace(config.model, **model))
    fit.check(config, None, 32, 7, jax.devices()[:1])
    return config


def test_a_run_that_cannot_fit_says_what_is_too_large(footprint, monkeypatch):
    with pytest.raises(fit.UserError) as refused:
        check(18 * GIB, monkeypatch, remat="none")
    for part in (
        "1 x cpu has 18.00 GiB for this run", "it needs 20.00", "nothing was loaded", "2.00 GiB too large",
        "the largest part is the temporaries of the update (12.00 GiB)", "set loss.micro_batch=1", "model.remat=full",
    ):  # fmt: skip
        assert part in str(refused.value)
    assert footprint[0].data.max_prompt_length == 7  # prompts as long as those of the run


def test_advice_is_what_the_settings_take(footprint, monkeypatch, capsys):
    packed = ["data.max_prompt_length=512", "rollout.max_new_tokens=1024", "loss.token_budget=4096"]
    config = load_config(None, packed)
    monkeypatch.setattr(fit, "memory_limit", lambda devices: 20.5 * GIB)
    fit.check(config, None, 32, 200, jax.devices()[:1])  # prompts of 200 tokens, of the 512 there may be
    monkeypatch.setattr(fit, "memory_limit", lambda devices: 18 * GIB)
    with pytest.raises(fit.UserError) as refused:
        fit.check(config, None, 32, 200, jax.devices()[:1])
    for said in (capsys.readouterr().err, str(refused.value)):
        (advice,) = re.findall(r"set (loss\.token_budget=\d+)", said)
        assert load_config(None, [*packed, advice]).loss.token_budget == 1536


def test_processes_refuse_together_and_sample_in_one_layout(footprint, monkeypatch):
    agreed = []
    monkeypatch.setattr(distributed, "agree", agreed.append)
    monkeypatch.setattr(distributed, "from_first", lambda values: values + 4)  # there it is not 0
    monkeypatch.setattr(fit, "memory_limit", lambda devices: 24 * GIB)
    assert fit.check(load_config(None), None, 32, 7, jax.devices()[:1]) == 4
    check(18 * GIB, monkeypatch)
    assert [error and "DOES NOT FIT" in str(error) for error in agreed] == [None, True]


def test_training_samples_in_the_layout_that_fits(command_settings, monkeypatch):
    groups, make = [], build.make_sampler
    monkeypatch.setattr(build, "make_sampler", lambda *args: groups.append(args[-1]) or make(*args))
    for found in (None, 0):
        monkeypatch.setattr(fit, "check", lambda *_, found=found: found)
        assert train.main([*command_settings, "mesh.fsdp=2", "--dry-run"]) == 0
    assert groups[0] > 0  # less is moved
    assert groups[1:] == [0]


def test_a_tight_fit_is_a_warning(footprint, monkeypatch, capsys):
    check(20.5 * GIB, monkeypatch)
    said = capsys.readouterr()
    assert "has 20.50 GiB for this run, it needs 20.00" in said.out
    assert "warning: only 0.50 GiB are left" in said.err
    check(24 * GIB, monkeypatch)
    assert capsys.readouterr().err == ""


def test_a_cpu_has_no_limit(footprint):
    fit.check(load_config(None), None, 32, 7, jax.devices())
    assert fit.memory_limit(jax.devices()) is None
    assert not footprint


def test_training_refuses_before_it_loads(command_settings, footprint, monkeypatch, capsys):
    monkeypatch.setattr(fit, "memory_limit", lambda devices: 18 * GIB)
    monkeypatch.setattr("logra_jax.models.load_hf", lambda *args, **rest: pytest.fail("weights were loaded"))
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main(command_settings))
    assert "DOES NOT FIT" in capsys.readouterr().err
    assert not Path("out").exists()


def test_running_out_of_memory_is_explained_and_saved(command_settings, monkeypatch, capsys):
    def exhausted(*args, **rest):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.\n more")

    monkeypatch.setattr(Sampler, "generate", exhausted)
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main([*command_settings, "data.eval=null"]))
    said = capsys.readouterr().err
    assert "a device ran out of memory: Out of memory allocating 12 bytes. What helps: lower rollout.prompts=" in said
    assert "--resume" in said
    assert Path("out/checkpoints/0").is_dir()


def test_other_errors_of_jax_stay_what_they_are():
    assert not fit.ran_out(RuntimeError("RESOURCE_EXHAUSTED"))
    assert not fit.ran_out(jax.errors.JaxRuntimeError("INTERNAL: no"))


@pytest.mark.parametrize(
    ("fraction", "before", "after"),
    [
        (None, {}, {"XLA_CLIENT_MEM_FRACTION": "0.95"}),
        (0.5, {}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        (None, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.7"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.7"}),
        (0.5, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.7"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
    ],
)
def test_share_of_a_gpu(fraction, before, after, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(before))
    cli.use_memory(fraction)
    assert os.environ == after
