"""Advantages: golden numbers, the definition in a few lines of numpy, and degenerate groups."""

import json
import math

import numpy as np
import pytest

from logra_jax.errors import UserError
from logra_jax.rl.advantage import (
    Advantages,
    grpo,
    informative,
    leave_one_out,
    overlong_penalty,
    running_baseline,
    zero_share,
)


@pytest.fixture(scope="module")
def expected(golden):
    return json.loads((golden / "update_seed7.json").read_text())["advantages"]


def test_golden_group_estimators(expected):
    rewards = np.array(expected["rewards"])
    for got, want in [
        (grpo(rewards, eps=1e-6), expected["grpo"]),
        (grpo(rewards, std=False), expected["group_mean"]),
        (leave_one_out(rewards), expected["leave_one_out"]),
    ]:
        assert got.values.dtype == np.float32
        assert got.valid.all()
        np.testing.assert_allclose(got.values, want, rtol=1e-6, atol=0)


def test_golden_running_baseline(expected):
    case, baseline = expected["running_baseline"], 0.0
    for batch, want, after in zip(case["batches"], case["advantages"], case["baseline_after"], strict=True):
        got, baseline = running_baseline(
            np.array(batch), baseline, weight=case["weight"], failure_reward=case["failure_reward"]
        )
        np.testing.assert_allclose(got.values, want, rtol=1e-6)
        assert baseline == pytest.approx(after, rel=1e-12)


def test_running_baseline_of_the_rewards_as_they_are():
    got, baseline = running_baseline(np.array([[0.25, math.nan], [2.0, -0.5]]), 0.5, failure_reward=None)
    np.testing.assert_allclose(got.values, [[-0.25, 0.0], [1.5, -1.0]], rtol=1e-6)
    assert baseline == pytest.approx(0.9 * 0.5 + 0.1 * 1.75 / 3, rel=1e-12)


@pytest.mark.parametrize("reward", [0.6, 0.9, 0.1, 1 / 3])
@pytest.mark.parametrize("n", [2, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_are_exactly_zero(reward, n, dtype):
    rewards = np.full((2, n), reward, dtype)
    for got in (grpo(rewards, eps=1e-8), grpo(rewards, std=False), leave_one_out(rewards)):
        assert (got.values == 0.0).all()
        assert zero_share(got) == 1.0


def test_deviation_of_the_population():
    population = grpo(np.array([[1.0, 0.0, 0.0, 0.0]], np.float32), eps=0.0)
    np.testing.assert_allclose(population.values, [[3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)]], rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_dropped_rows_change_nothing_for_the_others(bad):
    whole = np.array([[1.0, 0.0, 0.0, 1.0, 0.5], [1.0, 0.2, 0.0, 0.0, 0.0]])
    holed = np.insert(whole, 2, bad, axis=1)
    for estimator in (grpo, leave_one_out, lambda r: grpo(r, std=False)):
        got, want = estimator(holed), estimator(whole)
        assert (got.valid == np.array([True, True, False, True, True, True])).all()
        assert (got.values[:, 2] == 0.0).all()
        np.testing.assert_array_equal(np.delete(got.values, 2, axis=1), want.values)
    (got, after), (want, want_after) = (running_baseline(r, 0.3) for r in (holed, whole))
    np.testing.assert_array_equal(np.delete(got.values, 2, axis=1), want.values)
    assert (got.values[:, 2] == 0.0).all()
    assert not got.valid[:, 2].any()
    assert after == want_after


def test_fewer_than_two_valid_rows_give_zero_without_warning():
    rewards = np.array([[1.0, math.nan, math.nan], [math.nan] * 3, [1.0, 0.0, math.nan]])
    for got in (grpo(rewards), leave_one_out(rewards)):
        assert (got.values[:2] == 0.0).all()
        assert (got.values[2, :2] != 0.0).all()
        assert got.valid.tolist() == np.isfinite(rewards).tolist()
    got, baseline = running_baseline(rewards[1], 0.25)
    assert baseline == 0.25
    assert (got.values == 0.0).all()


def test_group_of_one_is_refused_by_group_relative_estimators():
    for estimator in (grpo, leave_one_out):
        with pytest.raises(UserError, match=r"rollout\.generations \(num_generations\) is 1"):
            estimator(np.ones((4, 1)))
    got, _ = running_baseline(np.ones((4, 1)), 0.0)
    assert (got.values == 1.0).all()


def test_outcome_is_all_or_nothing():
    got, baseline = running_baseline(np.array([0.999, 1.0, 1.5, 0.0]), 0.0)
    np.testing.assert_allclose(got.values, [-0.01, 1.0, 1.0, -0.01], rtol=1e-6)
    assert baseline == pytest.approx(0.1 * (1.98 / 4))


def test_groups_that_can_teach():
    rewards = np.array([[0, 0, 0], [0, 1, 0], [math.nan, 1, 0], [math.nan, 1, 1], [math.nan, math.nan, 1], [1, 1, 1]])
    assert informative(rewards).tolist() == [False, True, True, False, False, False]


def test_overlong_penalty_of_the_paper():
    """DAPO's three cases: nothing up to longest - span, then linear, then -1."""
    got = overlong_penalty(np.array([[0, 12, 13], [14, 16, 20]]), longest=16, span=4)
    np.testing.assert_allclose(got, [[0, 0, -0.25], [-0.5, -1, -1]], atol=1e-7)
    assert got.dtype == np.float32
    assert not overlong_penalty(np.array([1, 16]), longest=16, span=0).any()


def test_zero_share_counts_valid_rows_only():
    values = np.array([[0.0, 1.0, 0.0, -1.0]], np.float32)
    assert zero_share(Advantages(values, np.array([[False, True, True, True]]))) == pytest.approx(1 / 3)
    assert math.isnan(zero_share(Advantages(values, np.zeros((1, 4), bool))))
