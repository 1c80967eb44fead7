"""Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2): groups that teach nothing give way to other ones."""

from collections.abc import Callable
from typing import Any

import numpy as np

from logra_jax.mesh import fetch
from logra_jax.rl.advantage import informative
from logra_jax.rl.ahead import Drawn
from logra_jax.rl.rollout import Rollout


def fill_groups(draw: Callable[[int], Drawn], more: int, place: Callable[[np.ndarray], Any]) -> Drawn:
    """A batch whose groups all have different rewards, as far as `more` further batches of prompts allow.

    Groups keep the order in which they were drawn; those beyond a batch are lost, and so are prompts that come again
    after the end of an epoch: their answers would be the same. Where too few are found, groups of the first batch that
    teach nothing fill it up.

    Args:
      draw: draw(i) draws and grades batch number i; all batches are of one size.
      more: batches drawn besides the first, at most.
      place: puts rows on the trainer's devices.
    """
    batches = [draw(0)]
    teaches = [informative(batches[0].rewards)]
    while sum(map(np.sum, teaches)) < len(teaches[0]) and len(batches) <= more:
        before = np.concatenate([batch.rows for batch in batches])
        batches.append(draw(len(batches)))
        teaches.append(informative(batches[-1].rewards) & ~np.isin(batches[-1].rows, before))
    if len(batches) == 1:
        return batches[0]
    groups, n = batches[0].rewards.shape
    found = [(b, g) for b, mask in enumerate(teaches) for g in np.flatnonzero(mask)]
    chosen = found[:groups] + [(0, g) for g in np.flatnonzero(~teaches[0])][: max(groups - len(found), 0)]
    rollouts = [fetch(batch.rollout) for batch in batches]

    def picked(name: str) -> Any:
        if getattr(rollouts[0], name) is None:
            return None
        return place(np.concatenate([getattr(rollouts[b], name)[g * n : (g + 1) * n] for b, g in chosen]))

    return Drawn(
        Rollout(**{name: picked(name) for name in Rollout._fields}),
        np.stack([batches[b].rewards[g] for b, g in chosen]),
        np.array([batches[b].rows[g] for b, g in chosen], np.int32),
        consumed=sum(batch.consumed for batch in batches),
        mean_reward=float(np.mean([batch.mean_reward for batch in batches])),
        failed=np.stack([batch.failed for batch in batches]).sum(axis=0, dtype=np.int32),
    )
