"""Servers as a rollout engine, with stand-ins for them: rows in the trainer's order, and what is sent when."""

import threading
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tiny import TINY

from logra_jax.errors import UserError
from logra_jax.models import CausalLM
from logra_jax.models.names import name_table
from logra_jax.rl.engine import Engine
from logra_jax.rl.rollout import Sampler
from logra_jax.rl.vllm_engine import VllmEngine, answer_seed
from logra_jax.sync.client import Client, Completion, Synced, Unreachable
from logra_jax.sync.needs import Needs

END, PAD, VOCAB, WIDTH, NEW = 3, 0, 30, 4, 6
KERNEL = "layers/mlp/up_proj/kernel"
SHAPES = {KERNEL: (3, 16, 24), "norm/scale": (16,)}


class Stand(Client):
    """Notes what it is asked; answers with its prompt's first token as often as the answer's seed says, and an end.

    dies: answers after which it is gone. piece: tokens at a time. served: of its config.json, other than the trainer's.
    """

    def __init__(
        self, longest: int = WIDTH + NEW, dies: int = 10**6, name: str = "stand", piece: int = 0, **served
    ) -> None:
        super().__init__(f"http://{name}")
        self.dies, self.piece, self.served = dies, piece, served
        self.calls: list = []
        self.asked: dict = {}
        self.at, self.most, self.error = -1, longest, None
        self.lock = threading.Lock()

    def longest(self):
        return self.most

    def describe(self):
        config = TINY.to_hf("float32") | self.served
        return {"vllm": "0.32.0", "max_num_seqs": 8, "piece": self.piece, "cpu": True, "model": config}

    def healthy(self, timeout):
        return self.dies > 0

    def plan(self, shapes, version):
        self.calls.append(("plan", version))
        self.shapes, self.at = shapes, version

    def reload(self, folder, shapes, version):
        assert folder.name == "weights"
        self.calls.append(("reload", version))
        self.shapes, self.at = shapes, version

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
        with self.lock:
            if not self.dies:
                raise Unreachable(f"{self.url} is gone")
            self.dies -= 1
            self.asked[tuple(prompt)] = (seed, n, settings)
        return [self.answer(prompt, seed + j) for j in range(n)]


@pytest.fixture
def make(tmp_path):
    def make_(*stands, **options):
        sampler = Sampler(
            CausalLM(TINY), max_new_tokens=NEW, end_ids=(END,), vocab_size=VOCAB, pad_id=PAD, temperature=0.7
        )
        given = {
            "prompt_width": WIDTH, "write": lambda params, folder: (folder / params).mkdir(parents=True, exist_ok=True),
            "place": jnp.asarray, "folder": tmp_path / "sync", "table": name_table(TINY), "shapes": SHAPES,
            "clients": stands,
        }  # fmt: skip
        return VllmEngine(sampler, **given | options)

    return make_


def advance(engine, version):
    factors = {KERNEL: np.full((3, 2, 24), version, ml_dtypes.bfloat16)}
    dense = {"norm/scale": np.full(16, version, np.float32)}
    return engine.advance(version, factors, dense, seed=5, drawn=version - 1, decay=0.5)


