"""Evaluation: sample answers to held-out prompts, grade them, and count."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from logra_jax.errors import UserError
from logra_jax.rl.intervals import mean_interval, share_interval
from logra_jax.rl.rollout import Sampler


@runtime_checkable
class Prompts(Protocol):
    """N prompts: tokens int32 [N, P] left-padded, lengths and ids int32 [N], texts, and file columns."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def ids(self) -> np.ndarray: ...
    @property
    def texts(self) -> list[str]: ...
    @property
    def columns(self) -> dict[str, list[Any]]: ...


@runtime_checkable
class Grades(Protocol):
    """Rewards of answers."""

    def grade(self, prompts: Sequence[str], completions: Sequence[str], columns: dict[str, list[Any]]) -> np.ndarray:
        """float32 [N]; NaN where an answer could not be graded and is left out."""

    def answers(self, completions: Sequence[str]) -> list[str | None] | None:
        """Texts [N] that equal answers share, None for a completion without one; None: no such texts exist."""


class Record(NamedTuple):
    """One answer.

    prompt: its text; id: the prompt's row in its file, from 0; sample: which of the prompt's answers, from 0.
    completion: without the end token, which `length`, in tokens, counts. reward: NaN where it was left out. answer:
    what votes. stopped: it ended by itself.
    """

    prompt: str
    completion: str
    reward: float
    answer: str | None
    task: str | None
    id: int
    sample: int
    length: int
    stopped: bool


