"""Several rollout servers with the same weights, used as one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from logra_jax.errors import UserError
from logra_jax.sync import blob as blobs
from logra_jax.sync.blob import Update
from logra_jax.sync.client import Client, Completion, Synced, Unreachable

HEALTH_SECONDS = 30.0  # for a server to say that it is well: one that computes may be late


class Pool:
    """Servers that hold the same model; an answer depends on prompt, seed and weights, not on who gives it.

    A server that fails is `lost`, with the reason, by its number among the clients: it is asked for nothing more until
    `plan` or `restore` has brought it back.

    Args:
      clients: at least one.
      at_once: requests that one server is sent before it has answered any of them.
    """

    def __init__(self, clients: Sequence[Client], at_once: int = 32) -> None:
        if not clients:
            raise UserError("a pool needs at least one rollout server")
        self.clients, self.at_once = tuple(clients), at_once
        self.version = 0
        self.lost: dict[int, UserError] = {}
        self._cancelled = False

    def plan(self, shapes: Mapping[str, Sequence[int]], version: int = 0, **options: Any) -> None:
        """`Client.plan` of all servers."""
        everyone = range(len(self.clients))
        self.restore(lambda number: self.clients[number].plan(shapes, version, **options), version, everyone)
        for error in self.lost.values():
            raise error

    def restore(self, act: Callable[[int], Any], version: int, numbers: Iterable[int]) -> None:
        """`act(number)` brings each of these servers to the version, all at the same time; where it fails, it is lost.

        Raises:
          UserError: no server is left.
        """
        self._try(act, numbers)
        self.version = version
        self._some()

    def sync(self, update: Update, distribution: str = "rademacher") -> list[Synced]:
        """`Client.sync` of all servers that are not lost, at the same time; those where it fails are.

        Raises:
          UserError: it failed everywhere.
        """
        self._some()
        blob = blobs.encode(update, distribution)
        found = self._try(lambda number: self.clients[number].sync(update, blob=blob), self._here())
        self._some()
        self.version = update.version
        return found

    def _here(self) -> list[int]:
        return [number for number in range(len(self.clients)) if number not in self.lost]

    def _some(self) -> None:
        if not self._here():
            raise next(iter(self.lost.values()))

    def _try(self, act: Callable[[int], Any], numbers: Iterable[int]) -> list[Any]:
        """What act(number) gives where it succeeds."""
        numbers, found = list(numbers), []
        with ThreadPoolExecutor(max(len(numbers), 1)) as threads:
            tasks = {number: threads.submit(act, number) for number in numbers}
        for number, task in tasks.items():
            try:
                found.append(task.result())
                self.lost.pop(number, None)
            except UserError as error:
                self.lost[number] = error
        return found

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """`Client.score` of all prompts, by every server that is not lost; those where it fails are."""
        return self._try(lambda number: [self.clients[number].score(p) for p in prompts], self._here())

    def cancel(self) -> None:
        """Let a `generate` in another thread end now, with a UserError, and refuse every later one."""
        self._cancelled = True
        with ThreadPoolExecutor(len(self.clients)) as threads:
            list(threads.map(_abort, self.clients))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        found: dict[int, list[Completion]] | None = None,
        **settings: Any,
    ) -> list[list[Completion]]:
        """`Client.generate` for each prompt with its seed, in the prompts' order.

        Whoever is free takes the next prompt. A request without an answer goes to another server, or the same one
        again; each failure costs its server one of the requests it may have at once. Afterwards, servers that failed
        and are not well are lost; one that answers with other weights than the pool's version is so at once.

        Args:
          found: answers that are there, by the number of their prompt. More are put into it, for another try if this
            one fails.

        Raises:
          UserError: a server refused.
          Unreachable: no server is left.
        """
        found = {} if found is None else found
        waiting = deque(i for i in range(len(prompts)) if i not in found)
        silent: dict[int, UserError] = {}
        failed: list[BaseException] = []
        changed = threading.Condition()

        def take(number: int) -> int | None:
            with changed:
                # A prompt that another server has may come back.
                changed.wait_for(lambda: waiting or len(found) == len(prompts) or failed)
                ends = failed or self._cancelled or number in self.lost
                return waiting.popleft() if waiting and not ends else None

        def work(number: int) -> None:
            client = self.clients[number]
            while (i := take(number)) is not None:
                try:
                    answers = client.generate(prompts[i], seed=seeds[i], **settings)
                    if other := {a.version for a in answers} - {self.version}:
                        self.lost[number] = Unreachable(
                            f"{client.url}: answers with weights of version {other}, not {self.version}; was it "
                            "started again?"
                        )
                        raise self.lost[number]
                    with changed:
                        found[i] = answers
                        changed.notify_all()
                except BaseException as error:
                    with changed:
                        waiting.appendleft(i)
                        if isinstance(error, Unreachable):
                            silent[number] = error
                        else:
                            failed.append(error)
                        changed.notify_all()
                    return

        slots = [number for _ in range(min(self.at_once, len(waiting))) for number in self._here()]
        with ThreadPoolExecutor(max(len(slots), 1)) as threads:
            list(threads.map(work, slots))
        if self._cancelled:
            raise UserError("no more answers are wanted")
        if failed:
            raise failed[0]
        missing = len(found) < len(prompts)
        for number, error in silent.items():
            if missing or not self.clients[number].healthy(HEALTH_SECONDS):
                self.lost.setdefault(number, error)
        if missing:
            raise Unreachable(str(next(iter(self.lost.values()))))
        return [found[i] for i in range(len(prompts))]


def _abort(client: Client) -> None:
    with suppress(UserError):  # it is gone, or busy with something else
        client.abort()
