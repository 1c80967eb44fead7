"""Training with vLLM servers: against a stand-in that holds real weights, and against a real server if there is one."""

import base64
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from members import assert_same, ended, outcome
from safetensors.numpy import load_file, save_file
from served import served

import logra_jax.run
from logra_jax import build, cli, servers, train
from logra_jax.config import load_config, resolve_path
from logra_jax.metrics import MetricsWriter, read_rows
from logra_jax.models import load_hf, save_hf
from logra_jax.optim import twin
from logra_jax.rl.vllm_engine import VllmEngine
from logra_jax.sync import blob
from logra_jax.sync.client import Client

PYTHON = os.environ.get("LOGRA_VLLM_PYTHON", "")


class Stand:
    """A server of one rank in numpy: it applies what it is sent, and answers with ids drawn by the request's seed."""

    def __init__(self) -> None:
        self.calls: list = []
        self.logits = None
        self.weights: dict[str, np.ndarray] = {}
        self.version, self.longest, self.fails, self.refuses, self.folder = "", 64, (), "never", Path()
        self.vllm, self.model, self.cpu, self.prefix = "0.32.0", {}, True, "model."

    def answer(self, path: str, body: dict) -> object:
        if path == "/collective_rpc":
            return {"results": [{"rank": 0, "ok": True, "broken": ""} | getattr(self, body["method"])(body["kwargs"])]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/inference/v1/generate":
            sampling = body["sampling_params"]
            if "prompt_logprobs" in sampling:
                return {"prompt_logprobs": self.score(body["token_ids"])}
            return {"choices": [self.choice(j, sampling) for j in range(sampling["n"])]}
        card = {"id": "policy", "max_model_len": self.longest}
        return {"/v1/models": {"data": [card]}, "/reset_prefix_cache": {"success": True}}.get(path, {})

    def choice(self, j: int, sampling: dict) -> dict:
        (end,), longest = sampling["stop_token_ids"], sampling["max_tokens"]
        seed = [sampling["seed"] + j, int(self.version)]  # answers tell under which weights they were drawn
        tokens = np.random.default_rng(seed).integers(2, 17, longest).tolist()
        tokens[-1] = end if j % 2 else tokens[-1]
        return {
            "index": j, "token_ids": tokens, "finish_reason": "stop" if j % 2 else "length",
            "logprobs": {"content": [{"logprob": -2.8}] * longest}, "weight_versions": [{"version": self.version}],
        }  # fmt: skip

    def score(self, ids: list[int]) -> list:
        """Real log-probabilities of the weights that are here."""
        shutil.copytree(self.folder, "scored", dirs_exist_ok=True)
        save_file(self.weights, "scored/model.safetensors")
        model, params = load_hf("scored")
        self.logits = self.logits or jax.jit(model.logits)
        row = np.pad(ids, (0, 8 - len(ids)))[None].astype(np.int32)
        found = np.asarray(jax.nn.log_softmax(self.logits(params, row, np.arange(8)[None] < len(ids))[0]))
        return [None, *({str(ids[i]): {"logprob": float(found[i - 1, ids[i]])}} for i in range(1, len(ids)))]

    def logra_describe(self, asked: dict) -> dict:
        return {"vllm": self.vllm, "max_num_seqs": 4, "piece": 0, "cpu": self.cpu, "model": self.model}

    def stored(self, name: str) -> str:
        """What the file calls a tensor."""
        return self.prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def logra_plan(self, asked: dict) -> dict:
        self.calls.append(asked["version"])
        self.prefix = asked["prefix"]
        shapes = {name: self.weights[self.stored(name)].shape for name in asked["shapes"]}
        assert shapes == {name: tuple(shape) for name, shape in asked["shapes"].items()}
        return {"parts": {name: [[[0, size] for size in shape]] for name, shape in shapes.items()}}

    def logra_reload(self, asked: dict) -> dict:
        self.folder = Path(asked["path"])
        self.weights = load_file(self.folder / "model.safetensors")
        return {}

    def logra_apply(self, asked: dict) -> dict:
        update, digest = blob.decode(base64.b64decode(asked["base64_blob"]))
        self.calls.append((update.base, update.version))
        if update.version in self.fails:
            return {"ok": False, "error": "half-way", "broken": "half-way", "version": update.base, "sha256": ""}
        for name, bits in update.factors.items():
            factor = (bits.astype(np.uint32) << 16).view(np.float32)
            before = self.weights[self.stored(name)]
            signs = twin.signs(update.seed, update.drawn, name, len(factor), before.shape[1])
            change = factor.T.astype(np.float64) @ signs / np.sqrt(len(factor))
            self.weights[self.stored(name)] = ((1 - update.decay) * before + change).astype(np.float32)
        self.weights |= {self.stored(name): value for name, value in update.dense.items()}
        return {"version": update.version, "sha256": digest}


@pytest.fixture
def stand():
    stand = Stand()

    def answer(path: str, body: object) -> tuple[int, object]:
        if path == "/inference/v1/generate" and stand.version == stand.refuses:
            return 500, {}
        return 200, stand.answer(path.partition("?")[0], body or {})

    with served(answer) as url:
        stand.url = url
        yield stand


FAST = """
data.eval=null checkpoint.every=0 checkpoint.async=false optimizer.others=adamw optimizer.others_learning_rate=1e-3
optimizer.weight_decay=.1 loss.reference_kl=0 kl.control=false kl.check_every=0 steps=5
"""


def test_a_server_has_the_trainers_weights_after_every_update(stand, command_settings, monkeypatch, capsys) -> None:
    """Through a sync that fails, an update that is not finite, and a resume."""
    argv = [*command_settings, *FAST.split(), "rollout.engine=vllm", f"vllm.urls=[{stand.url}]", "vllm.drift_every=2"]
    monkeypatch.setattr(MetricsWriter, "draw", lambda self: None)  # takes longer than all the rest
    batch = logra_jax.run.Run.batch

    def spoilt(self, rollout, advantages, state):
        found = batch(self, rollout, advantages, state)
        return found._replace(advantages=found.advantages * np.float32("nan")) if stand.calls[-1] == (3, 4) else found

    # optax.adamw raises a float to an int32 power.
    with monkeypatch.context() as patched, jax.numpy_dtype_promotion("standard"):
        patched.setattr(logra_jax.run.Run, "batch", spoilt)
        stand.fails = (2,)
        assert train.main(argv) == train.FAILED
        assert "update 4 was not finite" in capsys.readouterr().err
        assert stand.calls == [0, (0, 1), (1, 2), 2, (2, 3), (3, 4)]
        assert stand.version == "4"
    with jax.numpy_dtype_promotion("standard"):
        assert train.main([*argv, "--resume"]) == 0
    assert stand.calls[6:] == [4, (4, 5)]
    wanted = load_file("out/hf/model.safetensors")
    assert stand.weights.keys() == wanted.keys()
    for name, weight in wanted.items():
        # Sums of a rounded weight and 4 or fewer products in another order, after a reload: few roundings.
        np.testing.assert_allclose(stand.weights[name], weight, rtol=0, atol=1e-6 * np.abs(weight).max(), err_msg=name)
    rows = read_rows("out/metrics.jsonl")
    assert [row["sync/version"] for row in rows] == [1, 1, 3, 4, 5]
    assert [row["sync/bytes"] > 0 for row in rows] == [True, False, True, True, True]
    assert [row["rollout/staleness"] for row in rows] == [0] * 5
    # The servers' weights are the trainer's, up to the roundings above, and so are log-probabilities of some -3.
    assert [row["sync/drift"] < 1e-5 for row in rows if "sync/drift" in row] == [True] * 3
    assert not list(Path("out/sync").iterdir())


def test_two_processes_and_their_servers(stand, members, command_settings, monkeypatch, capsys) -> None:
    """As one process with two devices to the bit, through a sync that fails, until the server refuses: both leave."""
    plain = [setting for setting in FAST.split() if not setting.startswith("optimizer.")]
    settings = [*command_settings, *plain, "rollout.engine=vllm", f"vllm.urls=[{stand.url}]", "mesh.fsdp=2"]
    stand.fails, stand.refuses = (2,), "3"
    calls = [0, (0, 1), (1, 2), 2, (2, 3), 3, 3]  # what refuses is given all weights, twice
    (code, _, errors), (code_too, _, more) = ended(members("-m", "logra_jax.train", *settings))
    assert (code, code_too) == (2, 2), errors + more
    assert "all weights are loaded instead" in errors
    assert "the server answered 500" in errors
    assert "process 0 failed; see what it has written" in more
    assert stand.calls == calls
    stand.calls.clear()
    stand.version = ""
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: train.main([*settings, "out=whole"]))
    assert "the server answered 500" in capsys.readouterr().err
    assert stand.calls == calls
    assert_same(outcome("out", 3), outcome("whole", 3))


