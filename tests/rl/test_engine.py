"""Refilled slots against the written key rule and the full forward pass, the number of turns, the engine."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models import CausalLM, ModelConfig, load_hf
from logra_jax.rl import decoding, refill
from logra_jax.rl.engine import Engine, JaxEngine
from logra_jax.rl.rollout import Rollout, Sampler, _generate, attention_mask

END, WIDTH, N, SEED, UPDATE = 3, 13, 3, 5, 2


def make_model(**changes):
    config = ModelConfig(
        model_type="qwen2", vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=64, tie_word_embeddings=False, qkv_bias=True, initializer_range=0.3,
    )  # fmt: skip
    return CausalLM(config, **changes)


def make_sampler(model, **changes):
    # The pad id is an end token: what ended must not be found by looking at ids.
    options = {"max_new_tokens": WIDTH, "end_ids": (END, 8), "pad_id": END, "temperature": 0.8}
    return Sampler(model, vocab_size=model.config.vocab_size, **(options | changes))


@pytest.fixture(scope="module")
def policy():
    model = make_model()
    return model, model.init_params(jax.random.key(3))


@pytest.fixture(scope="module")
def hybrid(fixtures):
    return load_hf(fixtures / "tiny-qwen3_5-text")


@pytest.fixture(scope="module")
def requests():
    """(tokens, lengths, ids) of 8 prompts of 1 to 5 tokens, and limits of 24 rows, 1 to 13 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 8).astype(np.int32)
    tokens = rng.integers(0, 20, (8, 5)).astype(np.int32)
    return (tokens, lengths, np.arange(10, 18, dtype=np.int32)), rng.integers(1, WIDTH + 1, 8 * N).astype(np.int32)


