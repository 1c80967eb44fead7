"""The jitted update against independent computations: dense gradients, the numpy twin, optax, differences."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import TINY

from logra_jax import optim
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models import CausalLM
from logra_jax.optim import twin
from logra_jax.rl.batch import Batch
from logra_jax.rl.loss import LossSettings
from logra_jax.rl.policy import Policy, make_score
from logra_jax.rl.rollout import attention_mask
from logra_jax.rl.update import TrainState, make_update

PROMPT, NEW, VOCAB, ROWS, RANK, SEED, TEMPERATURE = 5, 7, 30, 8, 4, 3, 0.8


@pytest.fixture(scope="module")
def model():
    return CausalLM(TINY.replace(tie_word_embeddings=True), scan_unroll=1)  # compiles faster


@pytest.fixture(scope="module")
def params(model):
    # Larger kernels than a fresh model has, so that every weight has a gradient worth comparing.
    kernels = lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf
    return jax.tree.map(kernels, model.init_params(jax.random.key(1)))


@pytest.fixture(scope="module")
def spec(model):
    return optim.SketchSpec(rank=RANK, seed=SEED, names=model.weight_names())


@pytest.fixture(scope="module")
def policy(model):
    return Policy(model, VOCAB, TEMPERATURE, PROMPT)


def make_batch(width=NEW, **changes):
    """Eight answers and prompts of different lengths; `width` adds padding on the right."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (ROWS, PROMPT + NEW))
    lengths = rng.integers(1, NEW + 1, ROWS)
    lengths[0] = NEW
    pad = ((0, 0), (0, width - NEW))
    fields = {
        "tokens": jnp.asarray(np.pad(tokens, pad), jnp.int32),
        "prompt_lengths": jnp.asarray(rng.integers(2, PROMPT + 1, ROWS), jnp.int32),
        "lengths": jnp.asarray(lengths, jnp.int32),
        "stopped": jnp.asarray(lengths < NEW),
        "valid": jnp.ones(ROWS, bool),
        "advantages": jnp.asarray(rng.normal(size=ROWS), jnp.float32),
        "rollout_logprobs": jnp.asarray(np.pad(rng.normal(-2, 0.5, (ROWS, NEW)), pad), jnp.float32),
        "probe": jnp.asarray([0, 3, 5], jnp.int32),
        "check": jnp.asarray(True),
    }
    return Batch(**(fields | changes))


def reference_logprobs(model, params, batch):
    """(log-probabilities, mask) of the answers from whole logits at once."""
    mask = attention_mask(batch.prompt_lengths, batch.lengths, PROMPT, batch.tokens.shape[1] - PROMPT)
    logits = model.logits(params, batch.tokens, mask)[:, PROMPT - 1 : -1, :VOCAB] / TEMPERATURE
    labels = jax.nn.one_hot(batch.tokens[:, PROMPT:], VOCAB)
    counted = mask[:, PROMPT:] & batch.valid[:, None]
    return jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1), counted


def reference_loss(params, model, batch):
    """The policy gradient's surrogate: - mean over tokens of advantage x log p."""
    logprobs, counted = reference_logprobs(model, params, batch)
    total = jnp.sum(counted, dtype=jnp.float32)
    return -jnp.sum(jnp.where(counted, batch.advantages[:, None] * logprobs, 0.0)) / total