def test_what_cannot_work_is_said_before_anything_is_trained(stand, command_settings, monkeypatch, capsys) -> None:
    argv = [*command_settings, "rollout.engine=vllm", "vllm.timeout_s=5"]

    def refused(*more: str) -> str:
        with pytest.raises(SystemExit) as left:
            cli.run(lambda: train.main([*argv, *more]))
        assert left.value.code == 2
        return capsys.readouterr().err

    stand.longest = 11
    monkeypatch.setattr(logra_jax.run.Run, "load", lambda *_: pytest.fail("the weights were read"))
    url = f"vllm.urls=[{stand.url}]"
    assert "takes 11 tokens (--max-model-len)" in refused(url)
    stand.longest = 64
    assert "answers 4 times at once" in refused(url, "rollout.generations=6")
    stand.model, stand.vllm = {"hidden_size": 99}, "0.31.0"
    assert "serves another model, of hidden_size 99, not 32" in refused(url)
    stand.model = {"hidden_size": 32}
    with pytest.raises(pytest.fail.Exception, match="were read"):
        train.main([*argv, url, f"vllm.urls=[{stand.url},{stand.url}]"])
    assert capsys.readouterr().err.count("warning: vLLM 0.31.0 serves; tested with 0.32") == 1
    assert "has no vLLM" in refused(f"vllm.python={sys.executable}")
    assert "http://127.0.0.1:1/v1/models: no answer" in refused("vllm.urls=[http://127.0.0.1:1]")
    assert "nowhere is no interpreter that can be run" in refused("vllm.python=nowhere")
    assert not stand.calls
    assert list(Path().iterdir()) == []


