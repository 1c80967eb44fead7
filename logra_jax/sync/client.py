"""One rollout server, spoken to by HTTP: tokens in and out, the sync of an update, the reload of all weights.

The server must have been started as `logra_jax.sync.server` does. Its routes have no authentication: it belongs on the
loopback interface or a private network.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from logra_jax.errors import UserError
from logra_jax.sync import blob as blobs
from logra_jax.sync.blob import Update

QUICK = 30.0  # seconds for answers that take no work
# A larger blob goes through a file: as JSON text it is a third larger, and copied several times.
LARGEST_MESSAGE = 4 * 2**20


class Unreachable(UserError):
    """A server did not answer, not in time, or as one that is failing; another one may."""


class Completion(NamedTuple):
    """One answer. tokens: with the end token, if there is one. logprobs: in nats, of each token among those it was
    drawn from, at the temperature. stopped: ended by an end token, not cut off. version: of the weights that gave the
    last token.
    """

    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    version: int


class Synced(NamedTuple):
    """What a sync took: bytes of the blob, seconds altogether and, of them, inside the workers' call."""

    bytes: int
    seconds: float
    apply_seconds: float


@dataclass
class Client:
    """A server at `url`.

    Args:
      url: "http://HOST:PORT".
      model: the name it serves the policy under.
      timeout: seconds that any one answer may take.
      folder: one that server and trainer both see, for blobs above 4 MiB; they are deleted after the sync.
    """

    url: str
    model: str = "policy"
    timeout: float = 600.0
    folder: Path | None = None

    def call(self, path: str, body: Any = None, *, method: str = "POST", timeout: float | None = None) -> Any:
        """The answer to a request, from JSON where it is that.

        Raises:
          Unreachable: no answer, or one of status 500 and above, as after the loss of a worker.
          UserError: the server refused, with its reason.
        """
        data = json.dumps(body).encode() if body is not None else b"" if method == "POST" else None
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout or self.timeout) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            reason = ""
            with suppress(OSError, http.client.HTTPException):  # it may end while it gives it
                reason = " ".join(error.read().decode(errors="replace").split())[:500]
            kind = Unreachable if error.code >= 500 else UserError
            raise kind(f"{self.url}{path}: the server answered {error.code}: {reason}") from None
        except (OSError, http.client.HTTPException) as error:
            cause, limit = getattr(error, "reason", None) or error, timeout or self.timeout
            raise Unreachable(f"{self.url}{path}: no answer ({cause!r}; limit {limit:g} s); is it running?") from None
        return json.loads(text) if text[:1] in ("{", "[") else text

    def healthy(self, timeout: float = 5.0) -> bool:
        """Whether it takes requests."""
        try:
            self.call("/health", method="GET", timeout=timeout)
        except UserError:
            return False
        return True

    def longest(self) -> int:
        """Most tokens, prompt and answer, that it takes.

        Raises:
          UserError: it serves no policy.
        """
        served = {card["id"]: card for card in self.call("/v1/models", method="GET", timeout=QUICK)["data"]}
        if self.model not in served:
            raise UserError(f"{self.url} serves {', '.join(served)}, not {self.model!r}: start it as docs/vllm.md says")
        return served[self.model]["max_model_len"]

    def describe(self) -> dict[str, Any]:
        """What it serves, and how: the answer of `extension.LograWorkerExtension.logra_describe`.

        Raises:
          UserError: it was not started for this.
        """
        try:
            found = self._ranks("logra_describe")
        except UserError as error:
            raise UserError(f"{error}; was it started as docs/vllm.md says?") from None
        self._all_ok(found, "cannot say what it serves")
        return found[0]

    def _ranks(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answers of all ranks, in order; not all need be `ok`."""
        found = self.call("/collective_rpc", {"method": method, "kwargs": arguments})["results"]
        if not found or not all(isinstance(r, dict) and r.get("rank") == i for i, r in enumerate(found)):
            raise UserError(
                f"{self.url}: the ranks' answers to {method} are out of step; restart it. {str(found)[:500]}"
            )
        return found

    def plan(
        self,
        shapes: Mapping[str, Sequence[int]],
        version: int = 0,
        *,
        residual: bool = True,
        prefix: str = "model.",
    ) -> None:
        """Call the weights that the server has `version`, and prove that updates of these tensors reach all of them.

        To be done before the first sync, and when the server was restarted. Arguments as in `weights.Weights`.

        Raises:
          UserError: a rank cannot update a tensor in place, or elements of one are on no rank.
        """
        shapes = {name: list(shape) for name, shape in shapes.items()}
        found = self._ranks("logra_plan", shapes=shapes, version=version, residual=residual, prefix=prefix)
        self._all_ok(found, "cannot be synced by factors; load all weights instead")
        for name, shape in shapes.items():
            if gap := uncovered(shape, [part for rank in found for part in rank["parts"][name]]):
                raise UserError(f"{self.url}: {name} {shape}: {gap}; it cannot be synced by factors")
        self.call("/update_weight_version", {"new_version": str(version)})

    def sync(self, update: Update, distribution: str = "rademacher", blob: bytes | None = None) -> Synced:
        """Bring the server from the update's base to its version. Running answers go on with the new weights, and
        nothing computed with the old ones is kept. The same update again is fine.

        Args:
          blob: `blob.encode(update)`, where several servers share it.

        Raises:
          UserError: a rank refused or failed. Where any may have changed, the server stays paused: `reload` it.
        """
        blob = blobs.encode(update, distribution) if blob is None else blob
        start = time.perf_counter()
        # All that can go wrong on this side does so before the server is paused.
        with self._message(blob, update.version) as message:
            self.call("/pause?mode=keep&clear_cache=true")
            before = time.perf_counter()
            found = self._ranks("logra_apply", **message)
            after = time.perf_counter()
        wanted = (update.version, blobs.digest(blob))
        if not all(rank["ok"] and (rank["version"], rank["sha256"]) == wanted for rank in found):
            untouched = all(not rank["ok"] and not rank["broken"] for rank in found)
            if untouched and len({(rank["version"], rank["sha256"]) for rank in found}) == 1:
                self.call("/resume")
                self._all_ok(found, f"refused the update to {update.version}; its weights are as they were")
            self._all_ok(found, f"failed in the update to {update.version} and stays paused; reload all weights")
            raise UserError(
                f"{self.url}: not every rank has the update to {update.version}; reload all weights: {found}"
            )
        self._publish(update.version)
        return Synced(len(blob), time.perf_counter() - start, after - before)

    @contextmanager
    def _message(self, blob: bytes, version: int) -> Iterator[dict[str, str]]:
        """The arguments of the workers' call: the blob itself, or the name of a file that is there meanwhile."""
        if len(blob) <= LARGEST_MESSAGE:
            yield {"base64_blob": base64.b64encode(blob).decode()}
            return
        if self.folder is None:
            raise UserError(
                f"{self.url}: the update has {len(blob)} bytes, a message holds {LARGEST_MESSAGE}; name a folder "
                "that trainer and server share"
            )
        path = Path(self.folder).resolve() / f"update-{version}-{os.getpid()}-{id(self)}.safetensors"
        try:
            blobs.write(path, blob)
            yield {"path": str(path)}
        finally:
            path.unlink(missing_ok=True)

    def reload(self, folder: str | Path, shapes: Mapping[str, Sequence[int]], version: int, **options: Any) -> None:
        """Load all weights from a Hugging Face folder that the server sees, call them `version`, and plan anew.

        Raises:
          UserError: a rank failed, and the server stays paused.
        """
        self.call("/pause?mode=keep&clear_cache=true")
        found = self._ranks("logra_reload", path=str(Path(folder).resolve()))
        self._all_ok(found, f"did not load {folder} and stays paused")
        self.plan(shapes, version, **options)
        self._publish(version)

    def _publish(self, version: int) -> None:
        """Forget what was computed with other weights, tell the version, and go on."""
        if not self.call("/reset_prefix_cache")["success"]:
            raise UserError(f"{self.url}: its prefix cache holds on to old weights; it stays paused, restart it")
        self.call("/update_weight_version", {"new_version": str(version)})
        self.call("/resume")

    def _all_ok(self, found: Iterable[Mapping[str, Any]], meaning: str) -> None:
        for rank in found:
            if not rank["ok"]:
                raise UserError(f"{self.url}: rank {rank['rank']} {meaning}: {rank['error']}")

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        end_ids: Sequence[int] = (),
        banned_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """n answers to a prompt of token ids, the same for equal arguments and weights whatever else is asked.

        Args:
          max_tokens: at most so many tokens each.
          n: no more than the sequences that the server takes at a time.
          seed: answer number i is drawn as the only one of seed + i would be.
          end_ids: ids that end an answer, beside those of the model's own configuration.
          banned_ids: ids that are never drawn, and have no share in the probabilities.

        Raises:
          Unreachable, UserError: see `call`; or the answer was aborted.
        """
        sampling: dict[str, Any] = {
            "n": n,
            "seed": seed,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
        }
        sampling |= {"top_k": top_k, "stop_token_ids": list(end_ids), "logprobs": 0, "detokenize": False}
        if banned_ids:
            sampling["logit_bias"] = {str(i): -100.0 for i in banned_ids}  # vLLM's least
        body = {"model": self.model, "token_ids": [int(i) for i in prompt], "sampling_params": sampling}
        found = self.call("/inference/v1/generate", body)
        return [self._completion(choice) for choice in sorted(found["choices"], key=lambda c: c["index"])]

    def score(self, prompt: Sequence[int]) -> list[float]:
        """Log-probabilities, nats, at temperature 1 and among all ids, of a prompt's tokens but the first.

        Raises:
          Unreachable, UserError: see `call`.
        """
        prompt = [int(i) for i in prompt]
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
        body = {"model": self.model, "token_ids": prompt, "sampling_params": sampling}
        found = self.call("/inference/v1/generate", body)["prompt_logprobs"]  # of the first token there is none
        return [entry[str(token)]["logprob"] for entry, token in zip(found[1:], prompt[1:], strict=True)]

    def abort(self, timeout: float = 5.0) -> None:
        """Give up all answers that are being drawn; who waits for one gets an error."""
        self.call("/pause?mode=abort", timeout=timeout)
        self.call("/resume", timeout=timeout)

    def _completion(self, choice: Mapping[str, Any]) -> Completion:
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise Unreachable(f"{self.url}: an answer ended with {reason!r}; was the server stopped or told to abort?")
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        versions = choice.get("weight_versions") or [{"version": ""}]
        last = str(versions[-1]["version"])  # "default" before a plan
        return Completion(choice["token_ids"], logprobs, reason == "stop", int(last) if last.isdecimal() else -1)


def uncovered(shape: Sequence[int], parts: Iterable[Sequence[Sequence[int]]]) -> str:
    """Why blocks, (first, last + 1) along each axis, do not make up a tensor; "" if they do.

    A block may be held several times, but blocks must not overlap: then every element is in one exactly if their
    sizes add up.
    """
    blocks = sorted({tuple((int(a), int(b)) for a, b in part) for part in parts})
    for i, one in enumerate(blocks):
        if any(not 0 <= a < b <= size for (a, b), size in zip(one, shape, strict=True)):
            return f"a rank has a block {one}, which is not in it"
        for other in blocks[i + 1 :]:
            if all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True)):
                return f"ranks have blocks {one} and {other}, which overlap"
    held = sum(prod(b - a for a, b in block) for block in blocks)
    return "" if held == prod(shape) else f"all ranks together hold {held} of {prod(shape)} elements"
