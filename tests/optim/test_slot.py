"""The sketch as a derivative: A times the dense gradient, under every transformation that models use."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax import SketchSpec, Slot, Target, UserError, sketched_value_and_grad, with_slots
from logra_jax.optim import slot as slot_module
from logra_jax.optim import twin


def close(got, want, rtol=1e-5) -> None:
    """Within rtol of the largest entry."""
    np.testing.assert_allclose(got, want, rtol=0, atol=rtol * np.abs(want).max())


def expected_sketches(toy, project, params, x, y, update=0):
    """A G in float64 from jax's dense gradient and the twin's projections."""
    dense = jax.tree.map(lambda g: np.asarray(g, np.float64), jax.grad(toy.loss)(params, x, y))
    a = [project(toy.spec, f"model.layers.{i}.up.weight", 16, update) for i in range(3)]
    up = np.stack([a[i] @ dense["layers"]["up"]["kernel"][i] for i in range(3)])
    head = project(toy.spec, "lm_head.weight", 16, update) @ dense["head"]["kernel"]
    return {"head": {"kernel": head}, "layers": {"up": {"bias": dense["layers"]["up"]["bias"], "kernel": up}}}


@pytest.mark.parametrize("materialize", [None, False, True])
@pytest.mark.parametrize("update", [0, 3])
def test_sketch_is_projection_times_gradient(toy, project, materialize, update) -> None:
    """Scan over stacked slots and rematerialisation included: the toy model uses both."""
    take = jax.jit(
        lambda p, step: sketched_value_and_grad(toy.loss, toy.spec, materialize=materialize)(p, toy.x, toy.y, step=step)
    )
    value, grads = take(toy.params, jnp.int32(update))
    np.testing.assert_allclose(value, toy.loss(toy.params, toy.x, toy.y), rtol=1e-6)
    want = expected_sketches(toy, project, toy.params, toy.x, toy.y, update)
    jax.tree.map(close, grads, want)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


def test_four_micro_batches_add_up_to_one(toy, project) -> None:
    take = sketched_value_and_grad(toy.loss, toy.spec)

    def body(total, batch):
        return jax.tree.map(jnp.add, total, take(toy.params, *batch, step=0)[1]), None

    zero = {
        "head": {"kernel": jnp.zeros((4, 8))},
        "layers": {"up": {"bias": jnp.zeros((3, 16)), "kernel": jnp.zeros((3, 4, 16))}},
    }
    parts = (toy.x.reshape(4, 8, 16), toy.y.reshape(4, 8))
    total, _ = jax.jit(lambda: jax.lax.scan(body, zero, parts))()
    want = expected_sketches(toy, project, toy.params, toy.x, toy.y)
    jax.tree.map(lambda got, w: close(got / 4, w), total, want)


def test_sums_in_place_hold_no_second_stack() -> None:
    """What two micro-batches add to refs is the sum of their sketches, in the memory of one stack of sketches."""
    layers, k, r = 128, 32, 24
    spec = SketchSpec(rank=r, seed=1, targets=("w",))
    params = {"w": jax.random.normal(jax.random.key(0), (layers, k, k)) / 6}
    x = jax.random.normal(jax.random.key(1), (2, 1, k))

    def loss(p, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0])

    take = sketched_value_and_grad(loss, spec, materialize=False)
    shape = (layers, r, k)

    @jax.jit
    def total(params, x):
        into = {"w": jax.new_ref(jnp.zeros(shape))}

        def body(sums, rows):
            value, nothing = take(params, rows, step=0, into=into)
            assert nothing is None
            return sums + value, None

        return jax.lax.scan(body, jnp.zeros(()), x)[0], jax.tree.map(jax.freeze, into)

    compiled = total.lower(params, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < math.prod(shape) * 4 / 2
    value, sketches = compiled(params, x)
    parts = [take(params, rows, step=0) for rows in x]
    np.testing.assert_allclose(value, parts[0][0] + parts[1][0], rtol=1e-5)
    np.testing.assert_allclose(sketches["w"], parts[0][1]["w"] + parts[1][1]["w"], rtol=1e-4, atol=1e-6)


def test_has_aux_and_extra_arguments(toy) -> None:
    def with_aux(p, x, y):
        return (toy.loss(p, x, y), {"n": x.shape[0]})

    (value, aux), grads = sketched_value_and_grad(with_aux, toy.spec, has_aux=True)(toy.params, toy.x, toy.y, step=0)
    plain = sketched_value_and_grad(toy.loss, toy.spec)(toy.params, toy.x, toy.y, step=0)
    assert aux == {"n": 32}
    jax.tree.map(np.testing.assert_array_equal, (value, grads), plain)


def leaf_slot(k=12, d=6, r=3, seed=0, dtype=jnp.float32):
    spec = SketchSpec(rank=r, seed=seed, targets=("w",))
    w = jax.random.normal(jax.random.key(seed), (k, d)).astype(dtype)
    a = twin.signs(seed, 0, "w", r, k) / np.sqrt(r)
    return with_slots({"w": w}, spec, 0)["w"], w, a


@settings(max_examples=6, deadline=None)
@given(
    lead=st.sampled_from([(), (3,), (2, 1, 3)]),
    k=st.sampled_from([2, 33, 64]),
    d=st.sampled_from([1, 5]),
    seed=st.integers(0, 99),
)
def test_forward_and_reverse_rules(lead, k, d, seed) -> None:
    """y_dot = x_dot W + (x A^T) U_dot, and its transpose, for any number of token axes."""
    r = min(4, k - 1)
    s, w, a = leaf_slot(k, d, r, seed)
    rng = np.random.default_rng(seed)
    x, x_dot = (jnp.asarray(rng.normal(size=(*lead, k)), jnp.float32) for _ in range(2))
    u_dot = jnp.asarray(rng.normal(size=(r, d)), jnp.float32)

    def f(x, u):
        return x @ Slot(s.kernel, s.key_data, u, "rademacher", (-2,), (-1,))

    y, y_dot = jax.jvp(f, (x, s.u), (x_dot, u_dot))
    np.testing.assert_array_equal(y, x @ w)
    wide = partial(np.asarray, dtype=np.float64)
    close(y_dot, wide(x_dot) @ wide(w) + wide(x) @ a.T @ wide(u_dot), 1e-5)
    ct = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    x_bar, u_bar = jax.vjp(f, x, s.u)[1](ct)
    close(x_bar, wide(ct) @ wide(w).T, 1e-5)
    gradient = wide(x).reshape(-1, k).T @ wide(ct).reshape(-1, d)
    assert u_bar.dtype == jnp.float32
    np.testing.assert_allclose(u_bar, a @ gradient, rtol=0, atol=1e-5 * max(1, np.abs(gradient).sum(0).max()))


def test_gaussian_projection(toy) -> None:
    spec = SketchSpec(rank=4, distribution="gaussian", targets=("head",))
    params = {"head": toy.params["head"], "x": toy.x}

    def loss(p):
        return jnp.sum(jnp.square(p["x"] @ p["head"]["kernel"]))

    got = sketched_value_and_grad(loss, spec)(params, step=2)[1]["head"]["kernel"]
    key = jax.random.wrap_key_data(jnp.asarray(twin.weight_key(42, 2, "head/kernel"), jnp.uint32), impl="threefry2x32")
    a = np.asarray(jax.random.normal(key, (4, 16), jnp.float32), np.float64) / 2
    close(got, a @ np.asarray(jax.grad(loss)(params)["head"]["kernel"], np.float64))


def test_vmap_over_a_stack() -> None:
    spec = SketchSpec(rank=3, targets=("w",))
    w = jax.random.normal(jax.random.key(0), (5, 12, 6))
    x = jax.random.normal(jax.random.key(1), (5, 7, 12))

    def loss(p):
        return jnp.sum(jnp.sin(jax.vmap(lambda x, w: x @ w)(x, p["w"])))

    take = jax.jit(lambda p: sketched_value_and_grad(loss, spec, materialize=False)(p, step=1)[1])
    got = take({"w": w})["w"]
    dense = np.asarray(jax.grad(loss)({"w": w})["w"], np.float64)
    a = [twin.signs(42, 1, f"w/{i}", 3, 12) / np.sqrt(3) for i in range(5)]
    close(got, np.stack([a[i] @ dense[i] for i in range(5)]))


def test_bfloat16_inputs_with_float32_weights() -> None:
    s, w, a = leaf_slot(64, 16, 8)
    x = jax.random.normal(jax.random.key(3), (128, 64)).astype(jnp.bfloat16)
    ct = jax.random.normal(jax.random.key(4), (128, 16)).astype(jnp.bfloat16)

    def f(u):
        own = Slot(s.kernel, s.key_data, u, "rademacher", (-2,), (-1,))
        return x @ own.astype(x.dtype)

    y, back = jax.vjp(f, s.u)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, x @ w.astype(jnp.bfloat16))
    (got,) = back(ct)
    assert got.dtype == jnp.float32
    exact = a @ (np.asarray(x, np.float64).T @ np.asarray(ct, np.float64))
    # Only x A^T is rounded to bfloat16 (2^-9 relative, at random over 128 tokens); the sum itself is float32.
    close(got, exact, 2**-9)


def test_what_is_kept_of_the_inputs(toy) -> None:
    """On the slot path the weight leaves r numbers per token behind, and no [k, d] product is formed."""
    k, d, r, tokens = 40, 24, 3, 50
    spec = SketchSpec(rank=r, targets=("w",))
    w = jnp.ones((k, d)) * 0.1
    x = jax.random.normal(jax.random.key(0), (tokens, k))

    def loss(p):
        return jnp.sum(jnp.square(x @ p["w"]))

    def products(materialize) -> str:
        """Products of the program; one of the kernel's shape would be the weight gradient."""

        def take(p):
            return sketched_value_and_grad(loss, spec, materialize=materialize)(p, step=0)

        text = jax.jit(take).lower({"w": w}).as_text()
        return [line for line in text.splitlines() if "dot_general" in line]

    full = (f"-> tensor<{k}x{d}xf32>", f"-> tensor<{d}x{k}xf32>")
    for materialize in (False, None):
        assert len(products(materialize)) == 3  # x W, x A^T, (x A^T)^T times the cotangent
        assert not any(shape in line for line in products(materialize) for shape in full)
    assert any(shape in line for line in products(True) for shape in full)
    kept = jax.vjp(lambda u: loss({"w": Slot(w, leaf_key(spec), u, "rademacher", (-2,), (-1,))}), zeros(r, d))[1]
    sizes = [np.shape(leaf) for leaf in jax.tree.leaves(kept)]
    assert (tokens, r) in sizes
    assert (tokens, k) not in sizes
    assert (k, d) not in sizes


