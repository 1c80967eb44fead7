"""Which row each answer gets: nothing lost, nothing twice, little left empty."""

import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.rl.packing import first_fit, pack, read_slots, row_width

PROMPT, NEW, BUDGET, DEVICES = 6, 10, 20, 2


def draw(seed, rows=24):
    """Random lengths; some completions are empty and some rows do not count."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, PROMPT + 1, rows), rng.integers(0, NEW + 1, rows), rng.random(rows) < 0.8


def packed(seed, budget=BUDGET):
    lengths = draw(seed)
    return lengths, pack(*lengths, prompt_width=PROMPT, width=PROMPT + NEW, row=budget, devices=DEVICES)


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_that_counts_lies_in_one_row_in_one_piece(seed):
    (prompts, completions, valid), (source, passes) = packed(seed, BUDGET + seed % 3 * 8)
    tokens = np.arange(24 * (PROMPT + NEW)).reshape(24, -1)  # each its own place
    found = []
    for row in source.reshape(-1, source.shape[-1]):
        held = row[row >= 0]
        for answer in dict.fromkeys(held // tokens.shape[1]):
            (slots,) = np.nonzero((row >= 0) & (row // tokens.shape[1] == answer))
            assert (np.diff(slots) == 1).all()
            real = slice(PROMPT - prompts[answer], PROMPT + completions[answer] - 1)
            np.testing.assert_array_equal(row[slots], tokens[answer, real])
            found.append(answer)
    assert sorted(found) == list(np.flatnonzero(valid & (completions > 0)))
    used = (source >= 0).any(axis=(1, 2))
    assert used[:passes].all()
    assert not used[passes:].any()


def test_the_same_lengths_are_packed_the_same_and_into_the_same_shape():
    shapes = set()
    for seed in range(5):
        (_, first), (_, again) = packed(seed), packed(seed)
        np.testing.assert_array_equal(first.source, again.source)
        assert first.passes == again.passes
        shapes.add((first.source.shape, first.source.dtype, first.passes.shape, first.passes.dtype))
    assert shapes == {((24 // DEVICES, DEVICES, BUDGET), np.dtype("int32"), (), np.dtype("int32"))}


def test_first_fit_by_hand():
    rows, starts = first_fit(np.array([3, 7, 0, 5, 4, 1]), 10)
    # 7 opens a row, 5 the next; 4 goes beside 5, 3 beside 7, 1 where the second row has its last slot.
    np.testing.assert_array_equal(rows, [0, 0, -1, 1, 1, 1])
    np.testing.assert_array_equal(starts, [7, 0, 0, 0, 5, 9])
    with pytest.raises(ValueError, match="11 tokens do not fit a row of 10"):
        first_fit(np.array([3, 11]), 10)


def test_nothing_to_learn_takes_no_pass():
    found = pack(
        np.full(4, 3), np.array([0, 2, 0, 5]), np.array([True, False, True, False]),
        prompt_width=PROMPT, width=PROMPT + NEW, row=BUDGET, devices=DEVICES,
    )  # fmt: skip
    assert found.passes == 0
    assert (found.source == -1).all()


def test_slots_know_what_they_hold_and_what_follows():
    (_, completions, valid), (source, _) = packed(0)
    slots = read_slots(jnp.asarray(source[0]), PROMPT + NEW, PROMPT)
    following = jnp.arange(24 * (PROMPT + NEW)).reshape(24, -1)[:, PROMPT:]
    for place in np.ndindex(*source[0].shape):
        here = source[0][place]
        assert slots.real[place] == (here >= 0)
        if here >= 0:
            answer, column = divmod(here, PROMPT + NEW)
            assert (slots.answer[place], slots.column[place]) == (answer, column)
            assert slots.segments[place] == answer + 1
            assert slots.learns[place] == (column >= PROMPT - 1)
            if column >= PROMPT - 1:
                assert slots.of_completion(following)[place] == here + 1
        else:
            assert slots.segments[place] == 0
            assert not slots.learns[place]
    back = np.asarray(slots.put(jnp.ones(source[0].shape), jnp.zeros((24, NEW))))
    for answer in set(source[0][source[0] >= 0] // (PROMPT + NEW)):
        assert valid[answer]
        np.testing.assert_array_equal(back[answer], np.arange(NEW) < completions[answer])
    assert back.sum() == np.asarray(slots.learns).sum()


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_little_is_padding_where_answers_are_as_long_as_they_are(devices):
    """128 prompts around 150 tokens, answers around 800, lognormal, cut off at 1024 and 3072 as a run does.

    Longest answers fill a row. What is empty is little in the median of 40 batches, and in each of them less than
    with a row for every answer.
    """
    prompt, new, budget, shares = 1024, 3072, 4096, []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        prompts = np.clip(rng.lognormal(np.log(150), 0.5, 128), 10, prompt).astype(int)
        completions = np.clip(rng.lognormal(np.log(800), 0.8, 128), 20, new).astype(int)
        _, passes = pack(
            prompts, completions, np.ones(128, bool),
            prompt_width=prompt, width=prompt + new, row=budget, devices=devices,
        )  # fmt: skip
        used = np.sum(prompts + completions - 1)
        shares.append(1 - used / (passes * devices * budget))
        assert shares[-1] < 1 - used / (128 * (prompt + new - 1))
    assert np.median(shares) < 0.15


@pytest.mark.parametrize("budget", [15, 22, 30, 44, 50, 64])
def test_never_more_slots_than_with_a_row_for_every_answer(budget):
    """Whatever the lengths and the budget; the extreme is that all answers are full."""
    longest = PROMPT + NEW - 1
    row, devices = row_width(budget, longest), 2
    assert budget - longest < row <= budget
    for seed in range(30):
        prompts, completions, valid = draw(seed)
        if seed < 10:  # most of them long
            prompts, completions = PROMPT - prompts // 6, NEW - completions // 5
        if seed == 0:
            prompts, completions, valid = prompts * 0 + PROMPT, completions * 0 + NEW, valid | True
        _, passes = pack(prompts, completions, valid, prompt_width=PROMPT, width=PROMPT + NEW, row=row, devices=devices)
        together = row // longest * devices  # answers of a pass with a row for each
        assert passes <= -(-24 // together)
        assert seed or passes == -(-24 // together)