def check_definition(model, params, got: Rollout, requests, steps=32):
    """token = argmax(z / T + noise of its key), until an end token or the limit; z from one pass over the texts."""
    (_, prompt_lengths, ids), limits = requests
    got = jax.device_get(got)
    mask = attention_mask(jnp.asarray(got.prompt_lengths), jnp.asarray(got.lengths), 5, WIDTH)
    z = np.asarray(jax.jit(model.logits)(params, got.tokens, mask), np.float32)[:, 4:-1] / np.float32(0.8)
    rows = np.arange(8 * N)
    np.testing.assert_array_equal(got.prompt_lengths, prompt_lengths[rows // N])

    def noise(prompt, sample, position):
        key = jax.random.key(SEED)
        for number in (UPDATE, prompt, sample, position):
            key = jax.random.fold_in(key, number)
        return jax.random.gumbel(key, z.shape[-1:], jnp.float32)

    places = prompt_lengths[rows // N][:, None] + np.arange(WIDTH)[None]
    drawn = jax.jit(jax.vmap(jax.vmap(noise, (None, None, 0))))(ids[rows // N], rows % N, places)
    want = np.argmax(z + np.asarray(drawn), axis=-1)
    wide = z.astype(np.float64)
    # Both sides round in float32, at the size of the logits, in about as many steps as there are sums in a row.
    atol = steps * np.finfo(np.float32).eps * np.abs(z).max()
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    for row, new in enumerate(got.tokens[:, 5:]):
        ends = [t for t, token in enumerate(new[: limits[row]].tolist()) if token in (END, 8)]
        length = ends[0] + 1 if ends else limits[row]
        assert (got.lengths[row], got.stopped[row]) == (length, bool(ends))
        assert new.tolist() == want[row, :length].tolist() + [END] * (WIDTH - length)
        picked = np.take_along_axis(logs[row, :length], new[:length, None], -1)[:, 0]
        np.testing.assert_allclose(got.logprobs[row], np.pad(picked, (0, WIDTH - length)), atol=atol, rtol=0)


@pytest.mark.parametrize(("slots", "loop"), [(5, False), (4, True), (0, False)])
def test_rows_are_those_of_the_definition(policy, requests, slots, loop, monkeypatch):
    """Whatever the slots; layers written out or in a loop; and with the cache in parts, the second reached late."""
    for module in (decoding, refill):
        monkeypatch.setattr(module, "spans", lambda width: [6, width])
    model, params = policy
    model = model.replace(scan_unroll=1) if loop else model
    sampler = make_sampler(model, slots=slots)
    got = sampler.generate(params, *requests[0], N, SEED, UPDATE, requests[1])
    assert 0 < int(got.stopped.sum()) < 8 * N
    check_definition(model, params, got, requests)


def sample_on(mesh, model, params, requests, **options):
    """Rows that were sampled on a mesh, and what its devices gather in loops, as (dtype, shape)."""
    places = shardings(mesh, model.logical_axes(), model.abstract_params())
    sampler = make_sampler(model.replace(mesh=mesh, scan_unroll=1), **options)
    arguments = jax.device_put(params, places), *jax.device_put(requests[0], batch_sharding(mesh))
    numbers = np.asarray([SEED, UPDATE], np.uint32)
    program = _generate.lower(sampler, *arguments, numbers, N, requests[1]).compile()
    return program(*arguments, numbers, requests[1]), gathered_in_loops(program.as_text())


def gathered_in_loops(text):
    """(dtype, shape) of all that an optimised program gathers in its loops and in what they call."""
    bodies, name = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
        bodies.setdefault(name, []).append(line)
    inside = set(re.findall(r" while\(.*body=%?([\w.-]+)", text))
    while (
        more := {n for i in inside for n in re.findall(r"=%?([\w.-]+)", "\n".join(bodies[i])) if n in bodies} - inside
    ):
        inside |= more
    found = [re.findall(r"= (.*) all-gather(?:-start)?\(", line) for name in inside for line in bodies[name]]
    return {each for types in found for one in types for each in re.findall(r"(\w+)\[([\d,]*)\]", one)}


@pytest.mark.parametrize("tensor", [0, 2])
def test_states_of_linear_attention_are_those_of_the_new_row(hybrid, requests, tensor):
    model, params = hybrid
    if tensor:
        got, gathered = sample_on(make_mesh(2, 1), model, params, requests, slots=5, tensor=tensor)
        assert not {kind for kind, _ in gathered} & {"f32", "bf16"}
    else:
        got = make_sampler(model, slots=5).generate(params, *requests[0], N, SEED, UPDATE, requests[1])
    # A delta rule in chunks and step by step are two ways to the same sum, ten times as far apart.
    check_definition(model, params, got, requests, steps=320)


@pytest.mark.parametrize(("fsdp", "tensor", "group", "slots"), [(4, 1, 0, 4), (2, 2, 0, 4), (8, 1, 4, 0), (4, 2, 4, 4)])
def test_devices(policy, requests, fsdp, tensor, group, slots):
    """Devices that rows are split over have queues of their own; in groups they gather no weights. Same rows."""
    model, params = policy
    got, gathered = sample_on(make_mesh(fsdp, tensor), model, params, requests, slots=slots, tensor=group)
    assert {shard.data.shape[0] for shard in got.tokens.addressable_shards} == {8 * N // fsdp}
    check_definition(model, params, got, requests)
    # Kernels of the query projection, of whole width or that of one part.
    assert (("f32", f"32,{32 // tensor}") in gathered) == (group == 0)
    assert not group or {kind for kind, _ in gathered} <= {"s32", "pred"}


def test_a_copy_for_groups_is_cast(policy, requests):
    """bfloat16 computation of float32 weights: once before the loop or in it, the products are the same."""
    model, params = policy
    model = model.replace(compute_dtype="bfloat16")
    limits = np.full(8 * N, 1, np.int32)
    (plain, _), (copied, _) = (
        sample_on(make_mesh(2, 1), model, params, (requests[0], limits), tensor=group, temperature=0.0)
        for group in (0, 1)
    )
    np.testing.assert_array_equal(plain.tokens, copied.tokens)
    np.testing.assert_array_equal(plain.logprobs, copied.logprobs)


def test_a_place_is_empty_for_no_turn(policy, requests, monkeypatch):
    """As many turns as a queue takes, and every prompt once: 3 groups of 3 prompts fill 8 places."""
    calls = []
    hidden = CausalLM.hidden

    def counted(self, params, tokens, *args, **kwargs):
        jax.debug.callback(lambda: calls.append(tokens.shape))
        return hidden(self, params, tokens, *args, **kwargs)

    monkeypatch.setattr(CausalLM, "hidden", counted)
    model, params = policy
    limits = requests[1]
    make_sampler(model, slots=8, end_ids=()).generate(params, *requests[0], N, SEED, UPDATE, limits)
    jax.effects_barrier()
    ends = [0] * 8
    for limit in limits:  # the next row starts where a place is empty first
        ends[ends.index(min(ends))] += int(limit)
    assert calls.count((8, 1)) == max(ends) < limits.sum()
    assert calls.count((3, 5)) == 3


def test_cache_in_bfloat16(policy, requests):
    model, params = policy
    exact, coarse = (
        make_sampler(model, cache_dtype=kind, temperature=0.0, max_new_tokens=4, end_ids=()).generate(
            params, *requests[0], 1, SEED, UPDATE
        )
        for kind in (None, "bfloat16")
    )
    same = (np.asarray(exact.tokens) == np.asarray(coarse.tokens)).all(axis=1)
    gap = np.abs(np.asarray(exact.logprobs) - np.asarray(coarse.logprobs))[same]
    assert same.any()
    # Keys and values have 8 bits: relative errors of up to 2^-9, seen by logits of size 10.
    assert 1e-6 < gap.max() < 0.1


def test_engine(policy, requests):
    model, params = policy
    sampler = make_sampler(model, max_new_tokens=2)
    engine: Engine = JaxEngine(sampler)
    assert isinstance(engine, Engine)
    assert engine.version == -1
    with pytest.raises(ValueError, match="sync"):
        engine.generate(*requests[0], 1, SEED, UPDATE)
    engine.sync(params, 7)
    assert engine.version == 7
    got, want = engine.generate(*requests[0], 1, SEED, UPDATE), sampler.generate(params, *requests[0], 1, SEED, UPDATE)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="sync"):
        engine.generate(*requests[0], 1, SEED, UPDATE)
