"""A run that replaces groups: what it takes from the prompts, and that a stop changes nothing."""

import numpy as np
from interrupted import assert_same, result

from logra_jax import train
from logra_jax.metrics import read_rows

DYNAMIC = "steps=3 rollout.dynamic_sampling=2 eval.every=0 eval.before=false checkpoint.every=0 loss.reference_kl=0"


def test_prompts_go_on_where_replaced_groups_ended(command_settings, seen):
    argv = [*command_settings, *DYNAMIC.split()]
    assert train.main([*argv, "out=whole"]) == 0
    rows, progress = read_rows("whole/metrics.jsonl"), seen.trainer.progress
    drawn = [row["rollout/prompts"] for row in rows]
    assert progress.consumed == sum(drawn)
    assert set(drawn) <= {4, 8, 12}
    assert max(drawn) > 4
    for row in rows:
        # Two answers each: four groups that teach have one right answer each, unless all draws were used up.
        assert row["advantage/zero_share"] == 0 or row["rollout/prompts"] == 12
        assert row["reward/mean"] == 0.5 or row["rollout/prompts"] == 12
        assert 0 <= row["reward/drawn_mean"] <= 1
    wanted = result("whole", progress)
    seen.stop_at = next(i for i, point in enumerate(seen.passed) if point[0] == 1) + 2  # in the second update
    assert train.main(argv) == 143
    assert seen.trainer.progress.step == 1
    seen.stop_at = None
    assert train.main([*argv, "--resume"]) == 0
    assert_same(result("out", seen.trainer.progress), wanted)
    assert np.isfinite([row["loss"] for row in rows]).all()
