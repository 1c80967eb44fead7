"""vLLM servers as a rollout engine: they follow the trainer's weights by factors, and load all where they must."""

import hashlib
import shutil
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from logra_jax._shapes import Array, Int
from logra_jax.errors import UserError
from logra_jax.rl.rollout import Rollout, Sampler
from logra_jax.sync.blob import Update
from logra_jax.sync.client import Client, Completion, Unreachable
from logra_jax.sync.naming import Table, dense_by_name, factors_by_name, file_shapes
from logra_jax.sync.needs import Needs
from logra_jax.sync.pool import HEALTH_SECONDS, Pool
from logra_jax.sync.server import Server, start_all

CANCEL_SECONDS = 20.0  # for servers to give up what they are drawing
RESCUES = 2  # times that a server is brought back before it has outlived a batch of answers


def answer_seed(seed: int, update: int, prompt_id: int, sample: int) -> int:
    """Seed of an answer, in [0, 2^63): vLLM draws sample j of a request with the request's seed + j.

    The first 62 bits of sha256 of (seed, update, prompt id), three unsigned 64-bit numbers in little-endian order,
    plus the sample.
    """
    digest = hashlib.sha256(struct.pack("<3Q", seed, update, prompt_id)).digest()
    return (int.from_bytes(digest[:8], "big") >> 2) + sample


