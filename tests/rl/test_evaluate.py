"""The evaluation loop with a sampler that plays back known answers, and once with a real one."""

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import TINY

from logra_jax.errors import UserError
from logra_jax.models import CausalLM
from logra_jax.rl.evaluate import evaluate, majority, means_by_task, pass_at_k
from logra_jax.rl.intervals import wilson
from logra_jax.rl.rollout import Rollout, Sampler

END = 9
# Answers by prompt id and sample; 9 ends one, -1 stands for padding.
ANSWERS = {
    10: [[1, 2, END, -1], [9, -1, -1, -1], [3, 4, 5, 6]],
    11: [[2, END, -1, -1], [2, 2, END, -1], [7, 7, 7, END]],
    12: [[5, END, -1, -1], [1, END, -1, -1], [1, 2, END, -1]],
}


class PlayedBack(Sampler):
    """Takes the place of a sampler; remembers what it was asked."""

    def __init__(self):
        object.__setattr__(self, "calls", [])

    def generate(self, params, tokens, lengths, ids, n, seed, update):
        self.calls.append((tokens.shape, ids.tolist(), n, seed, update))
        new = np.array([ANSWERS[i][s] for i in ids.tolist() for s in range(n)], np.int32)
        ends = new == END
        stopped = ends.any(1)
        return Rollout(
            tokens=np.concatenate([np.repeat(tokens, n, axis=0), new], axis=1),
            prompt_lengths=np.repeat(lengths, n),
            lengths=np.where(stopped, ends.argmax(1) + 1, 4).astype(np.int32),
            logprobs=np.zeros(new.shape, np.float32),
            stopped=stopped,
        )


def make_prompts(count=3):
    return SimpleNamespace(
        tokens=np.full((count, 2), 8, np.int32),
        lengths=np.full(count, 2, np.int32),
        ids=np.arange(10, 10 + count, dtype=np.int32),
        texts=[f"q{i}" for i in range(count)],
        columns={"answer": [f"a{i}" for i in range(count)]},
    )


class Table:
    """Rewards by (prompt, answer), 0 where nothing is said."""

    def __init__(self, scores, answers=None):
        self.scores, self.read, self.seen = scores, answers, []

    def grade(self, prompts, completions, columns):
        self.seen.append((list(prompts), list(completions), columns))
        return np.array([self.scores.get(x, 0.0) for x in zip(prompts, completions, strict=True)], np.float32)

    def answers(self, completions):
        return None if self.read is None else [self.read(text) for text in completions]


def decode(ids):
    return "".join(str(i) for i in ids)


@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_counts(batch):
    sampler = PlayedBack()
    scores = {("q0", "12"): 1.0, ("q0", ""): 0.5, ("q1", "2"): 1.5, ("q1", "22"): 1.0, ("q2", "5"): math.nan}
    grader, stops = Table(scores), []
    metrics, intervals, records = evaluate(
        sampler, None, make_prompts(), grader, decode=decode, batch=batch, samples=3, ks=(1, 2, 3), seed=4,
        update=6, after_batch=lambda: stops.append(1),
    )  # fmt: skip
    # The end token and what follows are no part of the text; nothing is cut from an answer that did not end.
    texts = ["12", "", "3456", "2", "22", "777", "5", "1", "12"]
    assert [r.completion for r in records] == texts
    assert [r.prompt for r in records] == ["q0"] * 3 + ["q1"] * 3 + ["q2"] * 3
    assert [r.id for r in records] == [10] * 3 + [11] * 3 + [12] * 3
    assert [r.sample for r in records] == [0, 1, 2] * 3
    assert [r.length for r in records] == [3, 1, 4, 2, 3, 4, 2, 2, 3]
    assert [r.stopped for r in records] == [True, True, False] + [True] * 6
    assert {(r.answer, r.task) for r in records} == {(None, None)}
    want = [1.0, 0.5, 0, 1.5, 1, 0, math.nan, 0, 0]
    np.testing.assert_array_equal([r.reward for r in records], want)
    # One grading call, columns beside their rows.
    (seen,) = grader.seen
    assert seen[1] == texts
    assert seen[2] == {"answer": ["a0"] * 3 + ["a1"] * 3 + ["a2"] * 3}
    # Every call has the same shape, padded rows are counted nowhere.
    assert {call[0] for call in sampler.calls} == {(batch, 2)}
    assert len(sampler.calls) == len(stops) == math.ceil(3 / batch)
    assert {call[2:] for call in sampler.calls} == {(3, 4, 6)}
    assert metrics == {
        "accuracy": pytest.approx(3 / 8),
        "reward": pytest.approx(4.0 / 8),
        "length": pytest.approx((3 + 1 + 4 + 2 + 3 + 4 + 2 + 2 + 3) / 9),
        "cut_off": pytest.approx(1 / 9),
        "dropped": 1.0,
        "pass@1": pytest.approx((1 / 3 + 2 / 3 + 0) / 3),
        "pass@2": pytest.approx((2 / 3 + 1 + 0) / 3),
        "pass@3": 1.0,  # of the prompts with three graded answers, both have a right one
    }
    assert intervals.keys() == {"accuracy", "pass@1", "pass@2", "pass@3"}
    # 1 of 3, 2 of 3, 0 of 2: prompts are so much alike that all answers count as independent.
    assert intervals["accuracy"] == pytest.approx(wilson(3 / 8, 8))
    assert intervals["pass@3"] == pytest.approx(wilson(1.0, 2))  # two prompts, and nothing that they differ in


