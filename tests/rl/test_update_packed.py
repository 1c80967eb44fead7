"""Packed rows change nothing: the update and the scores are those of a row for every answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny import TINY

from logra_jax import optim
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models import CausalLM
from logra_jax.rl.batch import Batch
from logra_jax.rl.loss import LossSettings, add_sums, policy_loss, token_weights
from logra_jax.rl.packing import Packing, pack, read_slots
from logra_jax.rl.policy import Policy, make_score
from logra_jax.rl.rollout import completion_mask
from logra_jax.rl.update import TrainState, make_update

PROMPT, NEW, VOCAB, ROWS = 5, 7, 30, 8
EVERYTHING = LossSettings("sequence", "sequence", clip_low=0.05, clip_high=0.05, importance_cap=1.2, reference_kl=0.3)


@pytest.fixture(scope="module")
def policy():
    return Policy(
        CausalLM(TINY.replace(num_hidden_layers=2, tie_word_embeddings=True), scan_unroll=1), VOCAB, 0.8, PROMPT
    )


@pytest.fixture(scope="module")
def params(policy):
    """Weights larger than those of a fresh model, and biases that are not 0."""

    def change(path, leaf):
        if path[-1].key == "bias":
            return jax.random.normal(jax.random.key(len(path)), leaf.shape)
        return leaf * 8 if leaf.ndim > 2 else leaf

    return jax.tree.map_with_path(change, policy.model.init_params(jax.random.key(1)))


def make_batch(seed=0):
    """Answers of different lengths, one empty, one row dropped; every optional field is there."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, NEW + 1, ROWS)
    lengths[:2] = NEW, 0
    logprobs = lambda: jnp.asarray(rng.normal(-3, 0.5, (ROWS, NEW)), jnp.float32)
    return Batch(
        tokens=jnp.asarray(rng.integers(1, VOCAB, (ROWS, PROMPT + NEW)), jnp.int32),
        prompt_lengths=jnp.asarray(rng.integers(1, PROMPT + 1, ROWS), jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        stopped=jnp.asarray(lengths < NEW),
        valid=jnp.arange(ROWS) != 3,
        advantages=jnp.asarray(rng.normal(size=ROWS), jnp.float32),
        rollout_logprobs=logprobs(),
        old_logprobs=logprobs(),
        ref_logprobs=logprobs(),
        probe=jnp.asarray([0, 4, 5], jnp.int32),
        check=jnp.asarray(True),
    )


def packed(batch, budget, devices=1):
    found = pack(
        *map(np.asarray, (batch.prompt_lengths, batch.lengths, batch.valid)),
        prompt_width=PROMPT, width=PROMPT + NEW, row=budget, devices=devices,
    )  # fmt: skip
    return batch._replace(packing=Packing(*map(jnp.asarray, found)))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.05},
        {"clip_high": 0.05},
        {"ratio": "sequence", "clip_low": 0.05},
        {"importance_cap": 1.2},
        {"reference_kl": 0.3, "importance_cap": 1.1, "clip_low": 0.1, "clip_high": 0.1},
    ],
)
@pytest.mark.parametrize("old", [True, False])
def test_loss_and_its_gradient(aggregation, options, old):
    """Pass by pass over packed rows against all padded rows, which tests/rl/test_loss.py holds to the formula."""
    batch, settings = packed(make_batch(1), 14, devices=2), LossSettings(aggregation, **options)
    logprobs = batch.rollout_logprobs + 0.2 * jax.random.normal(jax.random.key(0), (ROWS, NEW))
    entropy = jax.random.uniform(jax.random.key(1), (ROWS, NEW))
    mask = completion_mask(batch.lengths, NEW) & batch.valid[:, None]
    counts = jnp.sum(mask, dtype=jnp.float32), jnp.sum(batch.valid, dtype=jnp.float32)
    weights = token_weights(aggregation, batch.lengths, NEW, *counts)
    before = batch.old_logprobs if old else None

    def whole(logprobs):
        return policy_loss(
            logprobs, entropy, before, batch.rollout_logprobs, batch.ref_logprobs, batch.advantages[:, None],
            weights[:, None], mask, mask & batch.stopped[:, None], settings,
        )  # fmt: skip

    def part(logprobs, slots):
        of_token, of_answer = slots.of_completion, slots.of_answer
        return policy_loss(
            logprobs, of_token(entropy), of_token(before) if old else None, of_token(batch.rollout_logprobs),
            of_token(batch.ref_logprobs), of_answer(batch.advantages), of_answer(weights), slots.learns,
            slots.learns & of_answer(batch.stopped), settings,
            lambda values, mask: of_answer(slots.means(values, mask, ROWS)),
        )  # fmt: skip

    (loss, sums), gradient = jax.value_and_grad(whole, has_aux=True)(logprobs)
    total, total_sums, collected = 0.0, jax.tree.map(jnp.zeros_like, sums), jnp.zeros((ROWS, NEW))
    for number in range(int(batch.packing.passes)):
        slots = read_slots(batch.packing.source[number], PROMPT + NEW, PROMPT)
        (one, found), own = jax.value_and_grad(part, has_aux=True)(slots.of_completion(logprobs), slots)
        total, total_sums = total + one, add_sums(total_sums, found)
        collected = slots.put(own, collected)
    np.testing.assert_allclose(total, loss, rtol=1e-5)
    np.testing.assert_allclose(total_sums, sums, rtol=1e-5)
    np.testing.assert_allclose(collected, gradient, rtol=1e-5, atol=1e-7)


