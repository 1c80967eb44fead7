"""Several rollout servers with the same weights, used as one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from logra_jax.errors import UserError
from logra_jax.sync import blob as blobs
from logra_jax.sync.blob import Update
from logra_jax.sync.client import Client, Completion, Synced, Unreachable


class Pool:
    """Servers that hold the same model; an answer depends on prompt, seed and weights, not on who gives it.

    Args:
      clients: at least one.
      at_once: requests that one server is sent before it has answered any of them.
    """

    def __init__(self, clients: Sequence[Client], at_once: int = 32) -> None:
        if not clients:
            raise UserError("a pool needs at least one rollout server")
        self.clients, self.at_once = tuple(clients), at_once
        self.version = 0

    def plan(self, shapes: Mapping[str, Sequence[int]], version: int = 0, **options: Any) -> None:
        """`Client.plan` of all servers."""
        self._all(lambda client: client.plan(shapes, version, **options))
        self.version = version

    def sync(self, update: Update, distribution: str = "rademacher") -> list[Synced]:
        """`Client.sync` of all servers at the same time.

        Raises:
          UserError: of the first server that failed; the others are at the new version. Done again, or after a
            `Client.reload` of the one that failed, it brings all of them there.
        """
        blob = blobs.encode(update, distribution)
        found = self._all(lambda client: client.sync(update, blob=blob))
        self.version = update.version
        return found

    def reload(self, folder: str | Path, shapes: Mapping[str, Sequence[int]], version: int, **options: Any) -> None:
        """`Client.reload` of all servers."""
        self._all(lambda client: client.reload(folder, shapes, version, **options))
        self.version = version

    def _all(self, act: Callable[[Client], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.clients)) as threads:
            tasks = [threads.submit(act, client) for client in self.clients]
        return [task.result() for task in tasks]

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **settings: Any
    ) -> list[list[Completion]]:
        """`Client.generate` for each prompt with its seed, in the prompts' order.

        Whoever is free takes the next prompt. A request without an answer goes to another server, or the same one
        again; each failure costs its server one of the requests it may have at once.

        Raises:
          UserError: a server refused, or gave an answer with other weights than the pool's version.
          Unreachable: no server is left.
        """
        waiting = deque(range(len(prompts)))
        found: dict[int, list[Completion]] = {}
        failed: list[BaseException] = []
        changed = threading.Condition()

        def take() -> int | None:
            with changed:
                # A prompt that another server has may come back.
                changed.wait_for(lambda: waiting or len(found) == len(prompts) or failed)
                return waiting.popleft() if waiting and not failed else None

        def work(client: Client) -> Unreachable | None:
            while (i := take()) is not None:
                try:
                    answers = client.generate(prompts[i], seed=seeds[i], **settings)
                    if other := {a.version for a in answers} - {self.version}:
                        raise UserError(f"{client.url}: answers with weights of version {other}, not {self.version}")
                    with changed:
                        found[i] = answers
                except Unreachable as error:
                    with changed:
                        waiting.appendleft(i)
                        changed.notify_all()
                    return error
                except BaseException as error:
                    failed.append(error)
                with changed:
                    changed.notify_all()
            return None

        slots = [client for _ in range(min(self.at_once, len(prompts))) for client in self.clients]
        with ThreadPoolExecutor(max(len(slots), 1)) as threads:
            ends = list(threads.map(work, slots))
        if failed:
            raise failed[0]
        if len(found) < len(prompts):
            raise next(error for error in ends if error)
        return [found[i] for i in range(len(prompts))]
