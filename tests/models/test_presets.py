"""Presets: the published parameter counts, and what is said about a name or a folder that does not fit."""

import jax
import pytest

from logra_jax.errors import UserError
from logra_jax.models import CausalLM
from logra_jax.models.presets import PRESETS, check_preset, differences

# Parameters of the published checkpoints.
COUNTS = {
    "qwen2.5-math-1.5b": 1_543_714_304,
    "qwen2.5-math-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-27b": 26_895_998_464,  # of the text model
    "qwen3.6-27b": 26_895_998_464,
    "qwen3.8-27b": 26_895_998_464,
    "smollm2-135m-instruct": 134_515_008,
}


def test_every_preset_has_its_published_count():
    found = {
        name: sum(leaf.size for leaf in jax.tree.leaves(CausalLM(shape).abstract_params()))
        for name, shape in PRESETS.items()
    }
    assert found == COUNTS


def test_unknown_name():
    with pytest.raises(UserError, match=r"'Qwen2.5-Math-7' is not known: did you mean qwen2.5-math-7b\?.*qwen3-8b"):
        check_preset("Qwen2.5-Math-7")


def test_differences_are_of_size_alone():
    shape = PRESETS["qwen2.5-math-1.5b"]
    assert differences("qwen2.5-1.5b", shape) == []  # rotary base and length differ
    assert differences("qwen2.5-1.5b", shape.replace(hidden_size=64)) == ["hidden_size 64 (preset: 1536)"]
