"""Confidence intervals against published ones, their definition, and how often they hold the truth."""

import math

import numpy as np
import pytest

from logra_jax.rl.intervals import Z, clustered_error, mean_interval, share_interval, wilson


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right, trials, low, high):
    """Newcombe, Stat. Med. 17, 1998, table I, method 3."""
    found = share_interval(np.arange(trials) < right, np.ones(trials))  # one answer to each prompt
    assert found == pytest.approx((low, high), abs=6e-5)
    assert wilson(right / trials, trials) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize(("share", "trials"), [(0.5, 10), (0.9, 3.7), (1.0, 12), (0.0, 1), (0.31, 1e4)])
def test_wilson_is_where_the_distance_is_z_standard_errors(share, trials):
    for x in wilson(share, trials):
        assert abs(share - x) == pytest.approx(Z * math.sqrt(x * (1 - x) / trials), abs=1e-9)
    assert math.erf(Z / math.sqrt(2)) == pytest.approx(0.95, abs=1e-12)


def test_clusters_that_agree_count_as_one_answer_each():
    hits = np.array([4, 0, 4, 4, 0, 4])  # four answers each, all alike
    assert share_interval(hits, np.full(6, 4)) == pytest.approx(wilson(4 / 6, 6))
    # As good as the mean of six numbers: their standard deviation over sqrt 6.
    assert clustered_error(hits, np.full(6, 4)) == pytest.approx(np.std(hits / 4) / math.sqrt(6))


def test_clusters_of_different_sizes():
    # 7 of 10 are right; residuals 3 - 2.1, 0 - 1.4, 4 - 3.5 by hand.
    error = math.sqrt(0.9**2 + 1.4**2 + 0.5**2) / 10
    hits, tries = np.array([3, 0, 4, 0]), np.array([3, 2, 5, 0])
    assert clustered_error(hits, tries) == pytest.approx(error)
    assert share_interval(hits, tries) == pytest.approx(wilson(0.7, 0.7 * 0.3 / error**2))


def test_where_nothing_differs_between_prompts():
    assert share_interval(np.full(5, 3), np.full(5, 3)) == pytest.approx(wilson(1.0, 5))
    assert share_interval(np.full(5, 2), np.full(5, 4)) == pytest.approx(wilson(0.5, 20))  # no more than the answers
    assert share_interval(np.array([3, 0]), np.array([3, 0])) == wilson(1.0, 1)  # no answer to the second was graded


def test_the_mean_of_tasks_adds_up_the_variances_of_each():
    rng = np.random.default_rng(0)
    groups = [(rng.binomial(4, chance, n), np.full(n, 4)) for chance, n in ((0.2, 30), (0.7, 50), (0.5, 20))]
    shares = [hits.mean() / 4 for hits, _ in groups]
    variance = sum(np.var(hits / 4) / len(hits) for hits, _ in groups) / 9
    share = np.mean(shares)
    assert mean_interval(groups) == pytest.approx(wilson(share, share * (1 - share) / variance))


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Prompts of all difficulties, five answers each: an interval that takes answers for independent is too narrow."""
    rng, runs, truth = np.random.default_rng(1), 2000, 2 / 3
    chances = rng.beta(1.0, 0.5, (runs, 60))
    hits, tries = rng.binomial(5, chances), np.full(60, 5)
    inside = lambda pair: pair[0] <= truth <= pair[1]
    clustered = np.mean([inside(share_interval(row, tries)) for row in hits])
    naive = np.mean([inside(wilson(row.sum() / 300, 300)) for row in hits])
    # Three standard errors of a share of 0.95 in 2,000 runs are 0.015.
    assert 0.93 < clustered < 0.97
    assert naive < 0.8
