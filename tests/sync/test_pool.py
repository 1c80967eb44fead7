"""Several servers as one, with stand-ins for their clients."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest

from logra_jax.errors import UserError
from logra_jax.sync.blob import Update, encode
from logra_jax.sync.client import Completion, Unreachable
from logra_jax.sync.pool import Pool


@dataclass
class Stand:
    """Answers with its prompt and seed; falls silent after `lasts` answers."""

    url: str
    lasts: int = 10**6
    version: int = 1
    error: Exception | None = None
    served: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generate(self, prompt, *, seed, max_tokens):
        with self.lock:
            if len(self.served) >= self.lasts:
                raise Unreachable(f"{self.url} is gone")
            self.served.append(prompt)
        if self.error:
            raise self.error
        return [Completion([*prompt, seed], [0.0], True, self.version)]

    def sync(self, update, blob):
        if self.error:
            raise self.error
        assert blob == encode(update)
        self.version = update.version
        return self.url


PROMPTS = [[i] for i in range(40)]
SEEDS = list(range(100, 140))
EXPECTED = [[([i, 100 + i], [0.0], True, 1)] for i in range(40)]


def pool(*stands: Stand) -> Pool:
    found = Pool(stands, at_once=3)
    found.version = 1
    return found


@pytest.mark.parametrize("lasts", [[10**6], [10**6, 10**6], [5, 10**6], [0, 7, 10**6]])
def test_every_prompt_is_answered_once_in_its_place(lasts: list[int]) -> None:
    stands = [Stand(f"s{i}", count) for i, count in enumerate(lasts)]
    assert pool(*stands).generate(PROMPTS, SEEDS, max_tokens=1) == EXPECTED
    assert sorted(p for stand in stands for p in stand.served) == PROMPTS


def test_nobody_left() -> None:
    with pytest.raises(Unreachable, match="is gone"):
        pool(Stand("a", 5), Stand("b", 7)).generate(PROMPTS, SEEDS, max_tokens=1)
    with pytest.raises(UserError, match="at least one"):
        Pool([])


def test_refusals_end_it() -> None:
    with pytest.raises(UserError, match="too long"):
        pool(Stand("a", 5), Stand("b", error=UserError("too long"))).generate(PROMPTS, SEEDS, max_tokens=1)


def test_answers_of_other_weights_are_not_taken() -> None:
    with pytest.raises(UserError, match=r"a: answers with weights of version \{0\}, not 1"):
        pool(Stand("a", version=0)).generate(PROMPTS[:1], SEEDS, max_tokens=1)


def test_all_are_synced_also_where_one_fails() -> None:
    update = Update(1, 2, 7, 0, factors={"a": np.ones((1, 2), np.float32)})
    stands = [Stand("a", error=UserError("half-way")), Stand("b"), Stand("c")]
    several = pool(*stands)
    with pytest.raises(UserError, match="half-way"):
        several.sync(update)
    assert [s.version for s in stands] == [1, 2, 2]
    assert several.version == 1
    stands[0].error = None
    assert several.sync(update) == ["a", "b", "c"]
    assert several.version == 2


def test_no_prompts() -> None:
    assert pool(Stand("a")).generate([], [], max_tokens=1) == []