class Evaluation(NamedTuple):
    """Metrics by name, 95 % confidence intervals of shares among them, and answers in the order prompt, sample."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    records: list[Record]


def evaluate(
    sampler: Sampler,
    params: Any,
    prompts: Prompts,
    grader: Grades,
    *,
    decode: Callable[[list[int]], str],
    batch: int,
    samples: int = 1,
    ks: Sequence[int] = (),
    tasks: Sequence[str] | None = None,
    seed: int = 0,
    update: int = 0,
    place: Callable[[np.ndarray], jax.Array | np.ndarray] = np.asarray,
    fetch: Callable[[Any], Any] = jax.device_get,
    after_batch: Callable[[], object] = lambda: None,
) -> Evaluation:
    """Draw `samples` answers per prompt with `sampler`, grade all of them and count.

    decode: token ids to text. batch: prompts per call of the sampler; the last call is filled up with copies
    of the last prompt, which are not counted, so that one program serves all. ks: numbers k for pass@k, each
    at most `samples`. tasks: what each prompt belongs to.
    seed, update: see `Sampler.generate`; keep them fixed to compare policies under equal
    noise. place: puts an array [batch, ...] onto the devices; fetch: gets all of a tree of arrays back.
    after_batch: called after every batch, and may raise to stop.

    Metrics, over graded answers unless said otherwise:
      accuracy: share of rewards of at least 1; reward: mean; pass@k: the unbiased estimate of the chance that
      one of k answers is right, mean over prompts with at least k graded answers; maj@k, k = samples above 1: the
      chance that the majority of k answers is right (see `majority`), mean over the same prompts, if `grader` says
      what an answer is; length: mean tokens, end token included, and cut_off: share that did not end by itself, both
      over all answers; dropped: answers not graded; with tasks, accuracy/TASK for each, and macro_accuracy, the mean
      of those. All of them but reward, length, cut_off and dropped have a confidence interval (`rl.intervals`).

    Raises UserError for an empty set of prompts, and for a k that is not in [1, samples].
    """
    count = len(prompts.texts)
    if count == 0:
        raise UserError("there is no prompt to evaluate on")
    if batch < 1 or samples < 1:
        raise ValueError(f"batch and samples must be at least 1, not {batch} and {samples}")
    for k in ks:
        if not 1 <= k <= samples:
            raise UserError(f"pass@{k} needs 1 <= k <= samples, and samples is {samples}: raise it or leave that k out")

    texts: list[str] = []
    lengths: list[int] = []
    stopped: list[bool] = []
    for start in range(0, count, batch):
        rows = np.minimum(np.arange(start, start + batch), count - 1)
        real = min(batch, count - start) * samples
        rollout = fetch(
            sampler.generate(
                params,
                place(prompts.tokens[rows]),
                place(prompts.lengths[rows]),
                place(prompts.ids[rows]),
                samples,
                seed,
                update,
            )
        )
        completions = rollout.tokens[:real, prompts.tokens.shape[1] :]
        for ids, length, ended in zip(completions, rollout.lengths, rollout.stopped, strict=False):
            texts.append(decode(ids[: int(length) - int(ended)].tolist()))
        lengths.extend(rollout.lengths[:real].tolist())
        stopped.extend(rollout.stopped[:real].tolist())
        after_batch()

    questions = [text for text in prompts.texts for _ in range(samples)]
    columns = {name: [v for v in values for _ in range(samples)] for name, values in prompts.columns.items()}
    rewards = np.asarray(grader.grade(questions, texts, columns), np.float64)
    answers = grader.answers(texts)
    metrics, intervals = summarize(
        rewards.reshape(count, samples), np.array(lengths), np.array(stopped), answers=answers, ks=ks, tasks=tasks
    )
    records = [
        Record(
            questions[i], texts[i], float(rewards[i]), None if answers is None else answers[i],
            None if tasks is None else tasks[i // samples], int(prompts.ids[i // samples]), i % samples, lengths[i],
            stopped[i],
        )
        for i in range(count * samples)
    ]  # fmt: skip
    return Evaluation(metrics, intervals, records)


def summarize(
    rewards: np.ndarray,
    lengths: np.ndarray,
    stopped: np.ndarray,
    *,
    answers: Sequence[str | None] | None,
    ks: Sequence[int],
    tasks: Sequence[str] | None,
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Metrics and intervals of `evaluate`. rewards: [N, samples]; tasks: [N]; the others: [N x samples]."""
    count, samples = rewards.shape
    graded = np.isfinite(rewards)
    right = graded & (rewards >= 1.0)
    metrics = {
        "accuracy": float(right[graded].mean()) if graded.any() else math.nan,
        "reward": float(rewards[graded].mean()) if graded.any() else math.nan,
        "length": float(np.mean(lengths)),
        "cut_off": 1.0 - float(np.mean(stopped)),
        "dropped": float(np.sum(~graded)),
    }
    tries, hits = graded.sum(axis=1), right.sum(axis=1)
    intervals = {"accuracy": share_interval(hits, tries)} if graded.any() else {}
    chances = {
        f"pass@{k}": [pass_at_k(int(n), int(c), k) for n, c in zip(tries, hits, strict=True) if n >= k] for k in ks
    }
    if samples > 1 and answers is not None:
        votes = [answers[i * samples : (i + 1) * samples] for i in range(count)]
        chances[f"maj@{samples}"] = [majority(votes[i], right[i]) for i in range(count) if tries[i] == samples]
    for name, found in chances.items():
        metrics[name] = float(np.mean(found)) if found else math.nan
        if found:
            intervals[name] = share_interval(np.array(found), np.ones(len(found)), len(found) * samples)
    if tasks is not None:
        by_task = means_by_task(tasks, right, graded)
        metrics |= {f"accuracy/{task}": mean for task, mean in by_task.items()}
        metrics["macro_accuracy"] = float(np.mean(list(by_task.values()))) if by_task else math.nan
        rows = [np.array([name == task for name in tasks]) for task in by_task]
        pairs = [(hits[where], tries[where]) for where in rows]
        intervals |= {f"accuracy/{task}": share_interval(*pair) for task, pair in zip(by_task, pairs, strict=True)}
        if pairs:
            intervals["macro_accuracy"] = mean_interval(pairs)
    return metrics, intervals


def means_by_task(tasks: Sequence[str], values: np.ndarray, valid: np.ndarray) -> dict[str, float]:
    """Mean of the valid values [N, samples] of each task, of N prompts' `tasks`, by name; tasks with none left out."""
    found: dict[str, float] = {}
    for task in sorted(set(tasks)):
        rows = np.array([name == task for name in tasks])
        if (chosen := valid[rows]).any():
            found[task] = float(values[rows][chosen].mean())
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n answers, c of them right, hold a right one (arXiv 2107.03374)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"0 <= c <= n and 1 <= k <= n must hold, not n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool | int] | np.ndarray) -> float:
    """Chance that the majority of k answers is right: maj@k of one prompt (arXiv 2203.11171).

    Answers with the same text are one candidate. Completions without one (None) do not vote; if none does, it is 0. Of
    candidates with the same number of votes one is drawn, and of its answers one: this is the expected value.
    """
    votes: dict[str, list[float]] = {}
    for answer, good in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(float(good))
    most = max(map(len, votes.values()), default=0)
    leading = [sum(found) / most for found in votes.values() if len(found) == most]
    return sum(leading) / len(leading) if leading else 0.0
