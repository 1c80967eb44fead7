"""Servers that fail, as stand-ins: they are brought back, and no answer and no update is lost or there twice."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from stands import WIDTH, Stand, advance, make_engine

from logra_jax.errors import UserError


@pytest.fixture
def make(tmp_path):
    return partial(make_engine, tmp_path / "sync")


class Served:
    """A server that was started here, with a stand-in; started again, it dies after the next of `lives` answers."""

    def __init__(self, name: str, *lives: int) -> None:
        self.lives, self.log = list(lives), f"{name}.log"
        self.client = Stand(dies=self.lives.pop(0), name=name)
        self.starts = 0

    def __enter__(self):
        self.starts += 1

    def restart(self):
        if self.client.dies:
            raise AssertionError("it was well")
        self.client.at, self.client.dies = -1, self.lives.pop(0)
        self.client.calls.append("restart")
        self.starts += 1

    def check(self):
        if not self.client.dies:
            raise UserError(f"ended with code -9; see {self.log}: last words")

    def stop(self):
        pass


LONG, ROWS = 10**6, 12
BATCH = np.full((ROWS, WIDTH), 9, np.int32), np.full(ROWS, WIDTH), np.arange(ROWS)


def let_fail(engine, first, second):
    """The second one answers once the first one has failed, and meanwhile has not taken all prompts."""
    second.after, engine._pool.at_once = first, 4


def same(found, expected):
    for one, other in zip(found[:-1], expected[:-1], strict=True):  # all but whose weights they are of
        np.testing.assert_array_equal(one, other)


@pytest.fixture
def expected(make):
    engine = make(Stand())
    engine.sync("p", 3)
    return engine.generate(*BATCH, n=2, seed=1, update=3)


def test_servers_that_die_while_they_generate_are_started_again(make, expected, capsys):
    servers = [Served("a", 4, 3, LONG), Served("b", 2, 1, LONG), Served("c", 1, 0, 1, LONG)]
    engine = make(start=lambda folder: servers)
    engine.sync("p", 3)
    same(engine.generate(*BATCH, n=2, seed=1, update=3), expected)
    assert "http://a is started again: ended with code -9; see a.log: last words" in capsys.readouterr().err
    engine.sync("p", 3)  # those that are still gone come back
    assert all(server.client.dies for server in servers)
    assert {server.client.at for server in servers} == {3}
    assert advance(engine, 4)["sync/version"] == 4
    assert {server.client.at for server in servers} == {4}
    engine.close()


def test_others_answer_for_one_that_died_and_it_catches_up_at_the_next_sync(make, expected, capsys):
    servers = [Served("a", 2, LONG), Served("b", LONG)]
    engine = make(start=lambda folder: servers)
    engine.sync("p", 3)
    let_fail(engine, *(server.client for server in servers))
    same(engine.generate(*BATCH, n=2, seed=1, update=3), expected)
    assert "a.log: last words\nwarning: it is left out" in capsys.readouterr().err
    assert servers[0].starts == 1
    assert advance(engine, 4)["sync/version"] == 4
    engine.sync("p4", 4)
    assert servers[0].client.calls == [("plan", 3), "restart", ("plan", 4)]
    assert servers[1].client.calls == [("plan", 3), ("sync", 3, 4)]
    advance(engine, 5)
    assert [s.client.calls[-1] for s in servers] == [("sync", 4, 5)] * 2
    assert capsys.readouterr().err.count("warning") == 1


def test_one_that_dies_during_a_sync_misses_no_update_and_gets_none_twice(make):
    servers = [Served("a", LONG, LONG), Served("b", LONG)]
    engine = make(start=lambda folder: servers)
    engine.sync("p", 3)
    servers[0].client.dies = 0
    metrics = advance(engine, 4)
    assert metrics["sync/version"] == 4
    assert metrics["sync/bytes"] > 0
    engine.sync("p4", 4)
    assert servers[0].client.calls == [("plan", 3), "restart", ("plan", 4)]
    assert servers[1].client.calls == [("plan", 3), ("sync", 3, 4)]


def test_a_server_that_dies_again_and_again_ends_the_run_with_its_last_words(make):
    server = Served("a", 2, 1, 1, 1)
    engine = make(start=lambda folder: [server])
    engine.sync("p", 3)
    with pytest.raises(UserError, match=r"failed 3 times in one batch of answers: ended .* a.log: last words"):
        engine.generate(*BATCH, n=2, seed=1, update=3)
    assert server.starts == 3
    # One death for each batch is none too many.
    server = Served("a", *[ROWS + 1] * 9)
    engine = make(start=lambda folder: [server])
    engine.sync("p", 3)
    for _ in range(6):
        engine.generate(*BATCH, n=2, seed=1, update=3)
    assert server.starts > 3


def test_weights_that_are_gone_cannot_be_given(make):
    engine = make(start=lambda folder: [Served("a", 2, LONG)], write=lambda params, folder: None)
    params = jnp.ones(3)
    engine.sync(params, 3)
    params.delete()
    with pytest.raises(UserError, match="the weights of version 3 are no longer there"):
        engine.generate(*BATCH, n=2, seed=1, update=3)


def test_servers_started_elsewhere_come_back_at_a_sync(make, expected, capsys):
    stands = Stand(name="a"), Stand(name="b")
    engine = make(*stands)
    engine.sync("p", 3)
    let_fail(engine, *stands)
    stands[0].dies = 2
    same(engine.generate(*BATCH, n=2, seed=1, update=3), expected)
    for version in (4, 5, 6):  # as long as it takes
        assert advance(engine, version)["sync/version"] == version
        engine.sync(f"p{version}", version)
    assert capsys.readouterr().err.count("http://a") == 1
    stands[0].dies = LONG
    advance(engine, 7)
    engine.sync("p7", 7)
    assert stands[0].calls == [("reload", 3), ("reload", 7)]
    assert stands[1].calls == [("reload", 3), *((("sync", v, v + 1)) for v in range(3, 7))]
    advance(engine, 8)
    assert stands[0].at == stands[1].at == 8
    # It may also be back, with other weights, before anybody has noticed.
    engine.sync("p8", 8)
    stands[0].at = stands[1].at = -1
    found = engine.generate(*BATCH, n=2, seed=1, update=3)
    same(found, expected)
    assert stands[0].calls[-1] == stands[1].calls[-1] == ("reload", 8)
    stands[0].dies = stands[1].dies = 0
    with pytest.raises(UserError, match=r"http://[ab]: no answer; start it again"):
        engine.generate(*BATCH, n=2, seed=1, update=3)