def by_path(tree):
    return {optim.spec.path_string(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def start(params, spec, tx, place=None):
    """A fresh state (updates donate theirs) and the frozen weights."""
    params = jax.tree.map(jnp.copy, params)
    if place is not None:
        params = jax.device_put(params, place)
    train, frozen = spec.split(params)
    return TrainState(train, tx.init(train), jnp.zeros(())), frozen


def keep_sketches(spec):
    """A link whose state is the sketches it was last given; it changes nothing."""

    def init(train):
        return {path: jnp.zeros(matrix.sketch_shape(RANK)) for path, matrix in spec.matrices(train).items()}

    def update(grads, state, train=None, **extra):
        return grads, dict(optim.spec.leaves_with_paths(grads))

    return optax.GradientTransformationExtraArgs(init, update)


def only_sketches(spec):
    """An optimizer that keeps the sketches and moves nothing."""
    still = optax.GradientTransformationExtraArgs(
        lambda train: (), lambda grads, state, train=None, **extra: (jax.tree.map(jnp.zeros_like, train), state)
    )
    return optim.guard_nonfinite(optax.chain(optim.sketch(spec), keep_sketches(spec), still))


BUDGETS, RATIO = (1e-4, 1e-6), 0.1  # at this ratio the budgets decide, not the cap on alpha


def logra(spec):
    budget = lambda count: jnp.where(count == 0, *BUDGETS)
    return optim.logra(spec, update_ratio=RATIO, preserve_norm=True, kl_budget=budget)


class Plain(NamedTuple):
    """One compiled update for many tests: everything on, all rows at once."""

    tx: optax.GradientTransformationExtraArgs
    update: Callable


@pytest.fixture(scope="module")
def plain(policy, spec):
    tx = logra(spec)
    return Plain(tx, make_update(policy, tx, spec, LossSettings(), mismatch=True, check_responses=3))


def twin_projection(name, k, update=0):
    return twin.signs(SEED, update, name, RANK, k) / np.sqrt(RANK)


def expected_sketches(model, params, batch):
    """A x dense gradient with A from the numpy twin, for every stacked target."""
    dense = by_path(jax.grad(reference_loss)(params, model, batch))
    names = model.weight_names()
    targets = [path for path in names if path.endswith("_proj/kernel")]
    project = lambda name, g: twin_projection(name, g.shape[0]) @ g
    return {path: np.stack(list(map(project, names[path], dense[path]))) for path in targets}


def assert_same_sketches(found, expected):
    assert found.keys() == expected.keys()
    assert len(found) == 7
    for path, sketch in expected.items():
        np.testing.assert_allclose(found[path], sketch, rtol=0, atol=1e-5 * np.abs(sketch).max(), err_msg=path)


@pytest.mark.parametrize(
    ("micro_batch", "remat", "unroll"), [(0, "none", 3), (2, "none", 1), (0, "full", 1), (2, "full", 3)]
)
def test_sketches_are_projected_dense_gradients(model, policy, params, spec, micro_batch, remat, unroll):
    batch = make_batch()
    policy = policy._replace(model=model.replace(remat=remat, scan_unroll=unroll))
    tx = only_sketches(spec)
    update = make_update(policy, tx, spec, LossSettings(), kl_control=False, micro_batch=micro_batch)
    state, _ = update(*start(params, spec, tx), batch)
    assert_same_sketches(state.opt_state.inner_state[1], expected_sketches(model, params, batch))


def placed_start(policy, params, spec, tx, batch, mesh):
    """Policy, state with its shardings, frozen weights and batch on a mesh."""
    place = shardings(mesh, policy.model.logical_axes(), params)
    rows = batch_sharding(mesh, ROWS)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = {
        name: jax.device_put(leaf, everywhere if name in ("probe", "check") else rows)
        for name, leaf in batch._asdict().items()
        if leaf is not None
    }
    state, frozen = start(params, spec, tx, place)
    places = TrainState(
        jax.tree.map(lambda leaf: leaf.sharding, state.train), optim.state_shardings(tx, state.train), everywhere
    )
    on_mesh = policy._replace(model=policy.model.replace(mesh=mesh))
    return on_mesh, jax.device_put(state, places), places, frozen, Batch(**placed)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "remat"),
    [(2, 1, "none"), (1, 2, "offload"), (2, 2, "projected"), (8, 1, "offload"), (4, 2, "full")],
)
def test_update_does_not_depend_on_the_mesh(model, policy, plain, params, spec, fsdp, tensor, remat):
    """Sketches, predicted and real KL, alpha, second moments and weights; nor on what the backward pass keeps."""
    expected, expected_metrics = plain.update(*start(params, spec, plain.tx), make_batch())
    mesh, tx = make_mesh(fsdp, tensor), optax.chain(keep_sketches(spec), plain.tx)
    policy = policy._replace(model=model.replace(remat=remat))
    policy, state, places, frozen, batch = placed_start(policy, params, spec, tx, make_batch(), mesh)
    update = make_update(
        policy, tx, spec, LossSettings(), mismatch=True, micro_batch=fsdp, check_responses=3, state_shardings=places
    )
    found, metrics = update(state, frozen, batch)
    sketches, opt_state = found.opt_state
    assert_same_sketches(sketches, expected_sketches(model, params, make_batch()))
    for tree, other in ((found.train, expected.train), (opt_state, expected.opt_state)):
        for path, leaf in by_path(other).items():
            np.testing.assert_allclose(by_path(tree)[path], leaf, rtol=2e-4, atol=1e-5 * np.abs(leaf).max())
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(float(metrics[name]), float(value), rtol=2e-4, atol=1e-7, err_msg=name)
    for leaf, place in zip(jax.tree.leaves(found.train), jax.tree.leaves(places.train), strict=True):
        assert leaf.sharding == place


