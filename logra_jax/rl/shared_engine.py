"""Servers as the rollout engine of several processes: the first one speaks to them, and all get the same rows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from logra_jax import distributed
from logra_jax._shapes import Array
from logra_jax.errors import SharedError, UserError
from logra_jax.mesh import fetch
from logra_jax.rl.rollout import Rollout, Sampler
from logra_jax.rl.vllm_engine import VllmEngine

DONE, FAILED, WRITE = range(3)  # what the first process tells the others, who wait for it


class SharedEngine:
    """A `VllmEngine` of process 0. All processes call everything, in the same order and with the same arguments.

    What process 0 fails of is raised on all. All of them write the weights for the servers together, whenever process
    0 says so: their devices hold parts of them.

    Args:
      make: make(write=..., place=...) makes the engine, on process 0.
      write: write(params, folder), called by all; the first one writes.
      place: puts rows, which all processes have then, on the devices.
      sampler: see `VllmEngine`.

    Raises:
      UserError: see `VllmEngine`.
    """

    def __init__(
        self,
        make: Callable[..., VllmEngine],
        write: Callable[[Any, Path], None],
        place: Callable[[np.ndarray], jax.Array],
        sampler: Sampler,
    ):
        self.version, self._params = -1, None
        self._write, self._place, self._sampler = write, place, sampler
        self._engine: VllmEngine | None = None

        def begin() -> None:
            self._engine = make(write=self._write_together, place=np.asarray)

        distributed.on_first(begin)

    def sync(self, params: Any, version: int) -> None:
        """See `VllmEngine.sync`."""
        self._params = params
        self._let_first(lambda engine: engine.sync(params, version))

    def reload(self, params: Any, version: int) -> None:
        """See `VllmEngine.reload`."""
        self._params = params
        self._let_first(lambda engine: engine.reload(params, version))

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """See `VllmEngine.score`."""
        found = self._let_first(lambda engine: engine.score(prompts)) or []
        servers = int(distributed.from_first(np.array([len(found)], np.int32))[0])
        ends = np.cumsum([len(prompt) - 1 for prompt in prompts])
        flat = np.stack([np.concatenate(one) for one in found]) if found else np.zeros((servers, ends[-1]), np.float32)
        shared = distributed.from_first(flat) if servers else flat
        return [np.split(one, ends[:-1]) for one in shared]

    def advance(
        self, version: int, factors: Mapping[str, Any], dense: Mapping[str, Any], **options: Any
    ) -> dict[str, Any]:
        """See `VllmEngine.advance`; the metrics are those of process 0, and none elsewhere."""
        self._params = None
        return self._let_first(lambda engine: engine.advance(version, factors, dense, **options)) or {}

    def generate(
        self, prompt_tokens: Array, prompt_lengths: Array, prompt_ids: Array, n: int, *args: Any, **options: Any
    ) -> Rollout:
        """See `VllmEngine.generate`."""
        tokens, lengths, ids = fetch((prompt_tokens, prompt_lengths, prompt_ids))
        found = self._let_first(lambda engine: engine.generate(tokens, lengths, ids, n, *args, **options))
        rows, width, new = len(tokens) * n, tokens.shape[1], self._sampler.max_new_tokens
        numbers = np.zeros(rows, np.int32)
        # Of the shapes that process 0 has.
        parts = (
            np.zeros((rows, width + new), np.int32),
            numbers,
            numbers,
            np.zeros((rows, new), np.float32),
            numbers > 0,
            numbers,
        )
        return Rollout(*(self._place(distributed.from_first(np.asarray(part))) for part in found or parts))

    def close(self) -> None:
        """See `VllmEngine.close`. Waits for no other process."""
        self.version, self._params = -1, None
        if self._engine is not None:
            self._engine.close()

    def _let_first(self, action: Callable[[VllmEngine], Any]) -> Any:
        """What `action` returns on process 0, None elsewhere; meanwhile the others do what it tells them."""
        if self._engine is None:
            while (told := distributed.from_first(np.zeros(2, np.int32)))[0] == WRITE:
                self._write(self._params, Path())  # the first one knows where
            if told[0] == FAILED:
                raise SharedError("process 0 failed; see what it has written")
            self.version = int(told[1])
            return None
        try:
            found = action(self._engine)
        except (UserError, OSError) as error:
            self._tell(FAILED)
            raise SharedError(str(error)) from error
        self.version = self._engine.version
        self._tell(DONE)
        return found

    def _write_together(self, params: Any, folder: Path) -> None:
        """What the engine of process 0 writes with."""
        self._tell(WRITE)
        self._write(params, folder)

    def _tell(self, what: int) -> None:
        distributed.from_first(np.array([what, self.version], np.int32))