def zeros(*shape):
    return jnp.zeros(shape, jnp.float32)


def leaf_key(spec):
    return with_slots({"w": jnp.zeros((40, 24))}, spec, 0)["w"].key_data


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: jnp.dot(x, w),
        lambda x, w: jnp.einsum("tk,kd->td", x, w),
        lambda x, w: jax.lax.dot(x, w),
        lambda x, w: (w.T @ x.T).T,
        lambda x, w: x @ w + jnp.sum(jnp.square(w)),
        lambda x, w: x @ w * sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(w)),
        lambda x, w: x @ (w * 2.0),
        lambda x, w: x @ w + w[:4].sum(),
    ],
    ids=["dot", "einsum", "lax", "transposed", "penalty", "tree-leaves", "scaled", "indexed"],
)
def test_strangers_losses_get_the_right_sketch(use) -> None:
    """Whatever a loss does with a kernel, its sketch is A times the dense gradient."""
    spec = SketchSpec(rank=3, targets=("w",))
    params = {"w": jax.random.normal(jax.random.key(0), (12, 6)) * 0.3}
    x = jax.random.normal(jax.random.key(1), (5, 12))

    def loss(p):
        return jnp.sum(jnp.sin(use(x, p["w"])))

    value, grads = jax.jit(lambda p: sketched_value_and_grad(loss, spec)(p, step=0))(params)
    a = twin.signs(42, 0, "w", 3, 12) / np.sqrt(3)
    dense = np.asarray(jax.grad(loss)(params)["w"], np.float64)
    np.testing.assert_allclose(value, loss(params), rtol=2e-5)
    close(grads["w"], a @ dense, 2e-5)