def test_whole_update_does_not_depend_on_micro_batches_or_padding(policy, plain, params, spec):
    split_update = make_update(policy, plain.tx, spec, LossSettings(), mismatch=True, micro_batch=2, check_responses=3)
    found = []
    for update, width in ((plain.update, NEW), (split_update, NEW + 4)):
        state, metrics = update(*start(params, spec, plain.tx), make_batch(width))
        found.append((by_path(state.train), {name: float(value) for name, value in metrics.items()}))
    (whole, whole_metrics), (split, split_metrics) = found
    for path, leaf in whole.items():
        np.testing.assert_allclose(split[path], leaf, rtol=0, atol=1e-5 * np.abs(leaf).max())
    assert whole_metrics.pop("padding/share") < split_metrics["padding/share"]
    for name, value in whole_metrics.items():
        np.testing.assert_allclose(split_metrics[name], value, rtol=2e-4, atol=1e-7, err_msg=name)


def test_one_update_is_the_formula(model, plain, params, spec):
    """W + alpha A^T D of the norm-preserving form, in float64 numpy with the twin's projections."""
    batch = make_batch()
    before = by_path(params)
    state, metrics = plain.update(*start(params, spec, plain.tx), batch)
    after, names = by_path(state.train), model.weight_names()
    direction, lifted, weights = {}, 0.0, 0.0
    for path, stack in expected_sketches(model, params, batch).items():
        for layer, sketch in enumerate(stack.astype(np.float64)):
            # First update: v = 0.05 mean(S^2), debiased by 1 - 0.95, so the rows' root mean squares remain.
            rows = np.sqrt(np.mean(sketch**2, axis=0))
            d = sketch / (rows + 1e-8 * rows.mean())
            d *= np.linalg.norm(sketch) / np.linalg.norm(d)
            a = twin_projection(names[path][layer], before[path].shape[1])
            direction[path, layer] = a.T @ d
            lifted += np.sum(direction[path, layer] ** 2)
            weights += np.sum(before[path][layer].astype(np.float64) ** 2)
    scale = -float(metrics["kl/alpha"]) * RATIO * np.sqrt(weights / lifted)
    for (path, layer), change in direction.items():
        moved = after[path][layer] - before[path][layer]
        # The change is what is left of float32 weights of order one, hence the bound relative to them.
        bound = 2e-4 * np.abs(scale * change).max() + 2e-7 * np.abs(before[path]).max()
        np.testing.assert_allclose(moved, scale * change, rtol=0, atol=bound)


def test_predicted_kl_is_the_kl_of_a_small_step(plain, params, spec):
    """Prediction (forward mode) against the divergence between the policies before and after one same step."""
    is_link = lambda node: isinstance(node, optim.predicted_kl.PredictedKLState)
    sizes, ratios = [], []
    for number, budget in enumerate(BUDGETS):
        state, frozen = start(params, spec, plain.tx)
        # Only the KL link counts differently: another budget for the same direction.
        counted = jax.tree.map(
            lambda node, number=number: node._replace(count=jnp.asarray(number, jnp.int32)) if is_link(node) else node,
            state,
            is_leaf=is_link,
        )
        _, metrics = plain.update(counted, frozen, make_batch())
        assert 0 < float(metrics["kl/alpha"]) < 3
        assert 0.499 * budget <= float(metrics["kl/budget"]) <= budget
        np.testing.assert_allclose(metrics["kl/predicted"], metrics["kl/budget"], rtol=1e-4)
        sizes.append(float(metrics["kl/predicted"]) ** 0.5)
        ratios.append(float(metrics["kl/realized"]) / float(metrics["kl/predicted"]))
    # KL(t) = q t^2 + c t^3 + ..: the ratio is 1 + c t, and its limit at t = 0 is 1. What is left is of order t^2
    # and the rounding of logits of order 10 (1e-6 each) relative to the smaller step, 2e-5 / t.
    limit = (ratios[1] * sizes[0] - ratios[0] * sizes[1]) / (sizes[0] - sizes[1])
    assert abs(ratios[1] - 1) < abs(ratios[0] - 1)
    assert limit == pytest.approx(1, abs=2e-2)


