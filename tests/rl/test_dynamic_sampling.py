"""Groups that teach nothing are replaced, in the order in which others are drawn."""

import numpy as np
import pytest

from logra_jax.rl.ahead import Drawn
from logra_jax.rl.dynamic_sampling import fill_groups
from logra_jax.rl.rollout import Rollout

FLAT, TEACHES, LOST = [1.0, 1.0], [0.0, 1.0], [np.nan, 1.0]


def drawer(*batches):
    """draw(i) for batches of three groups; everything in a row says which batch and group it belongs to."""
    drawn = []

    def draw(i):
        drawn.append(i)
        number = np.repeat(10 * i + np.arange(3, dtype=np.int32), 2)
        rollout = Rollout(number[:, None] * np.ones(4, np.int32), number, number, number[:, None] + 0.5, number > 10)
        rewards = np.array(batches[i], np.float32)
        mean, failed = float(np.nanmean(rewards)), np.array([1, 10], np.int32)
        return Drawn(rollout, rewards, 100 + number[::2], consumed=3, mean_reward=mean, failed=failed)

    return draw, drawn


@pytest.mark.parametrize(
    ("batches", "more", "groups"),
    [
        ([[TEACHES] * 3, [TEACHES] * 3], 5, [0, 1, 2]),
        ([[FLAT, TEACHES, LOST], [FLAT, TEACHES, TEACHES]], 5, [1, 11, 12]),
        ([[FLAT, TEACHES, FLAT], [TEACHES, TEACHES, TEACHES]], 5, [1, 10, 11]),
        ([[FLAT, FLAT, TEACHES], [FLAT] * 3, [TEACHES, LOST, FLAT], [TEACHES] * 3], 2, [2, 20, 0]),
        ([[FLAT] * 3, [LOST] * 3], 1, [0, 1, 2]),
        ([[FLAT, TEACHES, LOST], [TEACHES] * 3], 0, [0, 1, 2]),
    ],
)
def test_which_groups_are_learnt_from(batches, more, groups):
    draw, drawn = drawer(*batches)
    found = fill_groups(draw, more, np.asarray)
    used = batches[: len(drawn)]
    assert drawn == list(range(len(drawn)))
    assert found.rows.tolist() == [100 + group for group in groups]
    assert found.rollout.lengths.tolist() == [group for group in groups for _ in range(2)]
    assert found.rollout.tokens.tolist() == [[group] * 4 for group in groups for _ in range(2)]
    assert found.rollout.stopped.tolist() == [group > 10 for group in groups for _ in range(2)]
    assert found.rollout.versions is None
    np.testing.assert_array_equal(found.rewards, [used[group // 10][group % 10] for group in groups])
    assert found.consumed == 3 * len(drawn)
    assert found.failed.tolist() == [len(drawn), 10 * len(drawn)]
    # The mean over the batches of each one's mean, whether its groups are learnt from or not.
    assert found.mean_reward == pytest.approx(np.mean([np.nanmean(batch) for batch in used]))


def test_no_more_is_drawn_than_needed():
    for batches, more, wanted in (
        ([[TEACHES] * 3, [TEACHES] * 3], 5, 1),
        ([[FLAT, TEACHES, TEACHES], [FLAT, FLAT, TEACHES], [TEACHES] * 3], 5, 2),
        ([[FLAT] * 3] * 4, 2, 3),
    ):
        draw, drawn = drawer(*batches)
        fill_groups(draw, more, np.asarray)
        assert len(drawn) == wanted


def test_a_prompt_that_comes_again_teaches_nothing_new():
    draw, drawn = drawer([FLAT, TEACHES, TEACHES], [TEACHES] * 3, [TEACHES] * 3)

    def again(i):  # the second batch has prompts of the first one, in another order
        return draw(i) if i != 1 else draw(i)._replace(rows=np.array([102, 100, 101], np.int32))

    found = fill_groups(again, 5, np.asarray)
    assert drawn == [0, 1, 2]
    assert found.rows.tolist() == [101, 102, 120]
    assert found.consumed == 9