def test_numpy_inputs() -> None:
    s, w, _ = leaf_slot()
    x = np.ones((2, 12), np.float32)
    np.testing.assert_array_equal(x @ s, jnp.asarray(x) @ w)


def test_flax_linen_and_nnx_modules() -> None:
    """Modules that were not written for slots fall back to W + A^T U, with the same numbers."""
    x = jax.random.normal(jax.random.key(1), (5, 12))
    spec = SketchSpec(rank=3, targets=("kernel",))

    def a(name):
        return twin.signs(42, 0, name, 3, 12) / np.sqrt(3)

    linen = nn.Dense(6)
    params = linen.init(jax.random.key(0), x)

    def loss(p):
        return jnp.sum(jnp.sin(linen.apply(p, x)))

    grads = sketched_value_and_grad(loss, spec)(params, step=0)[1]
    dense = np.asarray(jax.grad(loss)(params)["params"]["kernel"], np.float64)
    close(grads["params"]["kernel"], a("params/kernel") @ dense, 2e-5)

    graph, state = nnx.split(nnx.Linear(12, 6, rngs=nnx.Rngs(0)))
    pure = nnx.to_pure_dict(state)

    def nnx_loss(p):
        return jnp.sum(jnp.sin(nnx.merge(graph, p)(x)))

    grads = sketched_value_and_grad(nnx_loss, spec)(pure, step=0)[1]
    dense = np.asarray(jax.grad(nnx_loss)(pure)["kernel"], np.float64)
    close(grads["kernel"], a("kernel") @ dense, 2e-5)