def test_answers_are_rows_in_the_order_of_prompts_and_samples(make):
    stands = Stand(), Stand()
    engine = make(*stands)
    assert isinstance(engine, Engine)
    engine.sync("p", 0)
    tokens, lengths = np.array([[0, 0, 0, 7], [9, 5, 4, 6], [0, 8, 8, 8], [0, 0, 0, 7]]), np.array([1, 4, 3, 1])
    ids = np.array([12, 0, 40, 12])
    found = engine.generate(tokens.astype(np.int32), lengths, ids, n=3, seed=7, update=0)
    # A prompt that is there twice goes on counting its samples.
    seeds = [answer_seed(7, 0, int(ids[i]), (3 if i == 3 else 0) + j) for i in range(4) for j in range(3)]
    assert len(set(seeds)) == 12
    for row, seed in enumerate(seeds):
        prompt, count = row // 3, seed % 5
        np.testing.assert_array_equal(found.tokens[row, :WIDTH], tokens[prompt])
        first = tokens[prompt, WIDTH - lengths[prompt]]
        assert found.tokens[row, WIDTH:].tolist() == [first] * count + [END] + [PAD] * (NEW - count - 1)
        assert found.lengths[row] == count + 1
        expected = np.where(np.arange(NEW) <= count, -(seed % 7 + 1), 0)
        np.testing.assert_array_equal(found.logprobs[row], expected)
        assert found.prompt_lengths[row] == lengths[prompt]
    assert found.stopped.all()
    asked = stands[0].asked | stands[1].asked
    assert set(asked) == {(7,), (9, 5, 4, 6), (8, 8, 8)}
    _, n, settings = asked[8, 8, 8]
    assert n == 3
    assert settings == {
        "max_tokens": NEW, "temperature": 0.7, "end_ids": (END,), "banned_ids": range(VOCAB, TINY.vocab_size),
    }  # fmt: skip


def test_answers_that_are_being_drawn_keep_their_weights_and_end_with_the_engine(make):
    begun, aborted, ends = threading.Event(), threading.Event(), []

    class Slow(Stand):
        def generate(self, *args, **settings):
            begun.set()
            assert aborted.wait(20)
            raise Unreachable("an answer ended with 'abort'")

        def abort(self):
            aborted.set()

    engine = make(Slow())
    engine.sync("p", 0)
    engine.let_go()

    def draw():
        with pytest.raises(UserError, match="no more answers") as error:
            engine.generate(np.full((1, WIDTH), 9, np.int32), np.array([WIDTH]), np.array([2]), n=1, seed=0, update=1)
        ends.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    assert begun.wait(20)
    for change in (lambda: advance(engine, 1), lambda: engine.sync("q", 1), lambda: engine.reload("q", 1)):
        with pytest.raises(ValueError, match="being drawn"):
            change()
    engine.close()
    thread.join(20)
    assert ends


def test_rows_are_cut_at_their_limits(make):
    engine = make(Stand())
    engine.sync("p", 0)
    prompts = np.full((1, WIDTH), 9, np.int32), np.array([WIDTH]), np.array([2])
    whole = engine.generate(*prompts, n=4, seed=1, update=0)
    cut = engine.generate(*prompts, n=4, seed=1, update=0, limits=np.array([1, 2, 3, 99]))
    assert max(whole.lengths) > 3
    for row, limit in enumerate((1, 2, 3, NEW)):
        length = min(int(whole.lengths[row]), limit)
        assert cut.lengths[row] == length
        assert cut.stopped[row] == (whole.lengths[row] <= limit)
        kept = np.arange(NEW) < length
        np.testing.assert_array_equal(cut.tokens[row, WIDTH:], np.where(kept, whole.tokens[row, WIDTH:], PAD))
        np.testing.assert_array_equal(cut.logprobs[row], np.where(kept, whole.logprobs[row], 0))


def test_seeds_follow_the_documented_formula():
    # printf '\7\0\0\0\0\0\0\0\3\0\0\0\0\0\0\0\14\0\0\0\0\0\0\0' | sha256sum
    assert answer_seed(7, 3, 12, 0) == 0xDEE2ED1352802BC1 >> 2
    assert answer_seed(7, 3, 12, 5) == (0xDEE2ED1352802BC1 >> 2) + 5


def test_hybrid_models_are_refused_on_a_cpu():
    needs = Needs(WIDTH, NEW, 1, {"linear_num_key_heads": 2})
    with pytest.raises(UserError, match="hybrid model: serve it on GPUs"):
        needs.check(Stand())