def start(params, spec, tx, place=None):
    params = jax.tree.map(jnp.copy, params) if place is None else jax.device_put(params, place)
    train, frozen = spec.split(params)
    return TrainState(train, tx.init(train), jnp.zeros(())), frozen


def leaves(tree):
    return {optim.spec.path_string(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


@pytest.fixture(scope="module")
def spec(policy):
    return optim.SketchSpec(rank=4, seed=3, names=policy.model.weight_names())


@pytest.fixture(scope="module")
def tx(spec):
    return optim.logra(spec, update_ratio=0.1, preserve_norm=True, kl_budget=1e-4)


@pytest.fixture(scope="module")
def update(policy, spec, tx):
    """One function for all tests on one device; it is compiled for each layout of a batch."""
    return make_update(policy, tx, spec, EVERYTHING, mismatch=True)


@pytest.fixture(scope="module")
def plain(update, params, spec, tx):
    """What an update makes of one batch and then of another, with a row for every answer."""
    return run(update, *start(params, spec, tx), [make_batch(), make_batch(5)])


def run(update, state, frozen, batches):
    found = []
    for batch in batches:
        state, metrics = update(state, frozen, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    return leaves((state.train, state.opt_state, state.mismatch)), found


def assert_same(found, expected):
    for path, leaf in expected[0].items():
        np.testing.assert_allclose(found[0][path], leaf, rtol=2e-4, atol=1e-5 * np.abs(leaf).max(), err_msg=path)
    for one, other in zip(found[1], expected[1], strict=True):
        assert one.keys() == other.keys()
        assert one["padding/share"] < other["padding/share"] < 1
        for name in one.keys() - {"padding/share"}:
            np.testing.assert_allclose(one[name], other[name], rtol=2e-4, atol=1e-7, err_msg=name)
        assert 0.05 < one["clip/share"] < 0.95
        assert 0.05 < one["importance/capped"] < 0.95


def test_whole_update_with_one_program_for_all_lengths(update, plain, params, spec, tx):
    before = update._cache_size()
    batches = [packed(batch, 30) for batch in (make_batch(), make_batch(5))]
    assert batches[0].packing.passes != batches[1].packing.passes
    assert_same(run(update, *start(params, spec, tx), batches), plain)
    assert update._cache_size() == before + 1


def test_whole_update_in_other_rows_on_two_devices(policy, plain, params, spec, tx):
    mesh = make_mesh(2, 1)
    rows, whole = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())

    def placed(batch):
        batch = packed(batch, 16, devices=2)
        spread = {
            "probe": whole,
            "check": whole,
            "packing": Packing(NamedSharding(mesh, PartitionSpec(None, "fsdp")), whole),
        }
        return Batch(**{k: jax.device_put(v, spread.get(k, rows)) for k, v in batch._asdict().items()})

    state, frozen = start(params, spec, tx, shardings(mesh, policy.model.logical_axes(), params))
    places = TrainState(
        jax.tree.map(lambda leaf: leaf.sharding, state.train), optim.state_shardings(tx, state.train), whole
    )
    on_mesh = policy._replace(model=policy.model.replace(mesh=mesh))
    update = make_update(on_mesh, tx, spec, EVERYTHING, mismatch=True, state_shardings=places)
    state = jax.device_put(state, places)
    assert_same(run(update, state, frozen, [placed(make_batch()), placed(make_batch(5))]), plain)


def test_a_batch_without_a_valid_row_moves_nothing(update, params, spec, tx):
    """No pass at all: sums and sketches are the zeros that they start with."""
    batch = make_batch()._replace(valid=jnp.zeros(ROWS, bool))
    state, metrics = update(*start(params, spec, tx), packed(batch, 30))
    assert metrics["ok"]
    assert all(np.isfinite(value) for value in metrics.values())
    for path, leaf in leaves(state.train).items():
        np.testing.assert_array_equal(leaf, leaves(spec.split(params)[0])[path])


def test_scores_of_packed_rows(policy, params, spec):
    batch, score = make_batch(), make_score(policy, 0)
    mask = completion_mask(batch.lengths, NEW) & batch.valid[:, None]
    expected = np.where(mask, score(*spec.split(params), batch), 0.0)
    np.testing.assert_allclose(score(*spec.split(params), packed(batch, 30)), expected, rtol=0, atol=1e-5)
