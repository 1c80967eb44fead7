"""Servers kept at the trainer's weights, and compared with them now and then."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from logra_jax._shapes import Int
from logra_jax.mesh import fetch
from logra_jax.optim import SketchSpec
from logra_jax.optim.spec import leaves_with_paths
from logra_jax.rl.batch import Batch
from logra_jax.rl.policy import Policy, make_score
from logra_jax.rl.shared_engine import SharedEngine
from logra_jax.rl.update import Sent, TrainState
from logra_jax.rl.vllm_engine import VllmEngine

Tree = Any

PROBE_TOKENS = 256  # of a prompt, at most
ROUNDINGS = 32  # of float32, by which log-probabilities that are sums in another order may differ
JUMP = 5.0  # times the gap right after a load, when weights were the same; in bfloat16 it doubles by itself


class Gap(NamedTuple):
    """Absolute differences of log-probabilities, nats: the largest and the mean, and the largest of the values."""

    largest: float
    mean: float
    scale: float

    @property
    def bound(self) -> float:
        """Up to where a gap of other weights is no sign of a fault, if this one is that of equal weights.

        32 float32 roundings of the largest log-probability, and no less than five times this gap: number formats that
        are coarser on one side show in it.
        """
        return max(ROUNDINGS * float(np.finfo(np.float32).eps) * self.scale, JUMP * self.largest)


class Probe:
    """Log-probabilities of fixed prompts at temperature 1, each token given those before it, under any weights.

    Args:
      policy: the model; prompts are scored over its whole table, as servers do.
      tokens, lengths: left-padded prompts ``[n, p]``; the first 256 tokens of each are used.
      place, everywhere: put rows, and what has none, on the trainer's devices.
    """

    def __init__(
        self,
        policy: Policy,
        tokens: Int[np.ndarray, "n p"],
        lengths: Int[np.ndarray, " n"],
        place: Callable[[np.ndarray], jax.Array],
        everywhere: Callable[[np.ndarray], jax.Array],
    ):
        self.prompts = [
            row[len(row) - length :][:PROBE_TOKENS].tolist() for row, length in zip(tokens, lengths, strict=True)
        ]
        count, width = len(self.prompts), max(map(len, self.prompts))
        rows, ends = np.zeros((count, width), np.int32), np.array([len(p) - 1 for p in self.prompts], np.int32)
        for row, prompt in zip(rows, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        nothing = np.zeros(count, bool)
        # The first token is the prompt, the others are the answer.
        self._rows = Batch(
            tokens=place(rows),
            prompt_lengths=place(np.ones(count, np.int32)),
            lengths=place(ends),
            stopped=place(nothing),
            valid=place(nothing),
            advantages=place(np.zeros(count, np.float32)),
            rollout_logprobs=place(np.zeros((count, width - 1), np.float32)),
            probe=everywhere(np.zeros(0, np.int32)),
            check=everywhere(np.zeros((), bool)),
        )
        config = policy.model.config
        self._score = make_score(policy._replace(vocab_size=config.vocab_size, temperature=1.0, prompt_width=1), 0)

    def score(self, train: Tree, frozen: Tree) -> list[np.ndarray]:
        """Of every prompt the log-probabilities of its tokens but the first."""
        found = fetch(self._score(train, frozen, self._rows))
        return [row[: len(prompt) - 1] for row, prompt in zip(found, self.prompts, strict=True)]


class Following:
    """Brings the servers of an engine to the trainer's weights, and sees whether they have arrived there.

    Args:
      probe: what is compared; None: nothing is.
      every: updates between comparisons.
    """

    def __init__(self, engine: VllmEngine | SharedEngine, spec: SketchSpec, probe: Probe | None, every: int):
        self._engine, self._spec, self._probe, self._every = engine, spec, probe, every
        self._unsent: tuple[int, Sent] | None = None
        self._reference: Gap | None = None

    def give(self, state: TrainState, version: int, sent: Sent, later: bool) -> dict[str, Any]:
        """Send the update that led to this state, or keep it for `follow`. Returns metrics."""
        if later:
            self._unsent = version, sent
            return {}
        others = {path: leaf for path, leaf in leaves_with_paths(state.train) if path not in sent.factors}
        return self._engine.advance(
            version,
            sent.factors,
            fetch(others),
            seed=self._spec.seed,
            drawn=int(self._spec.redraw(sent.before)),
            decay=float(sent.decay),
        )

    def follow(self, state: TrainState, frozen: Tree, params: Tree, version: int) -> dict[str, Any]:
        """Bring the servers, which are drawing nothing, to these weights. Returns what that took, as metrics."""
        found, unsent, self._unsent = dict[str, Any](), self._unsent, None
        if unsent is not None:
            found = self.give(state, *unsent, later=False)
        self._engine.sync(params, version)
        if self._probe is not None and (self._reference is None or version % self._every == 0):
            own = self._probe.score(state.train, frozen)
            if (gap := self._gap(own)) is not None:
                self._judge(gap, own, params, version)
                found |= {"sync/drift": gap.largest, "sync/drift_mean": gap.mean}
            self._engine.sync(params, version)  # for servers that were lost meanwhile
        return found

    def _gap(self, own: list[np.ndarray]) -> Gap | None:
        """Between these log-probabilities and those of the servers; None if none of them answered."""
        assert self._probe is not None
        theirs, mine = self._engine.score(self._probe.prompts), np.concatenate(own)
        if not theirs or not mine.size:
            return None
        apart = np.abs(np.stack([np.concatenate(one) for one in theirs]) - mine)
        return Gap(float(apart.max()), float(apart.mean()), float(np.abs(mine).max()))

    def _judge(self, gap: Gap, own: list[np.ndarray], params: Tree, version: int) -> None:
        """Load all weights if the gap shows a fault. The first one, after a load, is what others are held against."""
        if self._reference is None:
            self._reference = gap
        bound = self._reference.bound
        if gap.largest <= bound:
            return
        _warn(
            f"after {version} updates the servers' log-probabilities of fixed prompts are up to {gap.largest:.2g} nats "
            f"from the trainer's, more than {bound:.2g}: all weights are loaded again"
        )
        self._engine.reload(params, version)
        self._reference = self._gap(own)
        if self._reference is not None and not self._reference.largest <= bound:
            _warn(
                f"with all weights loaded it is {self._reference.largest:.2g}, which from now on counts as what number "
                "formats make: see whether the servers have the trainer's model"
            )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