def test_attention_kernel_with_its_axes() -> None:
    """[d, heads, head_dim] kernels are used in einsum: the fallback takes them, in the spelled-out layout."""
    spec = SketchSpec(rank=3, targets=(Target("q", in_axes=(-3,), out_axes=(-2, -1)),))
    params = {"q": jax.random.normal(jax.random.key(0), (12, 2, 4))}
    x = jax.random.normal(jax.random.key(1), (5, 12))

    def loss(p):
        return jnp.sum(jnp.sin(jnp.einsum("td,dhk->thk", x, p["q"])))

    got = sketched_value_and_grad(loss, spec)(params, step=0)[1]["q"]
    dense = np.asarray(jax.grad(loss)(params)["q"], np.float64).reshape(12, 8)
    close(got, twin.signs(42, 0, "q", 3, 12) / np.sqrt(3) @ dense)
    with pytest.raises(TypeError, match="axes"):
        x @ with_slots(params, spec, 0)["q"]


def test_target_that_is_also_trained_densely_is_refused() -> None:
    s, _, _ = leaf_slot()
    x = jnp.ones((2, 12))
    with pytest.raises(UserError, match="one way only"):
        jax.grad(lambda w: jnp.sum(x @ Slot(w, s.key_data, s.u, "rademacher", (-2,), (-1,))), allow_int=True)(s.kernel)


def test_a_loss_with_a_bug_shows_its_own_error(toy) -> None:
    with pytest.raises(TypeError, match="sorry"):
        sketched_value_and_grad(lambda p: raise_(TypeError("sorry")), toy.spec)(toy.params, step=0)
    with pytest.raises(ZeroDivisionError):
        sketched_value_and_grad(lambda p: raise_(ZeroDivisionError()), toy.spec)(toy.params, step=0)


def raise_(error):
    raise error


def test_slot_answers_like_a_kernel() -> None:
    s, _w, _ = leaf_slot()
    assert (s.shape, s.dtype, s.ndim) == ((12, 6), jnp.float32, 2)
    cast = s.astype(jnp.bfloat16)
    assert (cast.dtype, cast.u.dtype) == (jnp.bfloat16, jnp.float32)
    assert not hasattr(s, "__jax_array__")
    stack = with_slots({"w": jnp.zeros((2, 12, 6))}, SketchSpec(rank=3, targets=("w",)), 0)["w"]
    with pytest.raises(TypeError, match="one matrix of the stack"):
        jnp.ones((4, 12)) @ stack
    first = jax.tree.map(lambda leaf: leaf[0], stack)
    assert (jnp.ones((4, 12)) @ first).shape == (4, 6)
    with pytest.raises(TypeError):
        jnp.asarray(s)


@pytest.mark.parametrize("spread", [("x", None), (None, "x"), ("x", "y")])
def test_sharded_weights_and_tokens(spread) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def put(value, *axes):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    spec = SketchSpec(rank=3, targets=("w",))
    w = jax.random.normal(jax.random.key(0), (3, 32, 8))
    x = jax.random.normal(jax.random.key(1), (4, 6, 32))

    def loss(p, x):
        h, _ = jax.lax.scan(lambda h, w: (h + (x @ w).sum(-1, keepdims=True), None), x, p["w"])
        return jnp.sum(jnp.sin(h))

    take = jax.jit(lambda p, x: sketched_value_and_grad(loss, spec)(p, x, step=0)[1]["w"])
    close(take({"w": put(w, None, *spread)}, put(x, ("x", "y"))), take({"w": w}, x))


def test_probe_tells_who_may_have_slots(toy) -> None:
    matrices = toy.spec.matrices(toy.params)

    def asked(fn):
        return slot_module.takes_slots(fn, toy.params, matrices, toy.spec, 0)

    assert asked(lambda p: toy.loss(p, toy.x, toy.y))
    assert asked(jax.jit(lambda p: toy.logits(p, toy.x)))
    assert not asked(lambda p: toy.loss(p, toy.x, toy.y) + jnp.sum(p["head"]["kernel"].kernel))
    assert not asked(lambda p: jnp.dot(toy.x, p["head"]["kernel"]))
