"""Servers at the trainer's weights: what is compared, from when on it is a fault, and what becomes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax.models import CausalLM
from logra_jax.optim import SketchSpec
from logra_jax.rl.following import Following, Probe
from logra_jax.rl.policy import Policy
from logra_jax.rl.update import TrainState
from logra_jax.rl.vllm_engine import VllmEngine

OWN = [np.array([-1.0, -8.0], np.float32), np.array([-2.0], np.float32)]


class Engine(VllmEngine):
    """Servers whose log-probabilities are off by `off`, one number each, until all weights are loaded."""

    def __init__(self, off):
        self.off, self.calls, self.after = off, [], None

    def sync(self, params, version):
        self.calls.append(("sync", version))

    def reload(self, params, version):
        self.calls.append(("reload", version))
        self.off = self.after

    def score(self, prompts):
        assert prompts == [[1, 2, 3], [4, 5]]
        return [[OWN[0] + np.float32(off), OWN[1]] for off in self.off]


class Fixed(Probe):
    prompts = ([1, 2, 3], [4, 5])

    def __init__(self):
        self.prompts = list(type(self).prompts)

    def score(self, train, frozen):
        return OWN


def follow(engine, every=2):
    following, state = Following(engine, SketchSpec(rank=2), Fixed(), every), TrainState({}, (), jnp.zeros(()))
    return lambda version: following.follow(state, {}, {}, version)


def test_a_jump_is_repaired_once(capsys):
    engine = Engine([0.0, 1e-6])
    go = follow(engine)
    first = go(3)  # right after a load, whatever the number
    assert first["sync/drift"] == pytest.approx(1e-6, rel=0.1)
    # Two servers, three tokens each; two tokens of one are off.
    assert first["sync/drift_mean"] == pytest.approx(1e-6 * 2 / 6, rel=0.1)
    floor = 32 * 2.0**-23 * 8
    engine.off = [0.0, 0.9 * floor]
    assert go(4)["sync/drift"] > 3 * first["sync/drift"]
    engine.off = [0.0, -1.1 * floor]
    assert go(5) == {}  # not due
    assert not capsys.readouterr().err
    engine.after = [2e-4, 0.0]
    assert go(6)["sync/drift"] == pytest.approx(1.1 * floor, rel=0.05)
    said = capsys.readouterr().err
    assert said.count("all weights are loaded again") == 1
    assert "after 6 updates" in said
    assert "with all weights loaded it is 0.0002" in said
    # That is what the formats make from now on, up to five times.
    engine.off = [9e-4, 0.0]
    go(8)
    assert not capsys.readouterr().err
    assert [call for call in engine.calls if call[0] == "reload"] == [("reload", 6)]
    engine.off = [np.nan, 0.0]
    go(10)
    assert ("reload", 10) in engine.calls


def test_servers_that_are_lost_are_not_compared():
    engine = Engine([])
    assert follow(engine)(2) == {}
    assert engine.calls == [("sync", 2), ("sync", 2)]  # which brings them back
    assert follow(Engine([0.0]), every=1)(1)["sync/drift"] == 0


def test_prompts_are_scored_over_the_whole_table_at_temperature_1():
    model = CausalLM(TINY, scan_unroll=1)
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf, model.init_params(jax.random.key(1)))
    tokens, lengths = np.array([[0, 7, 5, 9, 11], [3, 4, 5, 6, 8], [0, 0, 0, 0, 2]], np.int32), np.array([4, 5, 1])
    probe = Probe(Policy(model, 20, 0.7, 5), tokens, lengths, jnp.asarray, jnp.asarray)
    assert probe.prompts == [[7, 5, 9, 11], [3, 4, 5, 6, 8], [2]]
    found = probe.score(*SketchSpec(rank=2, names=model.weight_names()).split(params))
    for ids, values in zip(probe.prompts, found, strict=True):
        row = jnp.asarray([ids])
        logprobs = jax.nn.log_softmax(model.logits(params, row, jnp.ones(row.shape, bool))[0], axis=-1)
        expected = np.asarray(logprobs)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(values, expected, atol=1e-5)
