"""python -m logra_jax.train: GRPO with gradient sketches, RowAdam and predicted-KL steps (arXiv 2610.06647).

Without arguments it trains the packaged demo. The loop below is the whole algorithm: prompts, rollout, rewards,
advantages, one jitted update, policy back to the sampler (they share weights).
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from logra_jax import cli
from logra_jax.config import to_yaml
from logra_jax.errors import UserError

FAILED = 1  # exit code of a run that had to stop itself


@dataclasses.dataclass
class Progress:
    """Where a run stands, apart from arrays: goes into the checkpoint as JSON.

    step: updates done. consumed: prompts drawn so far, which is the data position. baseline: of the running-baseline
    estimator. pending: the metrics of the newest update, while its evaluation has not been finished.
    """

    step: int = 0
    consumed: int = 0
    baseline: float = 0.0
    pending: dict[str, Any] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train. Returns the exit code: 0 done, 1 stopped by itself, 128 + n by signal n."""
    command = cli.parse(argv, "python -m logra_jax.train", __doc__ or "")
    config = command.config
    out = Path(config.out)
    if not command.dry_run:
        claim_output(out, resume=command.resume, overwrite=command.overwrite)
    cli.use_compilation_cache()

    from logra_jax.build import Run
    from logra_jax.signals import Stopped, StopFlag

    with StopFlag() as stop, Run(config, stop) as run:
        print(run.summary())
        if command.dry_run:
            print("dry run: nothing was trained or written")
            return 0
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(to_yaml(config))
        trainer = Trainer(run, out, resume=command.resume)
        try:
            return trainer.run_to_end()
        except Stopped as stopped:
            trainer.save()
            print(f"{stopped}: saved after {trainer.progress.step} updates; go on with --resume")
            return stopped.code
        finally:
            trainer.close()


def claim_output(out: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to touch what an earlier run left, unless told to go on from it or to delete it."""
    if not out.exists():
        if resume:
            raise UserError(f"--resume: there is no run in {out}")
        return
    if not out.is_dir():
        raise UserError(f"out={out} is a file: name a folder")
    if resume or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"out={out} is not empty: choose another folder, --resume the run in it, or --overwrite it")
    if not (out / "config.yaml").is_file():
        raise UserError(f"--overwrite: {out} holds no config.yaml, so it is not the folder of a run: delete it yourself")
    shutil.rmtree(out)


class Trainer:
    """The loop and what it carries from update to update."""

    def __init__(self, run: Any, out: Path, *, resume: bool):
        from logra_jax.checkpoint import Checkpoints, steps
        from logra_jax.metrics import MetricsWriter

        config = run.config
        self.run, self.config, self.out = run, config, out
        self.progress = Progress()
        self.checkpoints = Checkpoints(
            out / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best, config.checkpoint.async_
        )
        if resume and steps(out / "checkpoints"):
            found = self.checkpoints.restore(run.abstract_checkpoint())
            self.state, self.progress = run.unpack(found.state), Progress(**found.meta)
            print(f"resumed after {found.step} updates")
        else:
            self.state = run.initial_state()
        self.metrics = MetricsWriter(
            out,
            tensorboard=config.log.tensorboard,
            wandb=config.log.wandb,
            project=config.log.project,
            progress=config.log.progress,
            steps=config.steps,
            resume_step=self.progress.step - (self.progress.pending is not None),
        )
        self.best: float | None = None

    def run_to_end(self) -> int:
        """Train until config.steps updates are done, then export. Returns the exit code."""
        config, progress, run = self.config, self.progress, self.run
        if progress.pending is not None:
            self.finish_update(progress.pending)
        while progress.step < config.steps:
            before: dict[str, Any] = {}
            if progress.step == 0 and config.eval.before:
                before = self.evaluate()
            for row in self.train_on_batch():
                if row is None:
                    return FAILED
                self.finish_update(row | before)
                before = {}
        self.save()
        self.checkpoints.wait()
        run.export(self.state, self.out / "hf")
        self.metrics.draw()
        print(f"done: {config.steps} updates; model in {self.out / 'hf'}, curves in {self.out / 'curves.png'}")
        return 0

    def train_on_batch(self):
        """Sample, grade and learn from one batch of prompts; yields the metrics of each update taken from it."""
        config, progress, run = self.config, self.progress, self.run
        started = time.perf_counter()
        rows = run.order.rows(progress.consumed, config.rollout.prompts)
        prompts = run.prompts.take(rows)
        rollout = run.sample(self.state, prompts, update=progress.step)
        run.stop.check()
        sampled = time.perf_counter()

        rewards = run.grade(prompts, run.texts(rollout))
        run.stop.check()
        graded = time.perf_counter()

        advantages, baseline = run.advantages(rewards, progress.baseline)
        batch = run.batch(rollout, advantages, self.state)
        shared = run.rollout_metrics(rollout, rewards, advantages)
        progress.consumed += len(prompts)
        progress.baseline = baseline
        for turn in range(config.loss.updates_per_batch):
            learning = time.perf_counter()
            self.state, learned = run.update(self.state, batch, progress.step)
            updated = time.perf_counter()
            if not learned.pop("ok"):
                self.save()
                self.checkpoints.wait()
                print(
                    f"update {progress.step} was not finite (gradient norm {learned['grad/norm']}, predicted KL "
                    f"{learned.get('kl/predicted')}): the weights were left as they were and saved. Look at the "
                    "newest samples, then resume with a smaller step.",
                    file=sys.stderr,
                )
                yield None
                return
            first = turn == 0
            spent = (updated - started) if first else (updated - learning)
            yield {
                "step": progress.step,
                **shared,
                **learned,
                "time/rollout_s": sampled - started if first else 0.0,
                "time/reward_s": graded - sampled if first else 0.0,
                "time/update_s": updated - learning,
                "tokens/s": float(np.sum(rollout.lengths)) / spent,
            }

    def finish_update(self, row: dict[str, Any]) -> None:
        """Evaluate where that is due, write the metrics of an update, and save where that is due."""
        config, progress = self.config, self.progress
        # The update is done from here on: stopped during the evaluation, a resumed run begins with the evaluation.
        progress.step, progress.pending = int(row["step"]) + 1, row
        last = progress.step == config.steps
        score = None
        if last or (config.eval.every and progress.step % config.eval.every == 0):
            found = self.evaluate()
            score = found.get("eval/accuracy")
            # The first row keeps the evaluation before training, unless it is the last row as well.
            row = found | row if progress.step == 1 and not last else row | found
        progress.pending = None
        self.metrics.write(row)
        whole_batch = progress.step % config.loss.updates_per_batch == 0
        if config.checkpoint.every and progress.step % config.checkpoint.every == 0 and whole_batch and not last:
            self.save(score)
        self.best = score

    def evaluate(self) -> dict[str, Any]:
        """Held-out accuracy and what goes with it, as metrics; prints a few samples."""
        if self.run.held_out is None:
            return {}
        found = self.run.evaluate(self.state)
        self.metrics.show_samples(self.progress.step, found.records[: self.config.log.samples])
        return {f"eval/{name}": value for name, value in found.metrics.items()} | {
            "eval/updates": self.progress.step
        }

    def save(self, score: float | None = None) -> None:
        """Write a checkpoint of everything that a resumed run needs to go on bit for bit."""
        self.checkpoints.save(
            self.progress.step, self.run.pack(self.state), dataclasses.asdict(self.progress), score
        )

    def close(self) -> None:
        """Finish pending writes."""
        self.checkpoints.close()
        self.metrics.close()


if __name__ == "__main__":
    cli.run(main)