class VllmEngine:
    """See `Engine`. Servers are at the version of the newest `sync` or `advance`; one process trains.

    A server that fails is left out, and brought back with all weights at the next `sync`: started again if it was
    started here. While it generates that happens only where no server is left; answers are the same in any case.

    Args:
      sampler: what answers are to be like. It samples nothing here.
      answers: most that are asked of a prompt.
      write: write(params, folder) makes a Hugging Face folder of weights, over one that is there.
      place: puts rows on the trainer's devices.
      folder: for weights, in a folder of their own, and large updates; the servers see it too.
      table, shapes: names of all parameters, and shapes of whole leaves, by path, that updates by factors will change;
        without shapes all weights are loaded at every `sync`.
      prefix: what the files of `write` have for "model." at the start of a name, see `models.save.text_prefix`.
      full_every: load all weights at every version that is a multiple of it; 0: never.
      clients: servers that run already.
      start: start(folder) makes servers with the weights in the folder, which are started and stopped here.

    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        prompt_width: int,
        answers: int = 1,
        write: Callable[[Any, Path], None],
        place: Callable[[np.ndarray], jax.Array],
        folder: Path,
        table: Table,
        shapes: Mapping[str, tuple[int, ...]],
        prefix: str,
        full_every: int = 0,
        clients: Sequence[Client] = (),
        start: Callable[[Path], list[Server]] | None = None,
    ):
        self.version, self._params = -1, None
        self._sampler, self._write, self._place, self._table = sampler, write, place, table
        self._shapes, self._prefix, self._full_every = file_shapes(table, shapes), prefix, full_every
        # Of this engine alone: other runs, and whoever the folder belongs to, may have theirs beside it.
        self._weights, self._start = folder.resolve() / f"weights-{uuid.uuid4().hex[:12]}", start
        self._servers: list[Server] = []
        self._pool = Pool(clients) if clients else None
        self._rescues: dict[int, int] = {}  # by number of the server, since it last outlived a batch
        self._told: set[int] = set()  # whose loss was told
        self._drawing = threading.Lock()
        model = sampler.model.config.to_hf("float32")
        self._needs = Needs(prompt_width, sampler.max_new_tokens, answers, model)

    def sync(self, params: Any, version: int) -> None:
        """See `Engine`. Servers that are at this version keep their weights, others load all of them from the folder.

        `params` are kept until the next `advance`, for servers that fail meanwhile.

        Raises:
          UserError: a server could not be started, serves another model, or fails again and again; none is left.
        """
        self._check_idle()
        self._params, first = params, self.version < 0
        if self._pool is None:
            assert self._start is not None
            self._save()
            self._servers = self._start(self._weights)
            logs = ", ".join(str(server.log) for server in self._servers)
            print(f"starting   vLLM, which may take a minute; its output goes to {logs}", flush=True)
            start_all(self._servers)
            for server in self._servers:
                self._needs.check(server.client)
            self._pool = Pool([server.client for server in self._servers])
            self._pool.plan(self._shapes, version, prefix=self._prefix)
        elif version != self.version:
            self._bring(range(len(self._pool.clients)), version)
        elif self._pool.lost:
            self._bring(list(self._pool.lost), version)
        if first:
            for error in self._pool.lost.values():
                raise error
        self.version = version

    def reload(self, params: Any, version: int) -> None:
        """Let all servers load all weights, whatever version they are at. Raises UserError."""
        assert self._pool is not None
        self._check_idle()
        self._params = params
        self._bring(range(len(self._pool.clients)), version)
        self.version = version

    def let_go(self) -> None:
        """Keep no weights for servers that fail: they are about to be written over."""
        self._params = None

    def _check_idle(self) -> None:
        if self._drawing.locked():
            raise ValueError("answers are being drawn: they would go on with other weights")

    def _save(self) -> None:
        self._weights.parent.mkdir(parents=True, exist_ok=True)
        self._write(self._params, self._weights)

    def _bring(self, numbers: Sequence[int], version: int) -> None:
        """All weights to these servers; those that are gone and were started here are started again."""
        assert self._pool is not None
        clients, lost = self._pool.clients, set(self._pool.lost)
        for number in lost:
            if self._rescues.get(number, 0) >= RESCUES:
                raise UserError(f"a server failed {RESCUES + 1} times in one batch of answers: {self._why(number)}")
        self._save()

        def bring(number: int) -> None:
            client, healthy = clients[number], clients[number].healthy(HEALTH_SECONDS)
            if healthy or self._servers:
                self._rescues[number] = self._rescues.get(number, 0) + (number in lost)
            try:
                if not healthy:
                    raise Unreachable(f"{client.url}: no answer{'' if self._servers else '; start it again'}")
                if not self._servers:
                    self._needs.check(client)
                client.reload(self._weights, self._shapes, version, prefix=self._prefix)
            except UserError as error:
                if not self._servers:
                    raise
                _warn(f"{client.url} is started again: {self._why(number, error)}")
                self._servers[number].restart()
                client.plan(self._shapes, version, prefix=self._prefix)

        self._pool.restore(bring, version, numbers)
        self._tell_lost()

    def _why(self, number: int, newest: UserError | None = None) -> str:
        """What a server failed of: its last words, if it was started here and has ended, or why it was lost."""
        assert self._pool is not None
        try:
            if self._servers:
                self._servers[number].check()
        except UserError as error:
            return str(error)
        return str(self._pool.lost.get(number, newest))

    def _tell_lost(self) -> None:
        assert self._pool is not None
        for number in self._pool.lost.keys() - self._told:
            _warn(f"{self._why(number)}\nwarning: it is left out until it can be given all weights")
        self._told = set(self._pool.lost)

    def advance(
        self,
        version: int,
        factors: Mapping[str, Any],
        dense: Mapping[str, Any],
        *,
        seed: int,
        drawn: int,
        decay: float,
    ) -> dict[str, Any]:
        """Bring the servers from the version before to this one. Returns what that took, as metrics.

        Where that is not done, because all weights are due or a server failed, the next `sync` loads all weights.

        Args:
          factors: `LowRank.factor` by path, bfloat16, as they were applied.
          dense: new values of the other leaves that are trained, by path.
          seed, drawn, decay: see `logra_jax.sync.blob.Update`.
        """
        self._check_idle()
        started, sent, self._params = time.perf_counter(), 0, None
        due = self._full_every and version % self._full_every == 0
        if self._pool is not None and self.version == version - 1 and not due:
            update = Update(
                base=version - 1,
                version=version,
                seed=seed,
                drawn=drawn,
                decay=decay,
                factors=factors_by_name(self._table, factors),
                dense=dense_by_name(self._table, dense),
            )
            try:
                sent = sum(synced.bytes for synced in self._pool.sync(update))
                self.version = version
            except UserError as error:
                _warn(f"{error}\nwarning: all weights are loaded instead")
            self._tell_lost()
        return {"sync/version": self.version, "sync/bytes": sent, "time/sync_s": time.perf_counter() - started}

    def generate(
        self,
        prompt_tokens: Int[np.ndarray, "b p"] | Int[Array, "b p"],
        prompt_lengths: Int[np.ndarray, " b"] | Int[Array, " b"],
        prompt_ids: Int[np.ndarray, " b"] | Int[Array, " b"],
        n: int,
        seed: int,
        update: int,
    ) -> Rollout:
        """See `Engine`. An answer's noise follows from its `answer_seed`, whoever gives it; a prompt that stands in
        the batch again counts its samples on. May run in a thread of its own: `sync`, `reload` and `advance` refuse
        meanwhile, and `close` ends it.

        Raises:
          Unreachable: no server is left, and there are no weights to bring one back with.
          UserError: a server refused or failed, or gave what the trainer's model cannot have given.
        """
        with self._drawing:
            return self._generate(prompt_tokens, prompt_lengths, prompt_ids, n, seed, update)

    def _generate(
        self, prompt_tokens: Any, prompt_lengths: Any, prompt_ids: Any, n: int, seed: int, update: int
    ) -> Rollout:
        if self._pool is None or self.version < 0:
            raise ValueError("the engine has no weights: call sync first")
        sampler, width = self._sampler, prompt_tokens.shape[1]
        tokens, lengths, ids = (np.asarray(array) for array in (prompt_tokens, prompt_lengths, prompt_ids))
        again = np.tril(ids[:, None] == ids[None, :], -1).sum(axis=1)
        found = self._answers(
            [row[width - length :].tolist() for row, length in zip(tokens, lengths, strict=True)],
            [answer_seed(seed, update, int(i), n * int(k)) for i, k in zip(ids, again, strict=True)],
            n=n,
            max_tokens=sampler.max_new_tokens,
            temperature=sampler.temperature,
            end_ids=sampler.end_ids,
            banned_ids=range(sampler.vocab_size, sampler.model.config.vocab_size),
        )
        answers = [answer for several in found for answer in several]
        drawn, *others = self._rows(answers)
        rows = np.concatenate([np.repeat(tokens, n, axis=0), drawn], axis=1)
        return Rollout(*map(self._place, (rows, np.repeat(lengths, n), *others)))

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
        """Of every server, and of every prompt, the log-probabilities at temperature 1 of its tokens but the first."""
        assert self._pool is not None
        found = self._pool.score(prompts)
        return [[np.asarray(values, np.float32) for values in several] for several in found]

    def _answers(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], **settings: Any
    ) -> list[list[Completion]]:
        """`Pool.generate`, where no server is left with those that can be brought back."""
        assert self._pool is not None
        found: dict[int, list[Completion]] = {}
        while True:
            try:
                answers = self._pool.generate(prompts, seeds, found, **settings)
            except Unreachable as error:
                if self._params is None or any(map(_gone, jax.tree.leaves(self._params))):
                    raise Unreachable(
                        f"{error}; and the weights of version {self.version} are no longer there"
                    ) from None
                self._bring(list(self._pool.lost), self.version)
            else:
                self._rescues = {i: count for i, count in self._rescues.items() if i in self._pool.lost}
                self._tell_lost()
                return answers

    def _rows(self, answers: Sequence[Completion]) -> tuple[np.ndarray, ...]:
        """Tokens, lengths, log-probabilities, ends and versions of answers, padded."""
        shape = (len(answers), self._sampler.max_new_tokens)
        tokens, logprobs = np.full(shape, self._sampler.pad_id, np.int32), np.zeros(shape, np.float32)
        counts = np.array([len(answer.tokens) for answer in answers], np.int32)
        stopped = np.array([answer.stopped for answer in answers], bool)
        versions = np.array([answer.version for answer in answers], np.int32)
        for i, answer in enumerate(answers):
            if not all(0 <= token < self._sampler.vocab_size for token in answer.tokens):
                raise UserError("a vLLM server gave tokens that the model does not have: does it serve another one?")
            if answer.stopped != (answer.tokens[-1] in self._sampler.end_ids):
                raise UserError(
                    f"a vLLM server ended answers at token {answer.tokens[-1]}, the trainer's model at "
                    f"{self._sampler.end_ids}: start it with the model that is trained"
                )
            tokens[i, : counts[i]], logprobs[i, : counts[i]] = answer.tokens, answer.logprobs
        return tokens, counts, logprobs, stopped, versions

    def close(self) -> None:
        """Stop the servers that were started here, and delete the weights that were written for them.

        Answers that are being drawn are given up.
        """
        pool, end = self._pool, time.monotonic() + CANCEL_SECONDS
        while pool is not None and self._drawing.locked() and time.monotonic() < end:
            pool.cancel()  # again and again: a request may just have been on its way
            time.sleep(0.1)
        servers, self._servers, self._pool, self.version, self._params = self._servers, [], None, -1, None
        for server in servers:
            server.stop()
        shutil.rmtree(self._weights, ignore_errors=True)


def _gone(leaf: Any) -> bool:
    """Whether an update has written over it."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
