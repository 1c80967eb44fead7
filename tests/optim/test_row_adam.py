"""RowAdam against the formulas in float64, and at the edges of float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logra_jax import SketchSpec, Target, UserError, scale_by_row_adam, sketch


def reference(sketches, b2=0.95, eps=1e-8, b1=0.0, preserve_norm=False, refresh=1):
    """Directions and second moments of a run, float64, S is [r, d]; as the paper writes it, row by row."""
    v = np.zeros(sketches[0].shape[-1])
    m = np.zeros_like(sketches[0])
    out = []
    for t, s in enumerate(sketches, start=1):
        v = b2 * v + (1 - b2) * np.mean(s**2, axis=0)
        rms = np.sqrt(v / (1 - b2**t))
        age = t if refresh == 0 else (t - 1) % refresh + 1
        m = (1 - b1) * s + (b1 * m if age > 1 else 0)
        top = m / (1 - b1**age)
        if preserve_norm:
            inverse = 1 / (rms + max(eps * rms.mean(), np.finfo(np.float32).tiny))
            inverse = inverse / np.sqrt(np.mean(inverse**2))
            d = inverse * top
            length = np.linalg.norm(d)
            d = d * (np.linalg.norm(top) / length) if length > 0 else d
        else:
            d = top / (rms + eps)
        out.append((d, v))
    return out


def run(tx, params, sketches):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for s in sketches:
        d, state = update({"w": jnp.asarray(s, jnp.float32)}, state, params)
        yield d["w"], state


@pytest.mark.parametrize("preserve_norm", [False, True])
@pytest.mark.parametrize(("b1", "refresh", "r"), [(0.0, 1, 3), (0.9, 2, 3), (0.9, 3, 3), (0.5, 0, 3), (0.5, 0, 9)])
def test_against_the_formulas(preserve_norm, b1, refresh, r) -> None:
    d, k = 5, 9
    rng = np.random.default_rng(1)
    sketches = [rng.normal(size=(r, d)) * np.arange(1, d + 1) for _ in range(7)]
    spec = SketchSpec(rank=r, refresh=refresh, targets=("w",)) if r < k else None  # without one: dense gradients
    tx = scale_by_row_adam(b1=b1, preserve_norm=preserve_norm, spec=spec)
    expected = reference(sketches, b1=b1, preserve_norm=preserve_norm, refresh=refresh)
    for (got, state), (want, v) in zip(run(tx, {"w": jnp.zeros((k, d))}, sketches), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(state.v["w"], v, rtol=1e-5)
    assert int(state.count) == 7


def test_momentum_starts_anew_with_each_projection() -> None:
    spec = SketchSpec(rank=2, refresh=2, targets=("w",))
    tx = scale_by_row_adam(b1=0.9, spec=spec)
    first = np.full((2, 4), 5.0)
    sketches = [first, first, -first]
    *_, (_, state) = run(tx, {"w": jnp.zeros((9, 4))}, sketches)
    np.testing.assert_allclose(state.momentum["w"], (1 - 0.9) * -first, rtol=1e-6)


@pytest.mark.parametrize("preserve_norm", [False, True])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e20, 1e30])
def test_sketches_of_any_size(preserve_norm, scale) -> None:
    """Direction and second moment equal the float64 formulas where v itself leaves float32."""
    rng = np.random.default_rng(2)
    sketches = [scale * rng.normal(size=(4, 6)) * [1, 1, 1e-3, 1, 0, 1] for _ in range(3)]
    tx = scale_by_row_adam(preserve_norm=preserve_norm)
    for (got, state), (want, v) in zip(
        run(tx, {"w": jnp.zeros((9, 6))}, sketches),
        reference(sketches, preserve_norm=preserve_norm),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=3e-5, atol=0)
        np.testing.assert_allclose(np.asarray(state.rms["w"], np.float64), np.sqrt(v), rtol=1e-5)


@pytest.mark.parametrize("preserve_norm", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_zero_sketch_gives_exactly_zero(preserve_norm, eps) -> None:
    tx = scale_by_row_adam(eps=eps, preserve_norm=preserve_norm)
    zero = np.zeros((4, 6))
    for got, _ in run(tx, {"w": jnp.zeros((9, 6))}, [zero, np.ones((4, 6)), zero]):
        assert np.isfinite(got).all()
    assert (np.asarray(got) == 0).all()
    for got, state in run(tx, {"w": jnp.zeros((9, 6))}, [zero, zero]):
        assert (np.asarray(got) == 0).all()
        assert (np.asarray(state.rms["w"]) == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    exponents=st.lists(st.integers(-36, 36), min_size=6, max_size=6),
    dead=st.integers(0, 63),
    seed=st.integers(0, 9),
)
def test_never_nan(exponents, dead, seed) -> None:
    """Rows of wildly different sizes, any of them dead: finite, and the norm is preserved to rounding."""
    rng = np.random.default_rng(seed)
    alive = np.array([(dead >> i) & 1 for i in range(6)])
    s = rng.normal(size=(3, 6)) * 10.0 ** np.array(exponents) * alive
    for preserve_norm, update in UPDATES.items():
        d, state = update({"w": jnp.asarray(s, jnp.float32)}, STATE)
        assert np.isfinite(d["w"]).all()
        assert np.isfinite(state.rms["w"]).all()
        if preserve_norm:
            own = np.linalg.norm(np.asarray(s, np.float32).astype(np.float64))
            lost = 2 * np.sqrt(s.size) * np.finfo(np.float32).tiny  # a device may flush subnormal numbers to 0
            np.testing.assert_allclose(np.linalg.norm(np.asarray(d["w"], np.float64)), own, rtol=1e-5, atol=lost)


STATE = scale_by_row_adam().init({"w": jnp.zeros((9, 6))})
UPDATES = {form: jax.jit(scale_by_row_adam(preserve_norm=form).update) for form in (False, True)}


def test_norm_is_that_of_each_matrix_of_a_stack() -> None:
    s = jnp.stack([jnp.full((3, 4), 1.0), jnp.full((3, 4), 1e6)]) * jnp.arange(1.0, 5)[None, None, :]
    tx = scale_by_row_adam(preserve_norm=True)
    state = tx.init({"w": jnp.zeros((2, 9, 4))})
    assert state.rms["w"].shape == (2, 4)
    d, _ = tx.update({"w": s}, state)
    for i in range(2):
        np.testing.assert_allclose(jnp.linalg.norm(d["w"][i]), jnp.linalg.norm(s[i]), rtol=1e-5)


def test_vectors_and_scalars_are_taken_entry_by_entry() -> None:
    tx = scale_by_row_adam(eps=0.0)
    params = {"b": jnp.zeros(3), "s": jnp.zeros(())}
    state = tx.init(params)
    d, _ = tx.update({"b": jnp.asarray([2.0, -3.0, 0.0]), "s": jnp.asarray(-5.0)}, state)
    np.testing.assert_allclose(d["b"], [1.0, -1.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(d["s"], -1.0, rtol=1e-6)


def test_axes_come_from_the_spec() -> None:
    spec = SketchSpec(rank=3, refresh=0, targets=(Target("q", (-3,), (-2, -1)),))
    params = {"q": jax.ShapeDtypeStruct((2, 12, 2, 4), jnp.bfloat16)}
    state = scale_by_row_adam(b1=0.5, spec=spec).init(params)
    assert state.rms["q"].shape == (2, 8)
    assert state.momentum["q"].shape == (2, 3, 8)
    assert state.rms["q"].dtype == state.momentum["q"].dtype == jnp.float32
    tx = scale_by_row_adam()
    with pytest.raises(UserError, match="pass spec="):
        tx.update({"q": jnp.zeros((2, 3, 8))}, tx.init(params))


def test_momentum_of_sketches_needs_the_spec() -> None:
    tx = scale_by_row_adam(b1=0.9)
    with pytest.raises(UserError, match="b1 > 0 needs spec="):
        tx.update({"w": jnp.zeros((3, 5))}, tx.init({"w": jnp.zeros((9, 5))}))


def test_momentum_needs_projections_that_last() -> None:
    with pytest.raises(UserError, match=r"b1 does nothing .* refresh=0"):
        scale_by_row_adam(b1=0.9, spec=SketchSpec(rank=3))
    injected = optax.inject_hyperparams(partial(scale_by_row_adam, spec=SketchSpec(rank=3, targets=("w",))))
    injected(b2=0.9).init({"w": jnp.zeros((9, 5))})  # b1 is left out, and becomes an array all the same


def test_unsketched_gradient_is_refused_where_it_shows(toy) -> None:
    spec = toy.spec
    tx = sketch(spec)
    bad = toy.params | {"head": {"kernel": jnp.zeros((5, 8))}}
    with pytest.raises(UserError, match=r"\(5, 8\); expected a gradient \(16, 8\) or a sketch \(4, 8\)"):
        tx.update(bad, tx.init(toy.params), toy.params)
