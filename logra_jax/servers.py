"""The vLLM servers that a run asks for: whether they fit it, and the engine that speaks to them."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax

from logra_jax import build, distributed
from logra_jax.config import Config
from logra_jax.errors import UserError
from logra_jax.models import ModelConfig
from logra_jax.models.names import name_table
from logra_jax.models.save import text_prefix
from logra_jax.rl.rollout import Sampler
from logra_jax.rl.shared_engine import SharedEngine
from logra_jax.rl.vllm_engine import VllmEngine
from logra_jax.sync.client import Client
from logra_jax.sync.needs import TESTED, Needs, tested
from logra_jax.sync.server import Server, vllm_version


def check(config: Config, shape: ModelConfig, prompt_width: int) -> None:
    """Ask running servers, and the environment of those to start, whether they fit the run. Raises UserError."""
    settings, rollout = config.vllm, config.rollout
    if rollout.engine != "vllm":
        return
    if rollout.staleness and not distributed.alone():
        raise UserError(
            "rollout.staleness=1 is for runs of one process: several would have to grade together while they compute. "
            "Set rollout.staleness=0"
        )
    needs = Needs(prompt_width, rollout.max_new_tokens, rollout.generations, shape.to_hf(config.model.compute_dtype))
    if settings.urls:
        found = {needs.check(Client(url, timeout=settings.timeout_s)) for url in settings.urls}
    else:
        found = {vllm_version(Path(str(settings.python)).expanduser())}
    for version in sorted(found):
        if not tested(version):
            print(f"warning: vLLM {version} serves; tested with {TESTED}", file=sys.stderr, flush=True)


def make_engine(
    config: Config,
    sampler: Sampler,
    prompt_width: int,
    shapes: Mapping[str, tuple[int, ...]],
    write: Callable[[Any, Path], None],
    place: Callable[[Any], jax.Array],
    interrupt: Callable[[], object] = lambda: None,
) -> VllmEngine | SharedEngine:
    """The servers of a run; arguments as in `VllmEngine` and `Server`, `write` one that all processes call.

    Of several processes only one waits for servers, so that `interrupt`, which asks all, is not called. Raises
    UserError.
    """
    settings, alone = config.vllm, distributed.alone()
    own = Path(config.out, "sync")
    folder = Path(settings.folder or own)
    each = settings.tensor_parallel
    gpus = settings.gpus.split(",") if settings.gpus is not None else []

    def start(weights: Path) -> list[Server]:
        own.mkdir(parents=True, exist_ok=True)
        options = {
            "dtype": settings.dtype or config.model.compute_dtype,
            "tensor_parallel": each,
            "max_length": prompt_width + sampler.max_new_tokens,
            "max_sequences": max(64, config.rollout.generations),
            "more": tuple(map(str, settings.arguments)),
        }
        return [
            Server(
                Path(str(settings.python)).expanduser(), weights, own / f"server-{i}.log", options=options,
                port=settings.port and settings.port + i, folder=folder,
                start_seconds=settings.start_s, timeout=settings.timeout_s,
                interrupt=interrupt if alone else lambda: None,
                variables={"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * each : (i + 1) * each])} if gpus else {},
            )
            for i in range(settings.servers)
        ]  # fmt: skip

    make = partial(
        VllmEngine,
        sampler,
        prompt_width=prompt_width,
        answers=config.rollout.generations,
        folder=folder,
        table=name_table(sampler.model.config),
        shapes=shapes if build.sends_factors(config) else {},
        prefix=text_prefix(sampler.model),
        full_every=settings.full_every,
        clients=[Client(url, timeout=settings.timeout_s, folder=folder) for url in settings.urls],
        start=start,
    )
    return make(write=write, place=place) if alone else SharedEngine(make, write, place, sampler)
