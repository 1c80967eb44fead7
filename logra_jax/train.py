"""python -m logra_jax.train: GRPO with gradient sketches, RowAdam and predicted-KL steps (arXiv 2610.06647).

Without arguments it trains the packaged demo. `Trainer.train_on_batch` is the whole algorithm: prompts,
rollout, rewards, advantages, jitted update, policy back to the sampler (which shares weights, or is sent updates).
"""

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_jax import cli, distributed
from logra_jax.config import SETTINGS, Config, as_dict, load_config, resolve_path, to_yaml
from logra_jax.errors import SharedError, UserError
from logra_jax.lock import LOCK, hold
from logra_jax.signals import StopFlag, Stopped
from logra_jax.watchdog import Watchdog

if TYPE_CHECKING:  # --help and wrong settings need no jax
    from logra_jax.answers import Answers
    from logra_jax.checkpoint import Checkpoints
    from logra_jax.metrics import MetricsWriter, NoMetrics
    from logra_jax.rl.update import TrainState
    from logra_jax.run import Run

PATIENCE = 3  # batches that teach nothing, before it is said
FAILED = 1  # exit code of a run that had to stop itself


class NotFinite(Exception):
    """An update whose gradient or prediction was no number, and which was left out for that reason."""


@dataclasses.dataclass
class Progress:
    """Where a run stands, apart from arrays: goes into the checkpoint as JSON.

    step: updates done. consumed: prompts drawn so far, which is the data position. baseline: of the
    running-baseline estimator. pending: metrics of the newest update, while its evaluation is unfinished.
    """

    step: int = 0
    consumed: int = 0
    baseline: float = 0.0
    pending: dict[str, Any] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and train. Returns the exit code: 0 done, 1 stopped by itself, 128 + signal."""
    command = cli.parse(argv, "python -m logra_jax.train", __doc__ or "")
    config, out = command.config, Path(command.config.out)
    try:
        check_output(config, resume=command.resume, overwrite=command.overwrite)
    except UserError as error:
        if not command.dry_run:
            raise
        print(f"note: {error}")
    member = distributed.find(os.environ)
    stacks = out / ("stacks.txt" if member is None else f"stacks-{member.number}.txt")
    writes = not command.dry_run and (member is None or member.number == 0)
    with (
        hold(out) if writes else nullcontext(),  # from here to the end
        StopFlag() as stop,
        Watchdog(config.processes.hang_s, stacks) as watchdog,  # before jax: that takes seconds
    ):
        cli.begin(config, member, stop, watchdog)
        from logra_jax.build import check_files, make_grader
        from logra_jax.fit import out_of_memory, ran_out
        from logra_jax.run import Run

        check_files(config, trains=True)
        with make_grader(config) as grader:
            try:
                run = Run(config, grader, stop.check)
                print(run.summary(), flush=True)
                if command.dry_run:
                    print(f"\n{to_yaml(config)}\ndry run: nothing was trained or written")
                    return 0
                try:
                    # Others may have found the folder empty until here: what follows waits for all processes.
                    prepare = lambda: prepare_output(config, resume=command.resume, overwrite=command.overwrite)
                    distributed.on_first(prepare)
                    distributed.agree(unseen(config))
                    code, message = train(run, out, stop, resume=command.resume)
                except OSError as error:  # a full disk, above all
                    what = error.filename or f"out={out}"
                    raise UserError(f"{what} cannot be read or written: {error.strerror or error}") from error
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                raise out_of_memory(config, error) from error
    if distributed.first():
        print(message, file=sys.stderr if code else sys.stdout)
    return code


def check_output(config: Config, *, resume: bool, overwrite: bool) -> None:
    """Refuse to touch what an earlier run left, unless told to go on from it or to delete it."""
    out = Path(config.out)
    for key, value in (
        ("model.path", config.model.path),
        ("data.train", config.data.train),
        ("data.eval", config.data.eval),
    ):
        if value and out.resolve() in resolve_path(value).resolve().parents:
            raise UserError(f"{key}={value} lies in out={out}, which the run writes to: choose another out")
    is_run = (out / "config.yaml").is_file()
    if resume and not is_run:
        raise UserError(f"--resume: there is no run in out={out}")
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out} is a file: name a folder")
    if resume or not out.exists() or all(entry.name == LOCK for entry in out.iterdir()):
        return
    if not overwrite:
        raise UserError(f"out={out} is not empty: choose another folder, --resume the run in it, or --overwrite it")
    if not is_run:
        raise UserError(f"--overwrite: out={out} holds no config.yaml, so it is no run: delete it yourself")


def prepare_output(config: Config, *, resume: bool, overwrite: bool) -> None:
    """Empty the output folder; that of a run to resume is left as it is until its checkpoint has been read."""
    check_output(config, resume=resume, overwrite=overwrite)  # again: a run may have ended before this one had the lock
    out = Path(config.out)
    if resume:
        report_changes(out / "config.yaml", config)
        return
    for entry in out.iterdir() if overwrite else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()
    write_settings(config)


def unseen(config: Config, patience: float = 90.0) -> UserError | None:
    """What is wrong if this process does not see what the first one has written, in so many seconds.

    Network file systems remember for a minute that a file was not there.
    """
    if distributed.first():
        return None
    deadline = time.monotonic() + patience
    while not Path(config.out, "config.yaml").is_file():
        if time.monotonic() > deadline:
            return UserError(
                f"out={config.out} is another folder here than for process 0: name one on a disk that all share"
            )
        time.sleep(0.5)
    return None


def write_settings(config: Config) -> None:
    """Write config.yaml, which also marks the folder as that of a run."""
    fresh = Path(config.out, "config.yaml.tmp")
    fresh.write_text(to_yaml(config), encoding="utf-8")
    fresh.replace(fresh.with_suffix(""))


def report_changes(file: Path, config: Config) -> None:
    """Say which settings of a resumed run are not those it was started with."""
    try:
        before, now = (as_dict(found) for found in (load_config(file), config))
    except UserError as error:
        print(f"note: the settings of the run to resume cannot be compared: {error}")
        return
    for key in SETTINGS:
        section, _, name = key.rpartition(".")
        old, new = ((found[section] if section else found)[name] for found in (before, now))
        if old != new:
            print(f"note: {key} was {old!r} before, and is {new!r} now")


def train(run: "Run", out: Path, stop: StopFlag, *, resume: bool) -> tuple[int, str]:
    """Train to the end, or until something stops it. Returns exit code and last words."""
    from logra_jax.answers import Answers
    from logra_jax.checkpoint import Checkpoints, steps
    from logra_jax.fit import ran_out
    from logra_jax.metrics import MetricsWriter, NoMetrics

    config = run.config
    settings, log = config.checkpoint, config.log
    with (
        closing(run.ahead),
        closing(run.engine),  # which ends what is drawn ahead
        closing(Checkpoints(out / "checkpoints", settings.keep, settings.keep_best, settings.async_)) as checkpoints,
    ):
        found = None
        # Of what the first process sees: another one's view of a network disk may be older.
        if resume and distributed.on_first(lambda: len(steps(out / "checkpoints"))):
            found = checkpoints.restore(run.abstract_checkpoint())
        if found is None:
            state, progress = run.initial_state(), Progress()
        else:
            state, progress = run.unpack(found.state), Progress(**found.meta)
        if progress.step > config.steps:
            raise UserError(f"--resume: {progress.step} updates are done already, more than steps={config.steps}")
        if resume:
            distributed.on_first(lambda: write_settings(config))
            print(f"resumed after {progress.step} updates", flush=True)
        try:
            run.follow(state, progress.step)
        except Stopped as stopped:  # while servers start
            return stopped.code, f"{stopped}: saved after {progress.step} updates; go on with --resume"
        with closing(
            MetricsWriter(
                out,
                tensorboard=log.tensorboard,
                wandb=log.wandb,
                project=log.project,
                progress=log.progress,
                steps=config.steps,
                resume_step=progress.step - (progress.pending is not None),
            )
            if distributed.first()
            else NoMetrics()
        ) as metrics:
            answers = Answers(run, stop)
            if found is not None and found.host:
                answers.take_over(found.host, progress.consumed)
            trainer = Trainer(run, stop, checkpoints, metrics, state, progress, answers)
            del found, state  # the trainer's alone: the first update writes over it
            try:
                trainer.run_to_end()
                run.export(trainer.state, out / "hf")
                metrics.draw()
            except Stopped as stopped:
                trainer.save(wait=True)
                return stopped.code, f"{stopped}: saved after {progress.step} updates; go on with --resume"
            except NotFinite as error:
                trainer.save(wait=True)
                return FAILED, str(error)
            except (UserError, OSError, SystemExit) as error:
                # All rewards failed, the disk is full, or nobody reads the output any more (rich exits then):
                # keep what has been learnt, if that can be done, which takes all processes.
                if distributed.alone() or isinstance(error, SharedError):
                    with suppress(UserError, OSError):
                        trainer.save(wait=True)
                raise
            except RuntimeError as error:
                # Out of memory in a rollout or an evaluation; an update has taken the state it was given with it.
                if ran_out(error) and trainer.has_state():
                    with suppress(UserError, OSError, RuntimeError):
                        trainer.save(wait=True)
                raise
    return 0, f"done: {config.steps} updates; model in {out / 'hf'}, curves in {out / 'curves.png'}"


class Trainer:
    """The loop and what it carries from update to update."""

    def __init__(
        self,
        run: "Run",
        stop: StopFlag,
        checkpoints: "Checkpoints",
        metrics: "MetricsWriter | NoMetrics",
        state: "TrainState",
        progress: Progress,
        answers: "Answers",
    ):
        self.run, self.config, self.stop = run, run.config, stop
        self.checkpoints, self.metrics = checkpoints, metrics
        self.state, self.progress = state, progress
        self.score: float | None = None  # of the present weights, once they have been evaluated
        self.taught_nothing = 0  # batches in a row
        self.answers = answers

    def run_to_end(self) -> None:
        """Train until config.steps updates are done and saved."""
        if self.progress.pending is not None:
            self.finish_update(self.progress.pending)
        while self.progress.step < self.config.steps:
            before: dict[str, Any] = {}
            if self.progress.step == 0 and self.config.eval.before:
                before = self.evaluate()
            self.train_on_batch(before)
        self.save(wait=True)

    def train_on_batch(self, before: dict[str, Any]) -> None:
        """Sample, grade and learn from one batch of prompts. before: metrics to add to the first update's."""
        from logra_jax.mesh import fetch
        from logra_jax.rl.ahead import staleness

        config, progress, run = self.config, self.progress, self.run
        self.stop.check()
        started = time.perf_counter()
        drawn, found = self.answers.next(self.state, progress.step, progress.consumed)
        rollout, rewards, prompts = drawn.rollout, drawn.rewards, run.prompts.take(drawn.rows)
        self.stop.check()

        tokens = int(np.sum(fetch(rollout.lengths)))
        advantages, progress.baseline = run.advantages(rollout, rewards, progress.baseline)
        progress.consumed += drawn.consumed
        self.answers.used()
        spent = {key: found.pop(key) for key in ("time/rollout_s", "time/reward_s")}
        shared = found | run.rollout_metrics(prompts, rollout, rewards, advantages)
        self.remark(shared)
        batch = run.batch(rollout, advantages, self.state)
        if rollout.versions is not None:
            versions = fetch(rollout.versions)
            shared["rollout/staleness"] = staleness(versions, progress.step, config.rollout.staleness)
        updates = config.loss.updates_per_batch
        # From the step's place among the updates of a batch: 0, unless resumed after a stop between them.
        for _ in range(progress.step % updates, updates):
            learning = time.perf_counter()
            self.state, learned = run.update(self.state, batch, progress.step)
            now = time.perf_counter()
            if not learned.pop("ok"):
                raise NotFinite(
                    f"update {progress.step} was not finite (gradient norm {learned['grad/norm']}, predicted "
                    f"KL {learned.get('kl/predicted')}): the weights were left as they were and saved. "
                    "Look at the newest samples, then --resume, with a smaller step if it happens again"
                )
            times = {**spent, "time/update_s": now - learning, "tokens/s": tokens / (now - started)}
            self.finish_update({"step": progress.step, **shared, **learned, **times, **before})
            before, started, spent = {}, now, dict.fromkeys(spent, 0.0)

    def remark(self, row: dict[str, Any]) -> None:
        """Say so when batch after batch teaches nothing."""
        self.taught_nothing = self.taught_nothing + 1 if row["advantage/zero_share"] == 1 else 0
        if self.taught_nothing == PATIENCE and distributed.first():
            print(
                f"note: in {PATIENCE} batches no answer was better than the others to its prompt (mean reward "
                f"{row['reward/mean']:.3g}), so there was nothing to learn. Look at what is sampled: have answers the "
                f"form that reward.kind={self.config.reward.kind} asks for, and room to end in rollout.max_new_tokens?",
                file=sys.stderr,
                flush=True,
            )

    def finish_update(self, row: dict[str, Any]) -> None:
        """Evaluate where that is due, write the metrics of an update, and save where that is due."""
        config, progress = self.config, self.progress
        # From here on the update is done: stopped in its evaluation, a resumed run begins with that.
        progress.step, progress.pending = int(row["step"]) + 1, row
        last = progress.step == config.steps
        self.score = None
        # A row has room for one evaluation: the first keeps that before training, unless it is also the last.
        regular = bool(config.eval.every) and progress.step % config.eval.every == 0
        if last or (regular and "eval/updates" not in row):
            found = self.evaluate()
            row = row | found
            self.score = found.get("eval/accuracy")
        distributed.on_first(lambda: self.metrics.write(row))
        progress.pending = None
        every, updates = config.checkpoint.every, config.loss.updates_per_batch
        if every and progress.step % every == 0 and progress.step % updates == 0 and not last:
            self.save()

    def evaluate(self) -> dict[str, Any]:
        """Held-out accuracy and what goes with it, as metrics; prints a few answers."""
        if self.run.held_out is None:
            return {}
        self.stop.check()
        found = self.run.evaluate(self.run.params(self.state))
        self.metrics.show_samples(self.progress.step, self.run.samples(found))
        metrics = {f"eval/{name}": value for name, value in found.metrics.items()}
        return metrics | {"eval/updates": self.progress.step}

    def has_state(self) -> bool:
        """Whether the state can still be read: a program that failed may have been given it to write over."""
        import jax

        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of everything that a resumed run needs to go on bit for bit."""
        host = self.answers.to_save(self.progress.step)
        packed, meta = self.run.pack(self.state), dataclasses.asdict(self.progress)
        self.checkpoints.save(self.progress.step, packed, meta, self.score, host)
        if wait:
            self.checkpoints.wait()


if __name__ == "__main__":
    cli.run(main)
