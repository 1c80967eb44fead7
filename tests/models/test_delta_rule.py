"""The gated delta rule against its definition in float64: chunks, steps, segments, padding, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax.models.delta_rule import (
    CHUNK,
    DeltaInputs,
    causal_conv,
    delta_rule,
    delta_rule_step,
    next_window,
    unit_length,
)

RUN = jax.jit(delta_rule)


@pytest.fixture(scope="module")
def reference(fixtures):
    """140 tokens of random inputs with outputs and last states in float64, without and with a first state."""
    with np.load(fixtures / "gdn-op" / "reference.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def inputs(reference):
    q, k = (unit_length(jnp.asarray(reference[name])) for name in ("q", "k"))
    rest = (jnp.asarray(reference[name]) for name in ("v", "g", "beta"))
    return DeltaInputs(q * np.float32(reference["q"].shape[-1] ** -0.5), k, *rest)


def start(reference, tag):
    return jnp.asarray(reference["s0"]) if tag == "s0" else jnp.zeros_like(reference["s0"])


def part(inputs, first, last):
    return DeltaInputs(*(x[:, first:last] for x in inputs))


@pytest.mark.parametrize("tag", ["zero", "s0"])
def test_chunks_and_steps_are_the_recurrence(reference, inputs, tag):
    outputs, state = reference[f"f64_out_{tag}"], reference[f"f64_state_{tag}"]
    out, last = RUN(inputs, start(reference, tag))
    np.testing.assert_allclose(out, outputs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(last, state, atol=1e-5, rtol=0)
    step = jax.jit(delta_rule_step)
    now, stepped = start(reference, tag), []
    for t in range(outputs.shape[1]):
        one, now = step(part(inputs, t, t + 1), now)
        stepped.append(one)
    np.testing.assert_allclose(np.concatenate(stepped, 1), outputs, atol=1e-5, rtol=0)
    np.testing.assert_allclose(now, state, atol=1e-5, rtol=0)


def test_a_state_goes_on_where_it_was_left(reference, inputs):
    """In pieces that end inside, at, and short of a chunk."""
    state, outputs = start(reference, "s0"), []
    for first, last in ((0, CHUNK - 9), (CHUNK - 9, CHUNK), (CHUNK, 140)):
        out, state = RUN(part(inputs, first, last), state)
        outputs.append(out)
    np.testing.assert_allclose(np.concatenate(outputs, 1), reference["f64_out_s0"], atol=1e-5, rtol=0)
    np.testing.assert_allclose(state, reference["f64_state_s0"], atol=1e-5, rtol=0)


def test_segments_know_nothing_of_each_other(reference, inputs):
    """Bounds inside a chunk, two in one chunk, and a segment over several; the first goes on from the state."""
    lengths = [10, 60, 5, 65]
    segments = jnp.asarray(np.repeat(np.int32([3, 1, 2, 7]), lengths)[None])
    out, last = RUN(inputs, start(reference, "s0"), segments)
    first = 0
    for number, length in enumerate(lengths):
        own = part(inputs, first, first + length)
        expected, state = RUN(own, start(reference, "zero" if number else "s0"))
        np.testing.assert_allclose(out[:, first : first + length], expected, atol=1e-5, rtol=0)
        first += length
    np.testing.assert_allclose(last, state, atol=1e-5, rtol=0)


def test_derivatives_are_those_of_the_recurrence(reference, inputs):
    """Both ways through the solve, of inputs and state, against the loop over tokens."""
    state, draw = start(reference, "s0"), np.random.default_rng(5).standard_normal

    def by_steps(inputs, state):
        def step(state, token):
            out, state = delta_rule_step(jax.tree.map(lambda x: x[:, None], token), state)
            return state, out[:, 0]

        state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), inputs))
        return jnp.swapaxes(out, 0, 1), state

    at = (jax.tree.map(jnp.asarray, inputs), state)
    along, back = (
        jax.tree.map(lambda x: jnp.asarray(draw(x.shape), jnp.float32), tree) for tree in (at, jax.eval_shape(RUN, *at))
    )
    found, expected = (
        (jax.jvp(run, at, along)[1], jax.vjp(run, *at)[1](back)) for run in (delta_rule, jax.jit(by_steps))
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Sums over 140 tokens of float32 products, in another order.
        np.testing.assert_allclose(ours, theirs, atol=140 * 1.2e-7 * np.abs(theirs).max(), rtol=0)


def test_tokens_that_write_nothing_leave_the_state(reference, inputs):
    mask = np.ones((1, 140, 1), np.float32)
    mask[:, :7] = mask[:, 90:] = 0
    quiet = inputs._replace(g=inputs.g * mask, beta=inputs.beta * mask)
    out, last = RUN(quiet, start(reference, "s0"))
    expected, state = RUN(part(inputs, 7, 90), start(reference, "s0"))
    np.testing.assert_allclose(out[:, 7:90], expected, atol=1e-5, rtol=0)
    np.testing.assert_allclose(last, state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rate", [0.01, 16.0])
def test_gradients_are_finite_for_slow_and_fast_decay(rate):
    """8192 tokens; a decay masked after its exponential has NaN here."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    q, k = unit_length(draw(1, 8192, 1, 4)), unit_length(draw(1, 8192, 1, 4))
    inputs = DeltaInputs(q, k, draw(1, 8192, 1, 3), -rate * jax.nn.softplus(draw(1, 8192, 1)), jnp.ones((1, 8192, 1)))

    def loss(inputs):
        out, state = delta_rule(inputs, jnp.zeros((1, 1, 4, 3)))
        return jnp.square(out).mean() + jnp.square(state).mean()

    grads = jax.jit(jax.grad(loss))(inputs)
    assert all(np.isfinite(leaf).all() for leaf in grads)
    assert all(np.abs(leaf).max() > 0 for leaf in grads)


def test_equal_keys_do_not_blow_up_the_solve():
    """Write strength 1 and no decay: only the newest value is known under the key."""
    keys = jnp.ones((1, 130, 1, 4)) / 2
    values = jnp.asarray(np.random.default_rng(3).standard_normal((1, 130, 1, 3)), jnp.float32)
    out, _ = RUN(
        DeltaInputs(keys, keys, values, jnp.zeros((1, 130, 1)), jnp.ones((1, 130, 1))), jnp.zeros((1, 1, 4, 3))
    )
    np.testing.assert_allclose(out, values, atol=1e-4, rtol=0)


def test_the_convolution_is_the_sum_it_is_defined_as():
    rng = np.random.default_rng(2)
    x, window, kernel = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 5), (2, 3, 5), (4, 5)))
    segments = np.repeat(np.int32([[1, 2]]), [5, 4], axis=1).repeat(2, 0)
    whole = np.concatenate([window, x], 1)
    for numbers in (None, segments):
        expected = np.zeros_like(x)
        for t in range(9):
            for j in range(4):
                at = t - 3 + j
                if numbers is None or numbers[0, max(at, 0)] == numbers[0, t]:
                    expected[:, t] += kernel[j] * whole[:, at + 3]
        given = (None if array is None else jnp.asarray(array) for array in (x, window, kernel, numbers))
        np.testing.assert_allclose(causal_conv(*given), expected, atol=1e-5, rtol=0)
    got = np.asarray(next_window(jnp.asarray(x), jnp.asarray(window), jnp.asarray([9, 1])))
    np.testing.assert_array_equal(got[0], x[0, 6:9])
    np.testing.assert_array_equal(got[1], np.concatenate([window[1, 1:], x[1, :1]]))