def test_a_gradient_that_is_not_finite_moves_nothing(plain, params, spec):
    state, frozen = start(params, spec, plain.tx)
    before = by_path(state)
    bad = make_batch(advantages=jnp.full(ROWS, jnp.nan))
    state, metrics = plain.update(state, frozen, bad)
    assert not metrics["ok"]
    assert float(metrics["kl/alpha"]) == 0
    after = by_path(state)
    for path in before:
        if not path.endswith(("ok", "alpha", "predicted_kl", "budget")):
            np.testing.assert_array_equal(after[path], before[path], err_msg=path)
    state, metrics = plain.update(state, frozen, make_batch())
    assert metrics["ok"]
    assert int(optim.sketch_count(state.opt_state)) == 1


@pytest.mark.parametrize("gap", [np.nan, np.inf, -np.inf])
def test_a_mismatch_that_is_not_finite_is_not_kept(plain, params, spec, gap):
    state, frozen = start(params, spec, plain.tx)
    state = state._replace(mismatch=jnp.asarray(2e-5))
    batch = make_batch()
    state, _ = plain.update(state, frozen, batch._replace(rollout_logprobs=batch.rollout_logprobs + gap))
    assert float(state.mismatch) == pytest.approx(2e-5 if gap != -np.inf else 1.4e-5)
    _, metrics = plain.update(state, frozen, batch)
    assert metrics["ok"]


def test_mismatch_waits_for_answers_that_end(plain, params, spec):
    state, frozen = start(params, spec, plain.tx)
    state = state._replace(mismatch=jnp.asarray(2e-5))
    state, metrics = plain.update(state, frozen, make_batch(stopped=jnp.zeros(ROWS, bool)))
    assert float(state.mismatch) == pytest.approx(2e-5)
    assert float(metrics["kl/budget"]) == pytest.approx(BUDGETS[0] - 2e-5)


def test_no_valid_token_moves_nothing_and_is_no_error(plain, params, spec):
    state, frozen = start(params, spec, plain.tx)
    before = by_path(state.train)
    state, metrics = plain.update(state, frozen, make_batch(valid=jnp.zeros(ROWS, bool)))
    assert metrics["ok"]
    assert all(np.isfinite(value) for value in metrics.values())
    for path, leaf in by_path(state.train).items():
        np.testing.assert_array_equal(leaf, before[path])


def test_mismatch_of_ended_answers_lowers_the_budget(model, plain, params, spec):
    batch = make_batch()
    logprobs, counted = reference_logprobs(model, params, batch)
    ended = np.asarray(counted) & np.asarray(batch.stopped)[:, None]
    assert 0 < ended.sum() < np.asarray(counted).sum()
    # Answers that were cut off disagree by far more, and must not count.
    batch = batch._replace(rollout_logprobs=logprobs + jnp.where(batch.stopped, 1e-4, 5.0)[:, None])
    state, metrics = plain.update(*start(params, spec, plain.tx), batch)
    np.testing.assert_allclose(metrics["kl/mismatch"], 1e-4, atol=1e-6)
    np.testing.assert_allclose(state.mismatch, 0.3e-4, atol=1e-6)  # weight 0.3 on the first observation
    np.testing.assert_allclose(metrics["kl/budget"], BUDGETS[0] - 0.3e-4, atol=1e-6)


