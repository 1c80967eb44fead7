"""One batch of answers in the background: errors come back, and their age is measured by what the servers say."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.errors import UserError
from logra_jax.rl.ahead import Ahead, Drawn, staleness
from logra_jax.rl.rollout import Rollout


def drawn(versions=(0, 0)):
    rows = len(versions)
    rollout = Rollout(
        jnp.ones((rows, 5), jnp.int32), jnp.full(rows, 2), jnp.full(rows, 3), jnp.full((rows, 3), -0.1),
        jnp.ones(rows, bool), jnp.asarray(versions),
    )  # fmt: skip
    rewards, rows, failed = np.array([[np.nan, 1.0]], np.float32), np.array([3], np.int32), np.array([4, 5], np.int32)
    return Drawn(rollout, rewards, rows, consumed=2, mean_reward=0.25, failed=failed)


def test_what_is_drawn_comes_back_and_so_do_errors():
    ahead, main = Ahead(), threading.current_thread()

    def draw():
        assert threading.current_thread() is not main
        return drawn()

    ahead.start(3, draw)
    assert ahead.update == 3
    assert ahead.result().rewards[0, 1] == 1
    assert ahead.update is None

    def fail():
        raise UserError("no server")

    ahead.start(4, fail)
    with pytest.raises(UserError, match="no server"):
        ahead.result()
    ahead.start(5, fail)
    ahead.close()  # nobody wants to know any more


def test_what_is_saved_is_what_was_drawn():
    one = drawn((4, 7))
    other = Drawn.of(one.arrays(), jnp.asarray)
    for name, values in one.arrays().items():
        np.testing.assert_array_equal(other.arrays()[name], values)
        assert other.arrays()[name].dtype == values.dtype


@pytest.mark.parametrize(
    ("versions", "allowed", "found"),
    [((5, 5), 0, 0), ((4, 4), 1, 1), ((4, 5), 1, 1), ((4, 4), 0, None), ((3, 5), 1, None), ((5, 6), 1, None)],
)
def test_staleness_is_measured_and_bounded(versions, allowed, found):
    if found is None:
        with pytest.raises(UserError, match=f"update 5 got answers of weights {min(versions)} to {max(versions)}"):
            staleness(np.array(versions), 5, allowed)
    else:
        assert staleness(np.array(versions), 5, allowed) == found
