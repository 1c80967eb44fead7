"""Evaluation: sample answers to held-out prompts, grade them, and count."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from logra_jax.errors import UserError
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


class Record(NamedTuple):
    """One answer: the prompt's text, the answer's text without the end token, its reward (NaN: left out)."""

    prompt: str
    completion: str
    reward: float


class Evaluation(NamedTuple):
    """Metrics by name, and all answers in the order prompt, sample."""

    metrics: dict[str, float]
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
      one of k answers is right, mean over prompts with at least k graded answers; length: mean tokens, end
      token included, and cut_off: share that did not end by itself, both over all answers; dropped: answers
      not graded; with tasks, accuracy/TASK for each, and macro_accuracy, the mean of those.

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
    graded = np.isfinite(rewards)
    right = graded & (rewards >= 1.0)
    kept = rewards[graded]
    metrics = {
        "accuracy": float(right[graded].mean()) if kept.size else math.nan,
        "reward": float(kept.mean()) if kept.size else math.nan,
        "length": float(np.mean(lengths)),
        "cut_off": 1.0 - float(np.mean(stopped)),
        "dropped": float(np.sum(~graded)),
    }
    tries, hits = (x.reshape(count, samples).sum(axis=1) for x in (graded, right))
    for k in ks:
        chances = [pass_at_k(int(n), int(c), k) for n, c in zip(tries, hits, strict=True) if n >= k]
        metrics[f"pass@{k}"] = float(np.mean(chances)) if chances else math.nan
    if tasks is not None:
        by_task = means_by_task(tasks, right.reshape(count, samples), graded.reshape(count, samples))
        metrics |= {f"accuracy/{task}": mean for task, mean in by_task.items()}
        metrics["macro_accuracy"] = float(np.mean(list(by_task.values()))) if by_task else math.nan
    records = [Record(*row) for row in zip(questions, texts, rewards.tolist(), strict=True)]
    return Evaluation(metrics, records)


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