def test_accuracies_by_task_and_their_mean():
    scores = {("q0", "12"): 1.0, ("q1", "2"): 1.0, ("q1", "22"): 0.9, ("q1", "777"): math.nan}
    scores |= dict.fromkeys([("q2", "5"), ("q2", "1"), ("q2", "12")], math.nan)
    metrics, intervals, records = evaluate(
        PlayedBack(), None, make_prompts(), Table(scores), decode=decode, batch=2, samples=3, tasks=["b", "a", "c"]
    )
    assert [r.task for r in records] == ["b"] * 3 + ["a"] * 3 + ["c"] * 3
    assert intervals.keys() == {"accuracy", "accuracy/a", "accuracy/b", "macro_accuracy"}
    # One prompt each says nothing of how far prompts are apart: answers count as independent.
    assert intervals["accuracy/a"] == pytest.approx(wilson(1 / 2, 2))
    assert intervals["macro_accuracy"] == pytest.approx(wilson((1 / 2 + 1 / 3) / 2, 5))
    # One of three answers to q0, one of two graded ones to q1; no answer to q2, the only prompt of c, was graded.
    assert metrics["accuracy"] == pytest.approx(2 / 5)
    assert metrics["accuracy/a"] == pytest.approx(1 / 2)
    assert metrics["accuracy/b"] == pytest.approx(1 / 3)
    assert "accuracy/c" not in metrics
    assert metrics["macro_accuracy"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    rewards = np.array([[1.0, 0.0], [0.5, np.nan], [0.0, 1.0]])
    assert means_by_task(["x", "y", "x"], rewards, np.isfinite(rewards)) == {"x": 0.5, "y": 0.5}


def test_pass_at_k_is_the_share_of_all_choices():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                choices = list(itertools.combinations(range(n), k))
                share = sum(any(i < c for i in choice) for choice in choices) / len(choices)
                assert pass_at_k(n, c, k) == pytest.approx(share)
    for bad in ((3, 4, 1), (3, -1, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ValueError, match="must hold"):
            pass_at_k(*bad)


def test_majority_is_the_expected_outcome_of_a_vote_with_ties_drawn():
    """Against the vote itself: all orders of the answers, the first of the most frequent texts wins."""
    for answers, right in (
        ("aab", (1, 1, 0)), ("abb", (1, 0, 0)), ("abc", (0, 1, 0)), ("aabb", (1, 1, 0, 0)), ("aabbc", (0, 0, 1, 1, 0)),
        ("abcc", (1, 0, 0, 0)), ("a", (1,)), ("aab", (1, 0, 0)), ("abcd", (1, 1, 0, 0)),
    ):  # fmt: skip
        outcomes = []
        for order in itertools.permutations(range(len(answers))):
            texts = [answers[i] for i in order]
            winner = max(texts, key=texts.count)  # the first one of several
            outcomes.append(right[order[texts.index(winner)]])
        assert majority(list(answers), right) == pytest.approx(np.mean(outcomes))
    # Completions without an answer do not vote, however many they are.
    assert majority([None, None, "a"], [0, 0, 1]) == 1.0
    assert majority([None, None], [0, 0]) == 0.0


def test_majority_over_prompts():
    scores = {("q0", "12"): 1.0, ("q1", "2"): 1.0, ("q1", "22"): 1.0, ("q2", "5"): math.nan}
    grader = Table(scores, answers=lambda text: text[:1] or None)
    metrics, intervals, records = evaluate(
        PlayedBack(), None, make_prompts(), grader, decode=decode, batch=2, samples=3
    )
    assert [r.answer for r in records] == ["1", None, "3", "2", "2", "7", "5", "1", "1"]
    # q0: 1 (right) and 3 have a vote each; q1: 2 has two, both right; an answer to q2 was not graded.
    assert metrics["maj@3"] == pytest.approx((1 / 2 + 1) / 2)
    spread = 3 / 4 * 1 / 4
    assert intervals["maj@3"] == pytest.approx(wilson(3 / 4, min(spread / (2 * 0.25**2 / 4), 6)))
    one, *_ = evaluate(PlayedBack(), None, make_prompts(), grader, decode=decode, batch=2)
    assert not any(name.startswith("maj") for name in one)


def test_nothing_graded():
    grader = Table({(f"q{i}", t): math.nan for i, t in enumerate(["12", "2", "5"])})
    metrics, intervals, _ = evaluate(PlayedBack(), None, make_prompts(), grader, decode=decode, batch=2, ks=(1,))
    assert intervals == {}
    assert math.isnan(metrics["accuracy"])
    assert math.isnan(metrics["reward"])
    assert math.isnan(metrics["pass@1"])
    assert metrics["dropped"] == 3


def test_bad_input():
    with pytest.raises(UserError, match="no prompt"):
        evaluate(PlayedBack(), None, make_prompts(0), Table({}), decode=decode, batch=2)
    for k in (0, 3):
        with pytest.raises(UserError, match=f"pass@{k}"):
            evaluate(PlayedBack(), None, make_prompts(), Table({}), decode=decode, batch=2, samples=2, ks=(k,))


def test_batches_do_not_change_what_is_sampled():
    config = TINY.replace(
        vocab_size=12,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    model = CausalLM(config)
    params = model.init_params(jax.random.key(0))
    sampler = Sampler(model, max_new_tokens=4, end_ids=(END,), vocab_size=10, pad_id=0, temperature=1.0)
    results = [
        evaluate(sampler, params, make_prompts(), Table({}), decode=decode, batch=batch, samples=4) for batch in (2, 3)
    ]
    assert [r.completion for r in results[0].records] == [r.completion for r in results[1].records]
    assert len({r.completion for r in results[0].records}) > 8
