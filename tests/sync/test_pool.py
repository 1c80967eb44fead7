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
    """Answers with its prompt and seed; falls silent after `lasts` answers, and is `gone` once that was noticed."""

    url: str
    lasts: int = 10**6
    version: int = 1
    error: Exception | None = None
    served: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: threading.Event = field(default_factory=threading.Event)

    def generate(self, prompt, *, seed, max_tokens):
        with self.lock:
            if len(self.served) >= self.lasts:
                self.gone.set()
                raise Unreachable(f"{self.url} is gone")
            self.served.append(prompt)
        if self.error:
            raise self.error
        return [Completion([*prompt, seed], [0.0], True, self.version)]

    def healthy(self, timeout):
        return len(self.served) < self.lasts

    def reload(self, folder, shapes, version):
        self.version = version

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


def test_a_server_that_failed_once_and_is_well_stays() -> None:
    other = Stand("b", 5)

    class Late(Stand):
        late = 1

        def generate(self, prompt, **settings):
            if self.late:
                self.late = 0
                raise Unreachable("too late")
            assert other.gone.wait(60)  # else this one may have all prompts before the other is asked often enough
            return super().generate(prompt, **settings)

    several = pool(Late("a"), other)
    assert several.generate(PROMPTS, SEEDS, max_tokens=1) == EXPECTED
    assert set(several.lost) == {1}
    several.clients[1].lasts = 10**6
    several.generate(PROMPTS, SEEDS, max_tokens=1)
    assert len(several.clients[1].served) == 5  # it was asked for nothing


def test_answers_that_are_there_are_not_asked_for_again() -> None:
    several, found = pool(Stand("a", 15)), {}
    with pytest.raises(Unreachable):
        several.generate(PROMPTS, SEEDS, found, max_tokens=1)
    assert len(found) == 15
    several.clients[0].lasts = 10**6
    several.restore(lambda number: None, 1, [0])
    assert several.generate(PROMPTS, SEEDS, found, max_tokens=1) == EXPECTED
    assert sorted(several.clients[0].served) == PROMPTS


def test_answers_of_other_weights_are_not_taken() -> None:
    with pytest.raises(UserError, match=r"a: answers with weights of version \{0\}, not 1"):
        pool(Stand("a", version=0)).generate(PROMPTS[:1], SEEDS, max_tokens=1)
    several = pool(Stand("a", version=0), Stand("b"))
    assert several.generate(PROMPTS, SEEDS, max_tokens=1) == EXPECTED
    assert set(several.lost) <= {0}


def test_who_fails_in_a_sync_is_left_out_until_it_has_all_weights() -> None:
    update = Update(1, 2, 7, 0, factors={"a": np.ones((1, 2), np.float32)})
    stands = [Stand("a", error=UserError("half-way")), Stand("b"), Stand("c")]
    several = pool(*stands)
    assert several.sync(update) == ["b", "c"]
    assert [s.version for s in stands] == [1, 2, 2]
    assert str(several.lost[0]) == "half-way"
    assert several.version == 2
    stands[0].error = None
    several.generate(PROMPTS, SEEDS, max_tokens=1)
    assert not stands[0].served
    several.restore(lambda number: stands[number].reload("folder", {}, 2), 2, [0])
    assert not several.lost
    for stand in stands:
        stand.error = UserError("nobody")
    with pytest.raises(UserError, match="nobody"):
        several.sync(Update(2, 3, 7, 0))
    assert (len(several.lost), several.version) == (3, 2)


def test_no_prompts() -> None:
    assert pool(Stand("a")).generate([], [], max_tokens=1) == []


def test_a_generation_that_is_cancelled_ends_and_none_follows() -> None:
    begun, aborted = threading.Event(), threading.Event()

    class Slow(Stand):
        def generate(self, *_, **__) -> list[Completion]:
            begun.set()
            assert aborted.wait(20)
            raise Unreachable("an answer ended with 'abort'")

        def abort(self) -> None:
            aborted.set()

    servers, ends = pool(Slow("a")), []

    def draw() -> None:
        with pytest.raises(UserError, match="no more answers") as error:
            servers.generate([[1], [2], [3]], [0, 1, 2])
        ends.append(error.value)

    thread = threading.Thread(target=draw)
    thread.start()
    assert begun.wait(20)
    servers.cancel()
    thread.join(20)
    assert not isinstance(ends[0], Unreachable)  # which would be tried again
    with pytest.raises(UserError, match="no more answers"):
        servers.generate([[1]], [0])


def test_all_servers_score() -> None:
    one, other = Stand("a"), Stand("b")
    one.score, other.score = lambda prompt: [-float(prompt[0])], lambda prompt: [0.5]
    assert pool(one, other).score([[1], [2]]) == [[[-1.0], [-2.0]], [[0.5], [0.5]]]
