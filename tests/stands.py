"""Stand-ins for vLLM servers, spoken to without HTTP, and an engine over them."""

import threading
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tiny import TINY

from logra_jax.models import CausalLM
from logra_jax.models.names import name_table
from logra_jax.rl.rollout import Sampler
from logra_jax.rl.vllm_engine import VllmEngine
from logra_jax.sync.client import Client, Completion, Synced, Unreachable

END, PAD, VOCAB, WIDTH, NEW = 3, 0, 30, 4, 6
PREFIX = "model.language_model."
KERNEL = "layers/mlp/up_proj/kernel"
SHAPES = {KERNEL: (3, 16, 24), "norm/scale": (16,)}


class Stand(Client):
    """Notes what it is asked; answers with its prompt's first token as often as the answer's seed says, and an end.

    dies: answers after which it is gone. piece: tokens at a time. served: of its config.json, other than the trainer's.
    after: one whose failure it waits for before it answers.
    """

    def __init__(
        self, longest: int = WIDTH + NEW, dies: int = 10**6, name: str = "stand", piece: int = 0, **served
    ) -> None:
        super().__init__(f"http://{name}")
        self.dies, self.piece, self.served = dies, piece, served
        self.calls: list = []
        self.asked: dict = {}
        self.at, self.most, self.error = -1, longest, None
        self.lock, self.gone = threading.Lock(), threading.Event()
        self.after: Stand | None = None

    def longest(self):
        return self.most

    def describe(self):
        config = TINY.to_hf("float32") | self.served
        return {"vllm": "0.32.0", "max_num_seqs": 8, "piece": self.piece, "cpu": True, "model": config}

    def healthy(self, timeout):
        return self.dies > 0

    def plan(self, shapes, version, prefix):
        assert prefix == PREFIX
        self.calls.append(("plan", version))
        self.shapes, self.at = shapes, version

    def reload(self, folder, shapes, version, prefix):
        assert prefix == PREFIX
        self.calls.append(("reload", version))
        self.folder, self.shapes, self.at = folder, shapes, version

    def sync(self, update, blob):
        if not self.dies:
            raise Unreachable(f"{self.url} is gone")
        if self.error:
            raise self.error
        self.calls.append(("sync", update.base, update.version))
        self.update, self.at = update, update.version
        return Synced(len(blob), 1.0, 1.0)

    def answer(self, prompt, seed):
        count = seed % 5
        return Completion([prompt[0]] * count + [END], [-float(seed % 7 + 1)] * (count + 1), True, self.at)

    def generate(self, prompt, *, seed, n, **settings):
        assert self.after is None or self.after.gone.wait(60)
        with self.lock:
            if not self.dies:
                self.gone.set()
                raise Unreachable(f"{self.url} is gone")
            self.dies -= 1
            self.asked[tuple(prompt)] = (seed, n, settings)
        return [self.answer(prompt, seed + j) for j in range(n)]


def make_engine(folder: Path, *stands: Stand, **options: object) -> VllmEngine:
    """An engine over stand-ins, or over servers that `start` makes; weights "p" are a folder of that name."""
    sampler = Sampler(CausalLM(TINY), max_new_tokens=NEW, end_ids=(END,), vocab_size=VOCAB, pad_id=PAD, temperature=0.7)
    given = {
        "prompt_width": WIDTH, "write": lambda params, folder: (folder / params).mkdir(parents=True, exist_ok=True),
        "place": jnp.asarray, "folder": folder, "table": name_table(TINY), "shapes": SHAPES, "prefix": PREFIX,
        "clients": stands,
    }  # fmt: skip
    return VllmEngine(sampler, **given | options)


def advance(engine, version):
    factors = {KERNEL: np.full((3, 2, 24), version, ml_dtypes.bfloat16)}
    dense = {"norm/scale": np.full(16, version, np.float32)}
    return engine.advance(version, factors, dense, seed=5, drawn=version - 1, decay=0.5)
