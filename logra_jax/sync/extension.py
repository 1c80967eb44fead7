"""What vLLM's workers are taught: `--worker-extension-cls logra_jax.sync.extension.LograWorkerExtension`.

Its methods are called on every rank by the server's `/collective_rpc`. None of them ever raises: of several ranks
vLLM would leave the replies of the others in their queue, and answer every later call with the one before.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import vllm
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from logra_jax.errors import UserError
from logra_jax.sync import blob as blobs
from logra_jax.sync.weights import Weights


def _keep_weights_unpacked() -> None:
    """vLLM repacks linear weights for a CPU and drops them; updates in place need them as they were loaded.

    Workers import this module before they load a model, and look the function up when they need it.
    """

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = plain


_keep_weights_unpacked()


def _answer(method: Callable[..., Mapping[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The method with a dict for an answer, whatever happens: ok, rank, version, sha256, and more or an error."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            found = {"ok": True, **method(self, *args, **kwargs)}
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            found = {"ok": False, "error": text[:2000]}
        state = getattr(self, "logra_weights", None)
        version, digest, broken = (state.version, state.digest, state.broken) if state else (None, "", "")
        return {"rank": self.rank, "version": version, "sha256": digest, "broken": broken} | found

    return call


class LograWorkerExtension:
    """Mixed into vLLM's worker, so its names must not be among the worker's own."""

    logra_weights: Weights
    # the worker's own
    rank: int
    model_runner: Any
    vllm_config: Any
    reload_weights: Callable[..., None]

    @_answer
    def logra_plan(
        self,
        shapes: Mapping[str, list[int]],
        version: int = 0,
        residual: bool = True,
        prefix: str = "model.",
    ) -> Mapping[str, Any]:
        """Call the weights as they are `version`, and find out where updates go; answers `Weights.parts`."""
        self.logra_weights = Weights(self.model_runner.get_model(), shapes, version, residual, prefix)
        return {"parts": self.logra_weights.parts()}

    @_answer
    def logra_apply(self, base64_blob: str = "", path: str = "") -> Mapping[str, Any]:
        """Apply a blob, from the message or from a file that this machine sees too."""
        if not hasattr(self, "logra_weights"):
            raise UserError("this server has not been told what updates to expect; call plan first")
        update, digest = blobs.read(path) if path else blobs.decode(base64.b64decode(base64_blob))
        return {"already": not self.logra_weights.apply(update, digest)}

    @_answer
    def logra_reload(self, path: str) -> Mapping[str, Any]:
        """Load all weights from a Hugging Face folder; a plan must follow."""
        if hasattr(self, "logra_weights"):
            self.logra_weights.broken = "weights are being loaded"
        self.reload_weights(weights_path=path)
        return {}

    @_answer
    def logra_describe(self) -> Mapping[str, Any]:
        """What is served, and how: versions and sizes, for `needs.Needs`."""
        served, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        scheduler = self.vllm_config.scheduler_config
        return {
            "vllm": vllm.__version__,
            "model": json.loads(json.dumps(served.hf_text_config.to_dict(), default=str)),
            "dtype": str(served.dtype).removeprefix("torch."),
            "max_num_seqs": scheduler.max_num_seqs,
            # Tokens at a time where a prompt may be processed in pieces, else 0.
            "piece": scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else 0,
            "cpu": current_platform.is_cpu(),
            "tensor_parallel": parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
        }