def test_updates_travel_as_factors_and_all_weights_where_they_must(make, capsys):
    stand, other = Stand(), Stand()
    engine = make(stand, other, full_every=5)
    with pytest.raises(ValueError, match="no weights"):
        engine.generate(np.ones((1, WIDTH), np.int32), np.array([1]), np.array([0]), n=1, seed=0, update=0)
    engine.sync("p0", 0)
    assert set(stand.shapes) == {*(f"model.layers.{i}.mlp.up_proj.weight" for i in range(3)), "model.norm.weight"}
    assert stand.shapes["model.layers.0.mlp.up_proj.weight"] == (24, 16)
    metrics = advance(engine, 1)
    assert metrics["sync/version"] == engine.version == 1
    assert metrics["sync/bytes"] > 2 * 2 * (3 * 2 * 24)  # both servers, two bytes each
    assert (stand.update.seed, stand.update.drawn, stand.update.decay) == (5, 0, 0.5)
    np.testing.assert_array_equal(stand.update.dense["model.norm.weight"], np.ones(16))
    engine.sync("not written", 1)
    # No server takes it: nothing is sent until all weights have been.
    stand.error = other.error = UserError("out of step")
    assert advance(engine, 2)["sync/version"] == 1
    assert "out of step" in capsys.readouterr().err
    stand.error = other.error = None
    assert advance(engine, 3)["sync/bytes"] == 0
    engine.sync("p3", 3)
    advance(engine, 4)
    assert advance(engine, 5)["sync/bytes"] == 0
    engine.sync("p5", 5)
    assert stand.calls == [("reload", 0), ("sync", 0, 1), ("reload", 3), ("sync", 3, 4), ("reload", 5)]
    assert other.calls == stand.calls


def test_servers_are_started_with_the_first_weights_and_stopped(make, tmp_path):
    events = []

    class Served(SimpleNamespace):
        def __enter__(self):
            events.append(("start", self.name))
            if self.name == "broken":
                raise UserError("no such model")

        def stop(self):
            events.append(("stop", self.name))

        def check(self):
            events.append(("check", self.name))

    def start(names):
        def start_(folder):
            assert (folder / "p").is_dir()
            return [Served(name=name, client=Stand(), log=f"{name}.log") for name in names]

        return start_

    engine = make(start=start(["a"]))
    engine.sync("p", 4)
    (server,) = engine._servers
    assert server.client.calls == [("plan", 4)]
    engine.close()
    engine.close()
    assert events == [("start", "a"), ("stop", "a")]
    assert not (tmp_path / "sync/weights").exists()
    engine = make(start=start(["a", "broken"]))
    with pytest.raises(UserError, match="no such model"):
        engine.sync("p", 0)
    assert ("stop", "a") in events[2:]


def test_servers_that_do_not_fit_are_refused(make):
    for stand, options, message in (
        (Stand(9), {}, r"http://stand takes 9 tokens .* 4 \+ 6: start it with 10"),
        (Stand(piece=8 * WIDTH - 1), {}, "on a CPU .* in pieces.*--no-enable-chunked-prefill"),
        (Stand(), {"answers": 9}, r"answers 8 times at once .*--max-num-seqs.*start it with 9, or lower"),
        (Stand(vocab_size=40), {}, f"serves another model, of vocab_size 40, not {TINY.vocab_size}: start it"),
        (Stand(rope_parameters={"rope_theta": 7.0}), {}, "another model, of rope_theta 7.0, not"),
    ):
        with pytest.raises(UserError, match=message):
            make(Stand(), stand, **options).sync("p", 0)
    make(Stand(), Stand(head_dim=None, piece=8 * WIDTH)).sync("p", 0)  # of which it says nothing
    stand = Stand()
    engine = make(stand)
    engine.sync("p", 0)
    prompts = np.full((1, WIDTH), 9, np.int32), np.array([WIDTH]), np.array([2])
    for answer, message in (
        (Completion([31, END], [0.0, 0.0], True, 0), "tokens that the model does not have"),
        (Completion([5, 6], [0.0, 0.0], True, 0), r"ended answers at token 6, the trainer's model at \(3,\)"),
    ):
        stand.answer = lambda *_, answer=answer: answer
        with pytest.raises(UserError, match=message):
            engine.generate(*prompts, n=1, seed=0, update=0)


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