@pytest.mark.parametrize("control", [False, True])
def test_dense_adamw_in_the_same_loop(model, policy, params, spec, control):
    rate = 1e-2
    link = [optim.scale_by_predicted_kl(1e-5, 3.0)] if control else []
    tx = optim.guard_nonfinite(optax.chain(optax.adamw(rate, 0.9, 0.95, 1e-8, weight_decay=0.0), *link))
    update = make_update(policy, tx, spec, LossSettings(), sketched=False, kl_control=control, check_responses=3)
    batch = make_batch()
    with jax.numpy_dtype_promotion("standard"):  # optax itself needs it
        state, metrics = update(*start(params, spec, tx), batch)
    dense = by_path(jax.grad(reference_loss)(params, model, batch))
    before = by_path(params)
    scale = float(metrics["kl/alpha"]) if control else 1.0
    for path, leaf in by_path(state.train).items():
        # Adam's first step is the sign of the gradient; rounding decides where the gradient is almost zero.
        sure = np.abs(dense[path]) > 1e-4 * np.abs(dense[path]).max()
        moved = leaf - before[path]
        expected = -rate * scale * dense[path] / (np.abs(dense[path]) + 1e-8)
        np.testing.assert_allclose(moved[sure], expected[sure], rtol=5e-3, atol=2e-6)
    if control:
        np.testing.assert_allclose(metrics["kl/realized"], 1e-5, rtol=0.05)


@pytest.mark.parametrize("mode", ["stochastic", "residual"])
def test_predicted_kl_holds_for_bfloat16_weights(policy, params, spec, mode):
    """Twelve updates, each predicted to spend the budget: so they do, though the weights move in steps of 2^-8."""
    tx = optim.logra(spec, update_ratio=RATIO, preserve_norm=True, kl_budget=1e-3)
    update = make_update(policy, tx, spec, LossSettings(), check_responses=3, rounding=mode)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    state, frozen = start(half, spec, tx)
    if mode == "residual":
        state = state._replace(residual=optim.init_residual(state.train))
    ratios = []
    for _ in range(12):
        state, metrics = update(state, frozen, make_batch())
        np.testing.assert_allclose(metrics["kl/predicted"], 1e-3, rtol=1e-3)
        ratios.append(float(metrics["kl/realized"]) / 1e-3)
    assert 0.7 < np.median(ratios) < 1.4
    assert {leaf.dtype for leaf in jax.tree.leaves((state.train, state.residual))} == {jnp.dtype(jnp.bfloat16)}
    assert (state.residual is None) == (mode == "stochastic")


def test_old_and_reference_policies_enter_the_loss(model, policy, params, spec):
    """Second update of a batch: ratio, clip share and both divergences against their definitions."""
    batch = make_batch()
    shifted = jax.tree.map(lambda leaf: leaf * 1.2, params)
    score = lambda tree: make_score(policy, 4)(*spec.split(tree), batch)
    old, ref = score(shifted), score(jax.tree.map(lambda leaf: leaf * 0.9, params))
    logprobs, counted = reference_logprobs(model, params, batch)
    expected_old, _ = reference_logprobs(model, shifted, batch)
    np.testing.assert_allclose(np.asarray(old)[counted], np.asarray(expected_old)[counted], rtol=0, atol=1e-5)
    tx = logra(spec)
    settings = LossSettings(clip_low=0.05, clip_high=0.05, reference_kl=0.1)
    update = make_update(policy, tx, spec, settings, micro_batch=2)
    _, metrics = update(*start(params, spec, tx), batch._replace(old_logprobs=old, ref_logprobs=ref))
    ratio = np.exp(np.asarray(logprobs) - np.asarray(expected_old))
    advantage = np.asarray(batch.advantages)[:, None]
    cut = ((ratio > 1.05) & (advantage > 0)) | ((ratio < 0.95) & (advantage < 0))
    mask = np.asarray(counted)
    assert 0.05 < cut[mask].mean() < 0.95
    np.testing.assert_allclose(metrics["ratio/mean"], ratio[mask].mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["clip/share"], cut[mask].mean(), rtol=1e-4)
    gap = np.asarray(ref) - np.asarray(logprobs)
    np.testing.assert_allclose(metrics["kl/reference"], (np.exp(gap) - gap - 1)[mask].mean(), rtol=2e-3)
