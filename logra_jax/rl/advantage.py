"""Advantages from rewards, on the host in float64: rewards arrive from the graders as numpy anyway.

A NaN or infinite reward marks a dropped row: it counts in no mean and no deviation, its advantage is 0 and
its `valid` flag is False, so that the loss leaves it out and its denominators do not see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from logra_jax.errors import UserError


class Advantages(NamedTuple):
    """values: float32, same shape as the rewards, 0 at dropped rows; valid: bool, False at dropped rows."""

    values: np.ndarray
    valid: np.ndarray


def grpo(rewards: np.ndarray, *, std: bool = True, eps: float = 1e-4) -> Advantages:
    """Group-relative advantages: (reward - mean) / (deviation + eps) within each group.

    rewards: float [groups, n], one row per prompt. std=False only takes the mean off (the "Dr. GRPO" form).
    The deviation is that of the population. Groups of equal rewards, and groups with fewer than two valid rows, get
    exactly 0. Raises UserError for n < 2.
    """
    values, valid = _groups(rewards, "grpo")
    out = np.zeros_like(values)
    for i, keep in _informative(values, valid):
        group = values[i, keep]
        centred = group - group.mean()
        out[i, keep] = centred / (group.std() + eps) if std else centred
    return Advantages(out.astype(np.float32), valid)


def leave_one_out(rewards: np.ndarray) -> Advantages:
    """Reward minus the mean reward of the *other* valid rows of the group (RLOO, arXiv 2402.14740).

    rewards: float [groups, n]. Equal rewards, and groups with fewer than two valid rows, get exactly 0.
    Raises UserError for n < 2.
    """
    values, valid = _groups(rewards, "leave_one_out")
    out = np.zeros_like(values)
    for i, keep in _informative(values, valid):
        group = values[i, keep]
        out[i, keep] = group - (group.sum() - group) / (group.size - 1)
    return Advantages(out.astype(np.float32), valid)


def running_baseline(
    rewards: np.ndarray, baseline: float, *, weight: float = 0.1, failure_reward: float | None = -0.01
) -> tuple[Advantages, float]:
    """Outcome minus a running average over *previous* batches (arXiv 2610.06647, main runs).

    rewards: float, any shape. The outcome is 1 where the reward is at least 1, else `failure_reward`; with
    None it is the reward itself. Returns the advantages and the next batch's baseline, (1 - weight) *
    baseline + weight * mean(outcome); a batch without a valid row leaves it alone. The baseline starts at 0
    and belongs in the checkpoint.
    """
    values = np.asarray(rewards, np.float64)
    valid = np.isfinite(values)
    outcome = values if failure_reward is None else np.where(values >= 1.0, 1.0, failure_reward)
    advantages = np.where(valid, outcome - baseline, 0.0).astype(np.float32)
    if valid.any():
        baseline = (1.0 - weight) * baseline + weight * float(outcome[valid].mean())
    return Advantages(advantages, valid), float(baseline)


def overlong_penalty(lengths: np.ndarray, longest: int, span: int) -> np.ndarray:
    """What an answer's length takes off its reward: the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).

    lengths: tokens, any shape; longest: tokens an answer may have; span: the last tokens before it, in which the
    penalty falls from 0 to -1 linearly. float32, shape of `lengths`; 0 everywhere for span 0.
    """
    over = np.asarray(lengths, np.float64) - (longest - span)
    return (
        -np.clip(over / max(span, 1), 0.0, 1.0).astype(np.float32) if span else np.zeros(np.shape(lengths), np.float32)
    )


def informative(rewards: np.ndarray) -> np.ndarray:
    """bool [groups]: which groups of rewards [groups, n] can teach, with two valid rows or more that are not all equal.

    Equality is asked of the rewards and not of the advantages: the rounding error of the mean, divided by an
    almost zero deviation, would pass as an advantage of order one.
    """
    valid = np.isfinite(rewards)
    most = np.where(valid, rewards, -np.inf).max(axis=1)
    return (valid.sum(axis=1) >= 2) & (most != np.where(valid, rewards, np.inf).min(axis=1))


def zero_share(advantages: Advantages) -> float:
    """Share of the valid rows whose advantage is exactly 0: they teach nothing. NaN without a valid row."""
    kept = advantages.values[advantages.valid]
    return float(np.mean(kept == 0.0)) if kept.size else float("nan")


def _groups(rewards: np.ndarray, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(rewards, np.float64)
    if values.ndim != 2:
        raise ValueError(f"rewards must be [groups, n], not of shape {values.shape}")
    if values.shape[1] < 2:
        raise UserError(
            f"advantage.estimator '{estimator}' compares responses to one prompt, but rollout.generations "
            f"(num_generations) is {values.shape[1]}: set it to 2 or more, or use 'running_baseline'"
        )
    return values, np.isfinite(values)


def _informative(values: np.ndarray, valid: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Number and valid rows of the groups that can teach."""
    for i in np.flatnonzero(informative(values)):
        yield int(i), valid[i]
