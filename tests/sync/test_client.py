"""The client against a stand-in for a server: what it asks for, in which order, and what it makes of the answers."""

import base64
import socket
import threading

import numpy as np
import pytest
from served import served

from logra_jax.errors import UserError
from logra_jax.sync import blob as blobs
from logra_jax.sync import client as clients
from logra_jax.sync.blob import Update
from logra_jax.sync.client import Client, Unreachable

SHAPES = {"a.weight": (4, 6)}
UPDATE = Update(0, 1, 7, 0, factors={"a.weight": np.ones((2, 4), np.float32)})
DIGEST = blobs.digest(blobs.encode(UPDATE))


class Stand:
    """Answers as two ranks with half of the rows each; `ranks` and `answers` can be replaced."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: list = []
        self.paths: list[str] = []
        self.answers: dict = {"/reset_prefix_cache": {"success": True}}
        same = {"ok": True, "broken": ""}
        self.ranks: dict = {
            "logra_plan": [same | {"rank": i, "parts": {"a.weight": [[[2 * i, 2 * i + 2], [0, 6]]]}} for i in range(2)],
            "logra_apply": [same | {"rank": i, "version": 1, "sha256": DIGEST} for i in range(2)],
            "logra_reload": [same | {"rank": i} for i in range(2)],
        }

    def answer(self, path: str, body) -> tuple[int, object]:
        self.bodies.append(body)
        if path == "/collective_rpc":
            self.calls.append(body["method"])
            if file := body["kwargs"].get("path", "").replace("/all", ""):
                self.paths.append(file)
                blobs.read(file) if file.endswith(".safetensors") else None
            return 200, {"results": self.ranks[body["method"]]}
        self.calls.append(path)
        found = self.answers.get(path.partition("?")[0], {})
        return (found, {"reason": "no"}) if isinstance(found, int) else (200, found)


@pytest.fixture
def stand():
    stand = Stand()
    with served(stand.answer) as url:
        stand.client = Client(url, timeout=10)
        yield stand


def test_a_plan_must_cover_every_element(stand) -> None:
    stand.client.plan(SHAPES, version=3)
    assert stand.bodies[0]["kwargs"] == {
        "shapes": {"a.weight": [4, 6]}, "version": 3, "residual": True, "prefix": "model.",
    }  # fmt: skip
    assert stand.bodies[1] == {"new_version": "3"}
    stand.ranks["logra_plan"][1]["parts"] = {"a.weight": []}
    with pytest.raises(UserError, match=r"a.weight \[4, 6\]: all ranks together hold 12 of 24"):
        stand.client.plan(SHAPES)
    stand.ranks["logra_plan"][1] |= {"ok": False, "error": "packed"}
    with pytest.raises(UserError, match=r"rank 1 cannot be synced by factors.*packed"):
        stand.client.plan(SHAPES)


def test_a_sync_pauses_applies_forgets_and_goes_on(stand) -> None:
    found = stand.client.sync(UPDATE)
    assert stand.calls == [
        "/pause?mode=keep&clear_cache=true", "logra_apply", "/reset_prefix_cache", "/update_weight_version", "/resume",
    ]  # fmt: skip
    blob = base64.b64decode(stand.bodies[1]["kwargs"]["base64_blob"])
    assert blob == blobs.encode(UPDATE)
    assert found.bytes == len(blob)
    assert 0 < found.apply_seconds <= found.seconds


def test_large_blobs_go_through_a_shared_folder(stand, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(clients, "LARGEST_MESSAGE", 100)
    with pytest.raises(UserError, match="name a folder"):
        stand.client.sync(UPDATE)
    stand.client.folder = tmp_path / "missing"
    with pytest.raises(UserError, match="cannot be written"):
        stand.client.sync(UPDATE)
    assert not stand.calls  # nobody was paused for what could not be sent
    stand.client.folder = tmp_path
    stand.client.sync(UPDATE)
    assert len(stand.paths) == 1
    assert stand.paths[0].startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_refused_update_leaves_the_server_running(stand) -> None:
    for rank in stand.ranks["logra_apply"]:
        rank |= {"ok": False, "error": "the weights are at version 5", "version": 5}
    with pytest.raises(UserError, match=r"rank 0 refused.*its weights are as they were: the weights are at version 5"):
        stand.client.sync(UPDATE)
    assert stand.calls[-1] == "/resume"


@pytest.mark.parametrize(
    "answer",
    [{"ok": False, "error": "half-way", "broken": "half-way"}, {"sha256": "another"}, {"version": 0}],
)
def test_a_server_whose_ranks_disagree_stays_paused(stand, answer: dict) -> None:
    stand.ranks["logra_apply"][1] |= answer
    with pytest.raises(UserError, match="reload all weights"):
        stand.client.sync(UPDATE)
    assert "/resume" not in stand.calls


def test_one_rank_that_refuses_is_no_clean_refusal(stand) -> None:
    stand.ranks["logra_apply"][1] |= {"ok": False, "error": "file not found", "version": 0, "sha256": ""}
    with pytest.raises(UserError, match=r"rank 1 failed.*stays paused.*file not found"):
        stand.client.sync(UPDATE)
    assert "/resume" not in stand.calls


@pytest.mark.parametrize("results", [[], ["text"], [{"rank": 1}, {"rank": 0}]])
def test_answers_out_of_step_are_noticed(stand, results: list) -> None:
    stand.ranks["logra_apply"] = results
    with pytest.raises(UserError, match="out of step; restart"):
        stand.client.sync(UPDATE)


def test_an_old_cache_is_not_used(stand) -> None:
    stand.answers["/reset_prefix_cache"] = {"success": False}
    with pytest.raises(UserError, match="prefix cache"):
        stand.client.sync(UPDATE)
    assert "/resume" not in stand.calls


def test_a_reload_is_followed_by_a_plan(stand, tmp_path) -> None:
    stand.client.reload(tmp_path, SHAPES, 9)
    assert stand.calls[0].startswith("/pause")
    assert stand.calls[1:3] == ["logra_reload", "logra_plan"]
    assert stand.calls[-1] == "/resume"


def test_answers_come_in_their_order(stand) -> None:
    def choice(index: int, reason: str, version: str) -> dict:
        content = [{"logprob": -0.5 * index}, {"logprob": -1.0}]
        return {
            "index": index, "token_ids": [index, 3], "finish_reason": reason, "logprobs": {"content": content},
            "weight_versions": [{"version": "0"}, {"version": version}],
        }  # fmt: skip

    stand.answers["/inference/v1/generate"] = {"choices": [choice(1, "length", "2"), choice(0, "stop", "2")]}
    found = stand.client.generate(np.array([4, 5]), max_tokens=2, seed=11, n=2, temperature=0.7, end_ids=[3])
    assert found == [([0, 3], [0.0, -1.0], True, 2), ([1, 3], [-0.5, -1.0], False, 2)]
    assert stand.bodies[0]["token_ids"] == [4, 5]
    wanted = {"n": 2, "seed": 11, "max_tokens": 2, "temperature": 0.7, "stop_token_ids": [3], "logprobs": 0}
    assert wanted.items() <= stand.bodies[0]["sampling_params"].items()
    assert "logit_bias" not in stand.bodies[0]["sampling_params"]
    stand.client.generate([4], max_tokens=2, seed=0, banned_ids=range(7, 9))
    assert stand.bodies[1]["sampling_params"]["logit_bias"] == {"7": -100.0, "8": -100.0}
    stand.answers["/inference/v1/generate"] = {"choices": [choice(0, "abort", "2")]}
    with pytest.raises(Unreachable, match="ended with 'abort'"):
        stand.client.generate([4], max_tokens=2, seed=0)
    stand.answers["/inference/v1/generate"] = {"choices": [choice(0, "stop", "default")]}
    assert stand.client.generate([4], max_tokens=2, seed=0)[0].version == -1  # of a server without a plan


def test_a_server_tells_what_it_serves(stand) -> None:
    stand.answers["/v1/models"] = {"data": [{"id": "policy", "max_model_len": 77}]}
    assert stand.client.longest() == 77
    stand.answers["/v1/models"]["data"][0]["id"] = "other"
    with pytest.raises(UserError, match="serves other, not 'policy'"):
        stand.client.longest()


def test_refusals_and_silence_are_told_apart(stand) -> None:
    stand.answers["/inference/v1/generate"] = 403
    with pytest.raises(UserError, match=r"answered 403: .*no") as refused:
        stand.client.generate([4], max_tokens=2, seed=0)
    assert not isinstance(refused.value, Unreachable)
    silent = Client("http://127.0.0.1:1", timeout=2)
    with pytest.raises(Unreachable, match="no answer"):
        silent.generate([4], max_tokens=2, seed=0)
    assert stand.client.healthy()
    assert not silent.healthy()
    stand.answers["/inference/v1/generate"] = 500  # what vLLM says once a worker is gone
    with pytest.raises(Unreachable, match="answered 500"):
        stand.client.generate([4], max_tokens=2, seed=0)


def test_a_prompt_is_scored_token_by_token(stand) -> None:
    entry = lambda token, value: {str(token): {"logprob": value, "rank": 3, "decoded_token": None}}
    stand.answers["/inference/v1/generate"] = {"prompt_logprobs": [None, entry(17, -8.5), entry(5, -0.25)]}
    assert stand.client.score(np.array([5, 17, 5])) == [-8.5, -0.25]
    body = stand.bodies[-1]
    assert body["token_ids"] == [5, 17, 5]
    # Of the prompt's own tokens alone; and a server generates at least one.
    asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    assert body["sampling_params"] == asked


def test_answers_under_way_are_given_up(stand) -> None:
    stand.client.abort()
    assert stand.calls == ["/pause?mode=abort", "/resume"]


@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error"])
def test_a_server_that_ends_in_the_middle_of_an_answer_is_gone(status) -> None:
    def speak(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 99\r\n\r\nhalf".encode())

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=speak, args=(listening,))
        thread.start()
        with pytest.raises(Unreachable):
            Client(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=10).call("/x", method="GET")
        thread.join()
