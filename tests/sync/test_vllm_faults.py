"""Real servers that are killed, stopped or sent what is wrong: afterwards their policy is the trainer's, to 1e-5."""

import base64
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from real_vllm import PYTHON, load_script, needs_vllm

from logra_jax.errors import UserError
from logra_jax.models import save_hf
from logra_jax.optim.spec import leaves_with_paths
from logra_jax.rl import vllm_engine
from logra_jax.rl.rollout import Sampler
from logra_jax.rl.vllm_engine import VllmEngine
from logra_jax.sync import blob as blobs
from logra_jax.sync import server as servers
from logra_jax.sync.server import Server

pytestmark = needs_vllm

check_vllm = load_script()
CLOSE = 1e-5  # of log-probabilities of some -6 over the temperature, from sums in another order: 20 roundings


class Rig:
    """An engine with servers on this machine, and the trainer that they must follow."""

    def __init__(self, model: Path, folder: Path, *, count: int = 1, ranks: int = 1, timeout: float = 300.0) -> None:
        self.trainer = check_vllm.Trainer(model, rank=8)
        self.start = self.trainer.params()

        def start(weights: Path) -> list[Server]:
            options = {"dtype": "float32", "tensor_parallel": ranks, "max_length": 512, "max_sequences": 16}
            options |= {"more": ["--enforce-eager", "--no-enable-chunked-prefill"]}
            return [
                Server(PYTHON, weights, folder / f"server-{i}.log", options=options, variables=check_vllm.on_cpu(ranks),
                       folder=folder, timeout=timeout)
                for i in range(count)
            ]  # fmt: skip

        model_ = self.trainer.model
        sampler = Sampler(
            model_, max_new_tokens=check_vllm.ANSWER, end_ids=model_.end_ids, vocab_size=model_.config.vocab_size,
            pad_id=model_.pad_id, temperature=check_vllm.TEMPERATURE,
        )  # fmt: skip
        self.width = max(map(len, self.trainer.prompts))
        self.engine = VllmEngine(
            sampler, prompt_width=self.width, place=jnp.asarray, folder=folder, table=self.trainer.table,
            write=lambda params, where: save_hf(model_, params, where, overwrite=True), prefix="model.",
            shapes={path: leaf.shape for path, leaf in leaves_with_paths(self.trainer.train)}, start=start,
        )  # fmt: skip
        self.engine.sync(self.start, 0)
        self.engine._pool.at_once = 4  # most prompts have not been asked when the first is answered

    def __enter__(self) -> "Rig":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def step(self) -> dict:
        """One update on both sides, as training does it."""
        metrics = self.engine.advance(**self.trainer.step())
        self.engine.sync(self.trainer.params(), self.trainer.version)
        return metrics

    def generate(self, copies: int = 6):
        """Two answers to each prompt, in so many copies."""
        prompts = self.trainer.prompts * copies
        tokens = np.zeros((len(prompts), self.width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[self.width - len(prompt) :] = prompt
        lengths = np.array([len(prompt) for prompt in prompts])
        ids = np.arange(len(prompts)) % len(self.trainer.prompts)
        return self.engine.generate(tokens, lengths, ids, n=2, seed=3, update=self.trainer.version)

    def apart(self, rollout, params=None) -> float:
        """Largest difference of a log-probability from JAX's own."""
        worst = 0.0
        for tokens, before, count, logprobs in zip(
            np.asarray(rollout.tokens), np.asarray(rollout.prompt_lengths), np.asarray(rollout.lengths),
            np.asarray(rollout.logprobs), strict=True,
        ):  # fmt: skip
            prompt, answer = tokens[self.width - before : self.width].tolist(), tokens[self.width :][:count].tolist()
            scores = self.trainer.logprobs(self.trainer.params() if params is None else params, prompt, answer)
            worst = max(worst, float(np.abs(scores - logprobs[:count]).max()))
        return worst

    def same_policy(self) -> None:
        """The servers' policy is that of the trainer, and neither that of the update before nor the first."""
        found = self.generate(copies=1)
        assert self.apart(found) < CLOSE
        assert self.apart(found, self.start) > 0.1

    def group(self, number: int = 0) -> int:
        return self.engine._servers[number]._process.pid


@pytest.fixture
def model(fixtures: Path) -> Path:
    return fixtures / "tiny-qwen3"


def once(act):
    """`act` at the first call alone."""
    left = [act]
    return lambda: left.pop()() if left else None


def versions(client) -> set[int | None]:
    """Of the weights of all ranks."""
    return {rank["version"] for rank in client._ranks("logra_describe")}


def after(monkeypatch, client, name: str, act, wanted=lambda *_: True) -> None:
    """`act()` follows the first such call."""
    real, act = getattr(client, name), once(act)

    def call(*arguments, **options):
        found = real(*arguments, **options)
        if wanted(*arguments):
            act()
        return found

    monkeypatch.setattr(client, name, call)


def worker_of(group: int) -> int:
    """Process number of a worker, which is not the server itself."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            named = b"VLLM::" in (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[2]) == group and named:
            found.append(int(folder.name))
    assert found
    return max(found)


@pytest.mark.parametrize(("ranks", "victim"), [(1, "all"), (2, "worker")])
def test_killed_while_it_generates(model, tmp_path, monkeypatch, capsys, ranks: int, victim: str) -> None:
    """With the whole of its processes, or one worker alone, upon which vLLM answers 500 and ends."""
    with Rig(model, tmp_path, ranks=ranks) as rig:
        assert rig.step()["sync/bytes"] > 0
        expected = rig.generate()
        assert rig.apart(expected) < CLOSE
        group = rig.group()

        def kill() -> None:
            if victim == "all":
                os.killpg(group, signal.SIGKILL)
            else:
                os.kill(worker_of(group), signal.SIGKILL)

        after(monkeypatch, rig.engine._servers[0].client, "generate", kill)
        found = rig.generate()
        assert rig.group() != group
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert rig.apart(found) < CLOSE
        assert "is started again" in capsys.readouterr().err
        assert rig.step()["sync/version"] == 2
        rig.same_policy()


def test_one_of_two_is_killed_in_a_sync_and_later_falls_silent(model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(vllm_engine, "HEALTH_SECONDS", 5.0)
    monkeypatch.setattr("logra_jax.sync.pool.HEALTH_SECONDS", 5.0)
    monkeypatch.setattr(servers, "STOP_SECONDS", 2.0)
    with Rig(model, tmp_path, count=2) as rig:
        rig.step()
        victim, other = rig.engine._servers
        first, second = rig.group(0), rig.group(1)
        # It has applied the update and cannot say so any more.
        after(
            monkeypatch, victim.client, "call", lambda: os.killpg(first, signal.SIGKILL),
            lambda path, body=None, **_: path == "/collective_rpc" and body["method"] == "logra_apply",
        )  # fmt: skip
        metrics = rig.step()
        assert metrics["sync/version"] == 2
        assert versions(victim.client) == versions(other.client) == {2}
        assert (rig.group(0) != first, rig.group(1) != second) == (True, False)
        expected = rig.generate()
        assert rig.apart(expected) < CLOSE
        # The other one stops to answer, and keeps its connections.
        other.client.timeout = 20.0
        after(monkeypatch, other.client, "generate", lambda: os.killpg(second, signal.SIGSTOP))
        found = rig.generate()
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert set(rig.engine._pool.lost) == {1}
        assert rig.step()["sync/version"] == 3
        assert rig.group(1) != second
        assert versions(victim.client) == versions(other.client) == {3}
        for lost in (0, 1):  # each alone
            rig.engine._pool.lost = {1 - lost: UserError("left out")}
            rig.same_policy()
    assert "left out until" in capsys.readouterr().err


@pytest.fixture(scope="module", params=[1, 2])
def running(request, fixtures, tmp_path_factory):
    with Rig(fixtures / "tiny-qwen3", tmp_path_factory.mktemp("running"), ranks=request.param) as rig:
        yield SimpleNamespace(rig=rig, client=rig.engine._servers[0].client, ranks=request.param)


def test_what_is_wrong_changes_nothing(running) -> None:
    rig, client = running.rig, running.client
    rig.step()
    update = rig.trainer.update()
    (before,) = versions(client)
    for wrong in (replace(update, base=update.base + 5, version=update.version + 5), replace(update, base=0)):
        with pytest.raises(UserError, match="its weights are as they were"):
            client.sync(wrong)
    assert versions(client) == {before}
    spoilt = bytearray(blobs.encode(update))
    spoilt[-1] ^= 1
    message = base64.b64encode(spoilt).decode()
    ranks = client._ranks("logra_apply", base64_blob=message)
    assert [("damaged" in rank["error"], rank["version"]) for rank in ranks] == [(True, before)] * running.ranks
    for _ in range(3):
        client.sync(update)
    rig.engine.version = rig.engine._pool.version = update.version
    rig.engine.sync(rig.trainer.params(), update.version)
    rig.same_policy()
    rig.step()
    rig.same_policy()


def test_a_port_in_use(running, model, tmp_path) -> None:
    port = running.rig.engine._servers[0].port
    with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 cannot be used"):
        Server(PYTHON, model, tmp_path / "log", port=port)
    if running.ranks > 1:
        return
    with socket.socket() as taken:  # after it was looked at
        server = Server(PYTHON, model, tmp_path / "log", variables=check_vllm.on_cpu(1))
        taken.bind(("127.0.0.1", server.port))
        with pytest.raises(UserError, match=r"ended with code 1 before it answered(.|\n)*ddress already in use"):
            server.__enter__()
