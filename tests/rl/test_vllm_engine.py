"""Servers as a rollout engine, with stand-ins for them: rows in the trainer's order, and what is sent when."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from stands import END, NEW, PAD, VOCAB, WIDTH, Stand, advance, make_engine
from tiny import TINY

from logra_jax.errors import UserError
from logra_jax.rl.engine import Engine
from logra_jax.rl.vllm_engine import answer_seed
from logra_jax.sync.client import Completion, Unreachable
from logra_jax.sync.needs import Needs


@pytest.fixture
def make(tmp_path):
    return partial(make_engine, tmp_path / "sync")


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
    assert not list((tmp_path / "sync").iterdir())
    engine = make(start=start(["a", "broken"]))
    with pytest.raises(UserError, match="no such model"):
        engine.sync("p", 0)
    assert ("stop", "a") in events[2:]


def test_a_folder_may_hold_other_things_and_the_weights_of_other_runs(make, tmp_path):
    own = tmp_path / "sync/weights/own"
    own.mkdir(parents=True)
    stands = Stand(), Stand()
    engines = [make(stand) for stand in stands]
    for engine, params in zip(engines, ("p", "q"), strict=True):
        engine.sync(params, 0)
    assert [[path.name for path in stand.folder.iterdir()] for stand in stands] == [["p"], ["q"]]
    engines[0].close()
    assert [stand.folder.exists() for stand in stands] == [False, True]
    engines[1].close()
    assert [*(tmp_path / "sync").rglob("*")] == [own.parent, own]


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
