"""The worker extension with stand-ins for the modules of vLLM that it touches, and for the worker."""

import base64
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from logra_jax.sync.blob import Update, digest, encode, write

torch = pytest.importorskip("torch")


class Served(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 6), requires_grad=False)

    def load_weights(self, weights) -> None:
        for _, value in weights:
            self.weight.data.copy_(value)


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def extension(request, monkeypatch):
    names = ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.utils")
    modules = {name: ModuleType(name) for name in (*names, "vllm.platforms")}
    modules["vllm"].__version__ = "0.32.1"
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: request.param)
    modules["vllm.model_executor.layers"].utils = modules["vllm.model_executor.layers.utils"]
    modules["vllm.model_executor.layers.utils"].dispatch_cpu_unquantized_gemm = "packs"
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "logra_jax.sync.extension", raising=False)
    found = importlib.import_module("logra_jax.sync.extension")
    yield SimpleNamespace(module=found, utils=modules["vllm.model_executor.layers.utils"], cpu=request.param)
    sys.modules.pop("logra_jax.sync.extension", None)


@pytest.fixture
def worker(extension):
    class Worker(extension.module.LograWorkerExtension):
        rank = 1

        def __init__(self) -> None:
            model = Served()
            self.model_runner = SimpleNamespace(get_model=lambda: model)
            text = SimpleNamespace(to_dict=lambda: {"vocab_size": 7, "dtype": torch.float32})
            self.vllm_config = SimpleNamespace(
                model_config=SimpleNamespace(hf_text_config=text, dtype=torch.bfloat16),
                parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
                scheduler_config=SimpleNamespace(
                    max_num_seqs=5, max_num_batched_tokens=40, enable_chunked_prefill=extension.cpu
                ),
            )

        def reload_weights(self, weights_path) -> None:
            if weights_path != "good":
                raise FileNotFoundError(weights_path)

    return Worker()


UPDATE = Update(0, 1, 7, 0, factors={"model.a.weight": np.ones((2, 4), np.float32)})
SHAPES = {"model.a.weight": [4, 6]}


def test_weights_stay_as_they_were_loaded_on_a_cpu(extension) -> None:
    found = extension.utils.dispatch_cpu_unquantized_gemm
    if not extension.cpu:
        assert found == "packs"
        return
    layer = SimpleNamespace(weight="untouched")
    found(layer, remove_weight=True)
    assert layer == SimpleNamespace(weight="untouched", cpu_linear=torch.nn.functional.linear)


def test_plan_and_apply(worker, tmp_path) -> None:
    found = worker.logra_plan(SHAPES, version=0)
    assert found == {
        "ok": True, "rank": 1, "version": 0, "sha256": "", "broken": "",
        "parts": {"model.a.weight": [((0, 4), (0, 6))]},
    }  # fmt: skip
    blob = encode(UPDATE)
    write(tmp_path / "blob", blob)
    text = base64.b64encode(blob).decode()
    for arguments, already in (({"base64_blob": text}, False), ({"path": str(tmp_path / "blob")}, True)):
        found = worker.logra_apply(**arguments)
        assert found == {
            "ok": True, "rank": 1, "version": 1, "sha256": digest(blob), "broken": "", "already": already,
        }  # fmt: skip
    assert float(worker.model_runner.get_model().weight.max()) > 1.5  # 1 + 2 / sqrt(2) where both signs are +


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("logra_apply", {"base64_blob": ""}, "call plan first"),
        ("logra_plan", {"shapes": {"model.a.weight": [4, 7]}}, "is to take (4, 7)"),
        ("logra_plan", {"shapes": 3}, "AttributeError"),
        ("logra_reload", {"path": "gone"}, "FileNotFoundError: gone"),
    ],
)
def test_nothing_is_ever_raised(worker, method: str, arguments: dict, error: str) -> None:
    found = getattr(worker, method)(**arguments)
    assert (found["ok"], found["rank"]) == (False, 1)
    assert error in found["error"]


def test_damaged_blobs_and_missing_files_are_answers(worker) -> None:
    worker.logra_plan(SHAPES)
    for arguments in ({"base64_blob": "AAAA"}, {"base64_blob": "?"}, {"path": "/gone"}):
        found = worker.logra_apply(**arguments)
        assert not found["ok"]
        assert (found["version"], found["broken"]) == (0, "")


def test_after_a_reload_only_a_plan_helps(worker) -> None:
    worker.logra_plan(SHAPES)
    blob = base64.b64encode(encode(UPDATE)).decode()
    assert worker.logra_apply(blob)["ok"]
    assert worker.logra_reload("good")["ok"]
    assert "of no version" in worker.logra_apply(blob)["error"]  # nor is it the one that the weights had before
    worker.logra_plan(SHAPES)
    assert worker.logra_apply(blob)["ok"]


def test_a_worker_says_what_it_serves(worker, extension) -> None:
    found = worker.logra_describe()
    assert json.loads(json.dumps(found)) == found
    wanted = {"ok": True, "rank": 1, "vllm": "0.32.1", "dtype": "bfloat16", "max_num_seqs": 5}
    wanted |= {"tensor_parallel": 2, "pipeline_parallel": 1, "version": None}
    wanted |= {"piece": 40 * extension.cpu, "cpu": extension.cpu}
    assert wanted.items() <= found.items()
    assert found["model"]["vocab_size"] == 7
