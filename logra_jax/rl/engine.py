"""What a rollout engine is to the trainer, and the one built in: the sampler, on the devices that train."""

from typing import Any, Protocol, runtime_checkable

from logra_jax._shapes import Array, Int
from logra_jax.rl.rollout import Rollout, Sampler


@runtime_checkable
class Engine(Protocol):
    """Answers under the weights it was given last."""

    @property
    def version(self) -> int:
        """Of the weights in use; -1 before there are any."""

    def sync(self, params: Any, version: int) -> None:
        """Use these weights from now on: all parameters of the policy, by path."""

    def generate(
        self,
        prompt_tokens: Int[Array, "b p"],
        prompt_lengths: Int[Array, " b"],
        prompt_ids: Int[Array, " b"],
        n: int,
        seed: int,
        update: int,
    ) -> Rollout:
        """n answers to each prompt: see `Sampler.generate`."""

    def close(self) -> None:
        """Let go of the weights, and of processes and memory if there are any. May be called twice."""


class JaxEngine:
    """The sampler as an engine. It shares the trainer's weights: `sync` copies nothing."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.version, self._params = -1, None

    def sync(self, params: Any, version: int) -> None:
        """See `Engine`."""
        self._params, self.version = params, version

    def generate(self, *args: Any, **options: Any) -> Rollout:
        """See `Engine`."""
        if self._params is None:
            raise ValueError("the engine has no weights: call sync first")
        return self.sampler.generate(self._params, *args, **options)

    def close(self) -> None:
        """See `Engine`."""
        self._params = None
