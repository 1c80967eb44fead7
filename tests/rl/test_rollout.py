"""Sampling against reference tokens, the full forward pass, the written key rule, known distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax.errors import UserError
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models import CausalLM, load_hf
from logra_jax.rl import rollout as module
from logra_jax.rl.loss import token_logprobs
from logra_jax.rl.rollout import (
    Sampler,
    attention_mask,
    completion_lengths,
    completion_mask,
    kept_tokens,
)

TABLE, VOCAB, PAD, END = 24, 20, 0, 19
FIELDS = ("tokens", "lengths", "logprobs", "stopped")


def make_model(table=TABLE):
    config = TINY.replace(
        vocab_size=table,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
    )
    return CausalLM(config)


@pytest.fixture(scope="module")
def policy():
    model = make_model()
    return model, model.init_params(jax.random.key(3))


def fixed_policy(logits):
    """A model whose logits are the given ones everywhere: only the final norm and the head are left."""
    model = make_model(len(logits))
    params = model.init_params(jax.random.key(0))
    layers = params["layers"]
    layers["self_attn"]["o_proj"]["kernel"] *= 0.0
    layers["mlp"]["down_proj"]["kernel"] *= 0.0
    params["embed_tokens"]["embedding"] = jnp.ones_like(params["embed_tokens"]["embedding"])
    params["norm"]["scale"] = jnp.zeros_like(params["norm"]["scale"]).at[0].set(1.0)
    params["lm_head"]["kernel"] = params["lm_head"]["kernel"].at[0].set(jnp.asarray(logits, jnp.float32))
    return model, params


def make_prompts(lengths=(5, 3, 1, 4), width=5, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int32)
    tokens = rng.integers(1, VOCAB, size=(len(lengths), width)).astype(np.int32)
    tokens[np.arange(width)[None] < width - lengths[:, None]] = PAD
    return tokens, lengths, np.arange(10, 10 + len(lengths), dtype=np.int32)


def make_sampler(model, **changes):
    options = {"max_new_tokens": 6, "end_ids": (END,), "vocab_size": VOCAB, "pad_id": PAD, "temperature": 1.0}
    return Sampler(model, **(options | changes))


def one_prompt(sampler, params, n, seed=0, update=0):
    tokens, lengths, ids = make_prompts(lengths=(2,), width=2)
    return sampler.generate(params, tokens % sampler.vocab_size, lengths, ids, n, seed, update)


def log_softmax(z):
    z = np.asarray(z, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class TestMasks:
    @pytest.mark.parametrize(
        ("ids", "end_ids", "mask", "stopped"),
        [
            ([11, 12, 151643, 151643, 151643, 151643], (151643,), [1, 1, 1, 0, 0, 0], True),  # pad = end
            ([5, 6, 151643, 9, 9], (151645, 151643), [1, 1, 1, 0, 0], True),  # the second of two end ids
            ([5, 6, 7, 8, 151645], (151645, 151643), [1, 1, 1, 1, 1], True),  # end token exactly at the cap
            ([5, 6, 7, 8, 9], (151645, 151643), [1, 1, 1, 1, 1], False),
            ([151645, 0, 0], (151645,), [1, 0, 0], True),  # empty answer; the pad id is an ordinary token
            ([0, 0, 7], (7,), [1, 1, 1], True),
            ([7, 7], (), [1, 1], False),
        ],
    )
    def test_completion(self, ids, end_ids, mask, stopped):
        lengths, ended = completion_lengths(jnp.asarray([ids], jnp.int32), end_ids)
        assert np.asarray(completion_mask(lengths, len(ids)))[0].tolist() == [bool(x) for x in mask]
        assert bool(ended[0]) is stopped

    def test_attention(self):
        got = attention_mask(jnp.asarray([1, 3]), jnp.asarray([2, 0]), 3, 2)
        assert np.asarray(got).astype(int).tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]


class TestKeptTokens:
    PROBS = (0.3, 0.1, 0.1, 0.5)

    @pytest.mark.parametrize(
        ("top_k", "top_p", "kept"),
        [
            (0, 0.8, [0, 3]),
            (0, 1.0, [0, 1, 2, 3]),
            (0, 0.0001, [3]),
            (0, 1e-9, [3]),
            (0, 0.81, [0, 1, 3]),
            (0, 0.5, [3]),
            (0, 0.51, [0, 3]),
            (1, 1.0, [3]),
            (3, 1.0, [0, 1, 3]),
            (9, 1.0, [0, 1, 2, 3]),
            (2, 0.62, [3]),  # of the two likeliest, the first has 0.5 / 0.8 = 0.625 of the mass
            (2, 0.63, [0, 3]),
            (None, None, [0, 1, 2, 3]),
            (0, 0.0, [0, 1, 2, 3]),
        ],
    )
    def test_cases(self, top_k, top_p, kept):
        logits = jnp.log(jnp.asarray([self.PROBS, self.PROBS[::-1]], jnp.float32)) + 7.0
        got = np.asarray(kept_tokens(logits, top_k, top_p))
        assert np.flatnonzero(got[0]).tolist() == kept
        assert got[1].sum() == len(kept)

    def test_equal_logits(self):
        assert np.asarray(kept_tokens(jnp.zeros(5), 2, 1.0)).tolist() == [True, True, False, False, False]
        assert np.asarray(kept_tokens(jnp.zeros(5), 0, 0.4)).tolist() == [True, True, False, False, False]

    def test_sum_that_hits_top_p_within_rounding(self):
        for size in (10, 12, 25):
            for count in range(1, size):
                got = kept_tokens(jnp.full(size, 0.3), 0, count / size)
                assert int(jnp.sum(got)) == count

    def test_sampling_stays_inside(self):
        # The three likeliest are 0.5, 0.3, 0.1: after the second one 0.89 of their mass is collected.
        logits = np.log(np.array(self.PROBS))
        model, params = fixed_policy(logits)
        sampler = make_sampler(model, vocab_size=4, end_ids=(), top_k=3, top_p=0.85)
        got = one_prompt(sampler, params, 32)
        new = np.asarray(got.tokens)[:, 2:]
        assert set(new.ravel().tolist()) == {0, 3}
        # What is recorded is the log-probability in the full distribution.
        np.testing.assert_allclose(got.logprobs, log_softmax(logits)[new], atol=1e-5)

    @pytest.mark.parametrize("off", [{"top_k": None, "top_p": None}, {"top_p": 0.0}])
    def test_off_is_off(self, policy, off):
        assert make_sampler(policy[0], **off) == make_sampler(policy[0])


class TestDistribution:
    def test_frequencies_and_logprobs(self):
        logits = np.array([2.0, 1.0, 0.0])
        # The two last ids are padding of the table: never sampled, and no part of the distribution.
        model, params = fixed_policy([*logits, 9.0, 9.0])
        sampler = make_sampler(model, vocab_size=3, end_ids=(), temperature=0.6, max_new_tokens=16)
        got = one_prompt(sampler, params, 256)
        new = np.asarray(got.tokens)[:, 2:]
        assert new.max() < 3
        want = log_softmax(logits / 0.6)
        np.testing.assert_allclose(got.logprobs, want[new], atol=1e-5)
        np.testing.assert_allclose(np.asarray(got.logprobs)[new == 0], -0.20257309980325733, atol=1e-5)
        share, prob = np.bincount(new.ravel(), minlength=3) / new.size, np.exp(want)
        assert (np.abs(share - prob) < 4.5 * np.sqrt(prob * (1 - prob) / new.size)).all()

    def test_temperature_zero_is_greedy(self):
        model, params = fixed_policy((1.0, 3.0, 2.0))
        sampler = make_sampler(model, vocab_size=3, end_ids=(), temperature=0.0)
        got = one_prompt(sampler, params, 2)
        assert (np.asarray(got.tokens)[:, 2:] == 1).all()
        np.testing.assert_allclose(got.logprobs, log_softmax([1.0, 3.0, 2.0])[1], atol=1e-5)
        assert sampler == make_sampler(model, vocab_size=3, end_ids=(), greedy=True)


class TestAgainstTheModel:
    @pytest.mark.parametrize("name", ["tiny-qwen2-tied", "tiny-qwen3"])
    def test_greedy_equals_the_reference(self, fixtures, name):
        model, params = load_hf(fixtures / name)
        reference = np.load(fixtures / name / "reference.npz")
        want, prompts = reference["greedy_tokens"], reference["left_input_ids"]
        lengths = reference["left_attention_mask"].sum(1).astype(np.int32)
        sampler = make_sampler(model, max_new_tokens=want.shape[1], end_ids=(), vocab_size=320, temperature=0.0)
        got = sampler.generate(params, prompts, lengths, np.arange(3, dtype=np.int32), 1, 0, 0)
        np.testing.assert_array_equal(got.tokens[:, prompts.shape[1] :], want)
        picked = np.take_along_axis(log_softmax(reference["greedy_step_logits"]), want[..., None], -1)[..., 0]
        np.testing.assert_allclose(got.logprobs, picked, atol=2e-4)

    def test_logprobs_equal_the_full_forward_pass(self, policy):
        model, params = policy
        tokens, lengths, ids = make_prompts()
        sampler = make_sampler(model, temperature=0.7, end_ids=(3, 8, END))
        got = sampler.generate(params, tokens, lengths, ids, 8, 1, 0)
        width = tokens.shape[1]
        mask = attention_mask(got.prompt_lengths, got.lengths, width, 6)
        hidden = model.hidden(params, got.tokens[:, :-1], mask[:, :-1])[:, width - 1 :]
        head = model.head(params)[:, :VOCAB]
        again, _ = token_logprobs(hidden, head, got.tokens[:, width:], 0.7)
        counted = np.asarray(completion_mask(got.lengths, 6))
        np.testing.assert_allclose(got.logprobs, np.where(counted, again, 0.0), atol=1e-5)
        ratio = np.exp(np.asarray(again) - np.asarray(got.logprobs))
        np.testing.assert_allclose(ratio[counted], 1.0, atol=2e-5)
        assert 0 < np.asarray(got.stopped).sum() < 32  # both kinds of rows were there

    def test_tokens_follow_the_written_key_rule(self, policy):
        """token = argmax(z / T + Gumbel), keyed by seed, update, prompt id, sample, position in the text."""
        model, params = policy
        tokens, lengths, ids = make_prompts(lengths=(4,), width=4)
        sampler = make_sampler(model, temperature=0.8, end_ids=())
        got = np.asarray(sampler.generate(params, tokens, lengths, ids, 3, 7, 11).tokens)
        logits = np.asarray(model.logits(params, jnp.asarray(got)))[:, :, :VOCAB] / np.float32(0.8)
        for sample in range(3):
            for position in range(4, 10):
                key = jax.random.key(7)
                for number in (11, int(ids[0]), sample, position):
                    key = jax.random.fold_in(key, number)
                noise = np.asarray(jax.random.gumbel(key, (VOCAB,), jnp.float32))
                assert got[sample, position] == np.argmax(logits[sample, position - 1] + noise)


@pytest.fixture(scope="module")
def batch(policy):
    """(sampler, params, arrays of 4 prompts, rollout of 4 samples each)."""
    model, params = policy
    sampler, arrays = make_sampler(model), make_prompts()
    return sampler, params, arrays, sampler.generate(params, *arrays, 4, 5, 2)


class TestIndependence:
    def check(self, got, n, whole, prompts=range(4)):
        """The first 4 of the n samples of each prompt are those of the whole batch."""
        for k in FIELDS:
            have = np.asarray(getattr(got, k)).reshape(len(prompts), n, -1)[:, :4, -6:]
            want = np.asarray(getattr(whole, k)).reshape(4, 4, -1)[list(prompts), :, -6:]
            np.testing.assert_allclose(have, want, atol=1e-5, err_msg=k)

    def test_order(self, batch):
        sampler, params, arrays, whole = batch
        order = np.array([2, 0, 3, 1])
        self.check(sampler.generate(params, *(x[order] for x in arrays), 4, 5, 2), 4, whole, order)

    def test_fewer_prompts_more_samples_more_padding(self, batch):
        sampler, params, (tokens, lengths, ids), whole = batch
        wide = np.pad(tokens[1:3], ((0, 0), (3, 0)), constant_values=9)
        self.check(sampler.generate(params, wide, lengths[1:3], ids[1:3], 7, 5, 2), 7, whole, (1, 2))

    def test_devices(self, batch):
        sampler, params, arrays, whole = batch
        # Prompts and weights both split over the devices.
        mesh = make_mesh(4, 2)
        arrays = jax.device_put(arrays, batch_sharding(mesh))
        params = jax.device_put(params, shardings(mesh, sampler.model.logical_axes()))
        got = sampler.generate(params, *arrays, 4, 5, 2)
        assert {s.data.shape[0] for s in got.tokens.addressable_shards} == {4}
        self.check(got, 4, whole)

    def test_compiles_once_per_shape(self, batch):
        sampler, params, (tokens, lengths, ids), _ = batch
        size = module._generate._cache_size()
        for update in range(3):
            params = jax.tree.map(lambda x: x * 1.01, params)
            equal = make_sampler(sampler.model)
            equal.generate(params, tokens, lengths, ids + update, 4, 2**32 - 1, update)
        assert module._generate._cache_size() == size

    def test_everything_in_the_key_counts(self, policy):
        model, params = policy
        sampler = make_sampler(model, end_ids=(), max_new_tokens=8)
        tokens, lengths, _ = make_prompts(lengths=(2, 2), width=2)
        tokens[1] = tokens[0]

        def draw(ids=(0, 1), seed=0, update=0):
            got = sampler.generate(params, tokens, lengths, np.array(ids, np.int32), 4, seed, update)
            return [tuple(row) for row in np.asarray(got.tokens)[:, 2:].tolist()]

        base = draw()
        assert len(set(base)) == 8  # equal prompts under different ids, and samples of one prompt
        assert not set(base) & set(draw(seed=1))
        assert not set(base) & set(draw(update=1))
        assert not set(base) & set(draw(ids=(2, 3)))
        assert draw(ids=(1, 0)) == base[4:] + base[:4]

    def test_a_prompt_that_stands_in_the_batch_again_has_samples_of_its_own(self, policy):
        model, params = policy
        tokens, lengths, ids = make_prompts(lengths=(4, 3, 4), width=4)
        tokens[2], ids[2] = tokens[0], ids[0]
        sampler = make_sampler(model)
        got = jax.device_get(sampler.generate(params, tokens, lengths, ids, 3, 5, 2))
        alone = jax.device_get(sampler.generate(params, tokens[:2], lengths[:2], ids[:2], 6, 5, 2))
        np.testing.assert_array_equal(got.tokens[:3], alone.tokens[:3])
        np.testing.assert_array_equal(got.tokens[6:], alone.tokens[3:6])
        assert len({row.tobytes() for row in got.tokens}) == 9


class TestStopping:
    def test_rows_end_at_any_end_id(self, policy):
        model, params = policy
        tokens, lengths, ids = make_prompts()
        ends = (3, END, 8)
        free = make_sampler(model, end_ids=(), max_new_tokens=10)
        ending = make_sampler(model, end_ids=ends, max_new_tokens=10, pad_id=5)
        free, got = (x.generate(params, tokens, lengths, ids, 8, 0, 0) for x in (free, ending))
        new, free_new = np.asarray(got.tokens)[:, 5:], np.asarray(free.tokens)[:, 5:]
        for i, row in enumerate(free_new.tolist()):
            first = next((t for t, token in enumerate(row) if token in ends), None)
            length = 10 if first is None else first + 1
            assert int(got.lengths[i]) == length
            assert bool(got.stopped[i]) == (first is not None)
            assert new[i].tolist() == row[:length] + [5] * (10 - length)
            np.testing.assert_allclose(got.logprobs[i, :length], free.logprobs[i, :length], atol=1e-5)
            assert (np.asarray(got.logprobs[i, length:]) == 0.0).all()
        assert np.asarray(free.lengths).tolist() == [10] * 32
        assert not np.asarray(free.stopped).any()
        np.testing.assert_array_equal(np.asarray(got.tokens)[:, :5], np.repeat(tokens, 8, axis=0))
        np.testing.assert_array_equal(got.prompt_lengths, np.repeat(lengths, 8))

    def test_loop_ends_with_the_last_row(self, monkeypatch):
        calls = []
        hidden = CausalLM.hidden

        def counted(self, *args, **kwargs):
            jax.debug.callback(lambda: calls.append(1))
            return hidden(self, *args, **kwargs)

        monkeypatch.setattr(CausalLM, "hidden", counted)
        # Of three tokens the last one ends; it comes soon in all of four rows.
        model, params = fixed_policy((0.0, 0.0, 2.0))
        got = one_prompt(make_sampler(model, vocab_size=3, end_ids=(2,), max_new_tokens=40), params, 4)
        jax.effects_barrier()
        # One pass over the prompt, then one per token but the last, which is not fed back.
        assert len(calls) == int(got.lengths.max()) < 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"vocab_size": TABLE + 1}, "vocab_size"),
        ({"end_ids": (VOCAB,)}, "end token ids"),
    ],
)
def test_bad_settings(policy, changes, message):
    with pytest.raises(UserError, match=message):
        make_sampler(policy[0], **changes)