def test_a_signal_is_noticed_while_servers_start(command_settings, tmp_path, monkeypatch, capsys) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo 0.32.0 && exit\nexec sleep 60\n')
    python.chmod(0o755)
    signals = [signal.SIGINT]

    def healthy(self) -> bool:
        if signals:
            signal.pthread_kill(threading.get_ident(), signals.pop())  # not the main thread
        return False

    monkeypatch.setattr(Client, "healthy", healthy)
    assert train.main([*command_settings, "rollout.engine=vllm", f"vllm.python={python}"]) == 130
    assert "stopped by SIGINT: saved after 0 updates" in capsys.readouterr().err


def test_servers_are_started_as_the_settings_say(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(servers, "Server", lambda *places, **options: asked.append((places, options)))
    settings = f"""rollout.engine=vllm vllm.python={sys.executable} vllm.servers=2 vllm.tensor_parallel=2
        vllm.gpus=4,5,6,7 vllm.arguments=[--enforce-eager,--max-num-seqs,64] vllm.port=18777
        vllm.start_s=9 vllm.timeout_s=8 vllm.folder={tmp_path / "shared"}"""
    config = load_config(None, settings.split())
    model, _ = load_hf(resolve_path(config.model.path))
    sampler = build.make_sampler(config, model, 17, 1.0, 1.0)
    interrupt = lambda: None
    engine = servers.make_engine(config, sampler, 6, {}, lambda params, folder: None, jnp.asarray, interrupt)
    engine._start(tmp_path / "weights")
    # Other runs may have the folder too.
    assert [places[2] for places, _ in asked] == [Path("out/sync/server-0.log"), Path("out/sync/server-1.log")]
    assert Path("out/sync").is_dir()
    for (places, options), gpus, port in zip(asked, ("4,5", "6,7"), (18777, 18778), strict=True):
        assert places[:2] == (Path(sys.executable), tmp_path / "weights")
        assert options == {
            "port": port, "folder": tmp_path / "shared", "start_seconds": 9.0, "timeout": 8.0,
            "interrupt": interrupt, "variables": {"CUDA_VISIBLE_DEVICES": gpus},
            "options": {"dtype": "float32", "tensor_parallel": 2, "max_length": 6 + 33, "max_sequences": 64,
                        "more": ("--enforce-eager", "--max-num-seqs", "64")},
        }  # fmt: skip


def test_a_server_of_a_multimodal_folder_is_told_how_that_names_its_text(stand, fixtures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stand.cpu = False
    model, params = load_hf(fixtures / "tiny-qwen3_5-vlm-names")
    config = load_config(None, ["rollout.engine=vllm", f"vllm.urls=[{stand.url}]", "rollout.generations=4"])
    leaves = {"layers/mlp/up_proj/kernel": params["layers"]["mlp"]["up_proj"]["kernel"], "norm/scale": jnp.ones(64)}
    sampler = build.make_sampler(config, model, 311, 1.0, 1.0)
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    write = lambda params, folder: save_hf(model, params, folder, overwrite=True)
    engine = servers.make_engine(config, sampler, 6, shapes, write, jnp.asarray)
    engine.sync(params, 0)
    kernel, scale = leaves.values()
    factors = {"layers/mlp/up_proj/kernel": jnp.ones((*kernel.shape[:-2], 2, kernel.shape[-1]), jnp.bfloat16)}
    for version in (1, 2):
        before = dict(stand.weights)
        dense = {"norm/scale": scale * version}
        assert engine.advance(version, factors, dense, seed=5, drawn=0, decay=0.5)["sync/version"] == version
        changed = {name for name, weight in stand.weights.items() if not np.array_equal(weight, before[name])}
        targets = {f"model.language_model.layers.{i}.mlp.up_proj.weight" for i in range(4)}
        assert changed == targets | {"model.language_model.norm.weight"}
        engine.reload(params, version)
    engine.close()


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON, reason="LOGRA_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_real_server_samples_from_the_policy(staleness, fixtures, tmp_path, monkeypatch, capsys) -> None:
    """Of the weights that are trained, or of those before; also after it was given old weights under a new name."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(fixtures / "tiny-qwen3", "model")
    rows = [{"prompt": f"How much is {a} and {a}?", "answer": str(2 * a)} for a in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    differences, batch, score, kept = [], logra_jax.run.Run.batch, VllmEngine.score, []

    def compared(self, rollout, advantages, state):
        found = batch(self, rollout, advantages, state)
        kept.append(jax.tree.map(jnp.copy, state.train))
        assert set(np.asarray(rollout.versions)) == {max(0, len(kept) - 1 - staleness)}
        scored = np.asarray(self._score(kept[max(0, len(kept) - 1 - staleness)], self.frozen, found))
        real = np.arange(scored.shape[1]) < np.asarray(found.lengths)[:, None]
        differences.append(np.abs(scored - np.asarray(found.rollout_logprobs))[real].max())
        varied = np.arange(8, dtype=np.float32) % 2 - np.float32(0.5)
        return found._replace(advantages=varied)  # answers of a random model are all wrong

    def spoilt(self, prompts):
        if self.version == 2 and not capsys.readouterr().err:  # until that is noticed
            self._pool.clients[0].reload(self._weights, self._shapes, 2)
        return score(self, prompts)

    monkeypatch.setattr(VllmEngine, "score", spoilt)
    monkeypatch.setattr(logra_jax.run.Run, "batch", compared)
    settings = """
        steps=4 model.path=model model.compute_dtype=float32 data.train=rows.jsonl data.eval=null
        data.max_prompt_length=99 mesh.fsdp=1
        rollout.prompts=4 rollout.generations=2 rollout.max_new_tokens=12 rollout.temperature=0.7 reward.kind=exact
        reward.pattern=null optimizer.rank=8 optimizer.update_ratio=.03 kl.control=false kl.check_every=0
        checkpoint.every=0 log.tensorboard=false log.progress=false
        rollout.engine=vllm vllm.arguments=[--enforce-eager,--no-enable-chunked-prefill] vllm.start_s=300"""
    more = ["vllm.drift_every=1", f"rollout.staleness={staleness}", "loss.importance_cap=2"]
    assert train.main([*settings.split(), *more, f"vllm.python={PYTHON}"]) == 0
    rows = read_rows("out/metrics.jsonl")
    assert [row["rollout/staleness"] for row in rows] == [0] + [staleness] * 3
    assert "with all weights loaded" not in capsys.readouterr().err
    # Log-probabilities of some -6 at temperature 0.7, from sums in another order.
    assert len(differences) == 4
    assert max(differences) < 1e-4
    assert [row["importance/max_deviation"] < 1e-4 for row in rows] == [True] + [not staleness] * 3
    assert [row["sync/drift"] < 1e-4 for row in rows] == [True, True, False, True]
