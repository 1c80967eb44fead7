"""bfloat16 weights: what rounding does to one number, to many, and to updates far below its resolution."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logra_jax import (
    SketchSpec,
    Target,
    UserError,
    apply_updates,
    apply_with_residual,
    guard_nonfinite,
    in_float32,
    init_residual,
    lift,
    rounding_keys,
    sketch,
    update_count,
)
from logra_jax.optim import twin
from logra_jax.optim.rounding import join, round_stochastic, split

BF16 = jnp.bfloat16
LARGEST = float(jnp.finfo(BF16).max)
STACK, K, D = 3, 64, 96
SPEC = SketchSpec(
    rank=4, seed=7, refresh=2, targets=("up",), names={"up": [f"l.{i}.up" for i in range(STACK)], "norm": ["l.norm"]}
)


def wide(x):
    return np.asarray(x).astype(np.float64)


def key(number=0):
    return jax.random.key_data(jax.random.key(number))


def neighbours(x):
    """The bfloat16 numbers around float32 numbers, by masking off the lower half of their bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    toward_zero = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    away = ((bits & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    return toward_zero, away


def expected_words(seed, update, name, count):
    """The lower halves of each block's two words, xored."""
    numbers = np.arange(count, dtype=np.int32)
    weight = twin.fold_in(twin.weight_key(seed, update, name), 1)
    x, y = twin.threefry2x32(weight, np.zeros(count, np.int32), numbers)
    return (x ^ y).view(np.uint32) & np.uint32(0xFFFF)


def test_every_bit_follows_from_seed_update_name_and_element() -> None:
    """Rounded up where the lost bits and the word reach 2^16, in numpy with the twin's generator."""
    w = {"up": jnp.ones((STACK, K, D), BF16), "norm": jnp.ones(D, BF16), "frozen": None}
    step = {"up": jax.random.normal(jax.random.key(1), (STACK, K, D)) * 1e-3, "norm": jnp.full(D, 1e-3), "frozen": None}
    new = apply_updates(w, step, keys=rounding_keys(SPEC, w, 5))
    for name, before, change, after in [
        *((f"l.{i}.up", w["up"][i], step["up"][i], new["up"][i]) for i in range(STACK)),
        ("l.norm", w["norm"], step["norm"], new["norm"]),
    ]:
        total = np.asarray(before).astype(np.float32) + np.asarray(change)
        words = expected_words(7, 5, name, total.size).reshape(total.shape)
        down, up = neighbours(total)
        lost = total.view(np.uint32) & np.uint32(0xFFFF)
        np.testing.assert_array_equal(wide(after), np.where(lost + words >= 1 << 16, up, down))
    assert new["frozen"] is None


def test_expectation_is_exact() -> None:
    """The mean of n draws lies within 5 deviations of x, for magnitudes from subnormal to near the largest."""
    n = 40_000
    values = np.float32([1.001, -0.0337, 3e-3, 255.7, -1e-30, 2.1e37, 0.99999, 1e-39])
    draw = jax.vmap(lambda x, k: round_stochastic(jnp.full(n, x), k))
    found = wide(draw(jnp.asarray(values), jax.vmap(key)(jnp.arange(len(values)))))
    down, up = neighbours(values)
    assert np.all((found == down[:, None]) | (found == up[:, None]))
    share = (values - down) / (up - down)
    deviation = np.sqrt(share * (1 - share) / n)
    assert np.all(np.abs((found == up[:, None]).mean(axis=1) - share) < 5 * deviation)


def test_what_bfloat16_holds_stays() -> None:
    held = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    got = round_stochastic(jnp.asarray(held), key())
    np.testing.assert_array_equal(np.asarray(got).astype(np.float32), held)
    held = held[~((np.abs(held) < 2.0**-126) & (held != 0))]  # a device may flush subnormal results to 0
    high, low = split(jnp.asarray(held))
    np.testing.assert_array_equal(np.asarray(high).astype(np.float32), held)
    assert not np.any(wide(low))


def test_rounding_makes_no_infinity() -> None:
    most = float(jnp.finfo(jnp.float32).max)
    x = jnp.asarray([most, -most, (most + LARGEST) / 2, LARGEST] * 500, jnp.float32)
    want = np.tile([LARGEST, -LARGEST, LARGEST, LARGEST], 500)
    np.testing.assert_array_equal(wide(round_stochastic(x, key())), want)
    high, low = split(x)
    np.testing.assert_array_equal(wide(high), want)
    assert np.all(np.isfinite(wide(low)))


def test_a_pair_holds_sixteen_bits_and_splits_into_itself() -> None:
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=40_000) * 2.0 ** rng.integers(-20, 20, 40_000))
    # Ties of the first rounding, which the second could turn over: odd high numbers and half a step less a bit.
    odd = np.uint32(0x3F810000 + 0x20000 * np.arange(100)) + np.uint32(0x7FFF)
    x = jnp.asarray(np.concatenate([x, odd.view(np.float32), np.float32([0, -0.0])]))
    high, low = jax.jit(split)(x)
    assert np.all(np.abs(wide(high) - wide(x)) <= np.abs(wide(x)) * 2.0**-8)
    assert np.all(np.abs(wide(high) + wide(low) - wide(x)) <= np.abs(wide(x)) * 2.0**-17)
    np.testing.assert_array_equal(wide(join(high, low)), wide(high) + wide(low))
    for got, want in zip(jax.jit(lambda a, b: split(join(a, b)))(high, low), (high, low), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), np.asarray(want).view(np.uint16))


def drift(size, updates=30):
    """Errors, relative to the whole change, of accumulated updates of relative size `size`, and what float64
    sums would be. bfloat16 weights to start from, so that all begin at the same numbers."""
    rng = np.random.default_rng(1)
    start = rng.normal(size=(K, 40 * D)).astype(ml_dtypes.bfloat16)
    spec = SketchSpec(rank=4, targets=("w",))
    changes = np.float32(rng.normal(size=(updates, K, 40 * D)) * size * np.sqrt(np.mean(wide(start) ** 2)))
    exact = wide(start) + changes.sum(axis=0, dtype=np.float64)

    def one(state, change):
        number, nearest, master, random, (high, low) = state
        step = {"w": change}
        nearest = optax.apply_updates(nearest, step)
        random = apply_updates(random, step, keys=rounding_keys(spec, random, number))
        pair = apply_with_residual(high, low, step)
        return (number + 1, nearest, apply_updates(master, step), random, pair), None

    w = {"w": jnp.asarray(start)}
    first = (0, w, {"w": w["w"].astype(jnp.float32)}, w, (w, init_residual(w)))
    with jax.numpy_dtype_promotion("standard"):  # optax adds to a bfloat16 leaf
        (_, nearest, master, random, (high, low)), _ = jax.jit(lambda s: jax.lax.scan(one, s, jnp.asarray(changes)))(
            first
        )
    found = {
        "nearest": wide(nearest["w"]),
        "master": wide(master["w"]),
        "master rounded": wide(master["w"].astype(BF16)),
        "stochastic": wide(random["w"]),
        "high": wide(high["w"]),
        "residual": wide(high["w"]) + wide(low["w"]),
    }
    norm = np.linalg.norm(exact - wide(start))
    along = (exact - wide(start)).ravel() / norm**2
    errors = {name: np.linalg.norm(value - exact) / norm for name, value in found.items()}
    # How much of the change has arrived: 1 if all of it, whatever noise there is beside it.
    arrived = {name: float((value - wide(start)).ravel() @ along) for name, value in found.items()}
    # From a bfloat16 number, a change c is rounded to one of two s apart, and has variance |c| (s - |c|).
    down, up = neighbours(np.float32(start))
    moved = np.abs(changes.astype(np.float64))
    noise = np.sqrt(np.sum(moved * (np.abs(up - down) - moved))) / norm
    return errors, arrived, noise


@pytest.mark.parametrize("size", [1e-5, 1e-4])
def test_small_updates_add_up(size) -> None:
    """To the nearest, nothing arrives. Stochastic rounding brings all of it, beside noise of known size; a pair
    is as good as float32, and the weights in use are then the float32 ones to the nearest."""
    updates, elements = 30, K * 40 * D
    errors, arrived, noise = drift(size, updates)
    assert errors["nearest"] > 0.95
    assert arrived["nearest"] < 0.1
    assert errors["stochastic"] == pytest.approx(noise, rel=0.03)
    # The part of the noise along the change, one of `elements` directions.
    assert abs(arrived["stochastic"] - 1) < 5 * noise / np.sqrt(elements)
    # Each time, a pair is off by at most 2^-17 of its weight, at random.
    assert errors["residual"] < 2.0**-17 / size
    assert abs(arrived["residual"] - 1) < 1e-3
    assert errors["high"] == pytest.approx(errors["master rounded"], rel=1e-3)


def test_a_hundred_steps_of_six_ten_thousandths() -> None:
    """The weight 1.0 less 6e-4 a hundred times is 0.94, to one step of bfloat16 there (2^-8): the mean of the
    randomly rounded ones, the pair, and its upper half; to the nearest it is still 1.0."""
    w = {"w": jnp.ones((K, D), BF16)}
    step = {"w": jnp.full((K, D), -6e-4)}
    spec = SketchSpec(rank=4, targets=("w",))
    round_once = jax.jit(lambda w, i: apply_updates(w, step, keys=rounding_keys(spec, w, i)))
    add = jax.jit(apply_with_residual)
    random, pair = w, (w, init_residual(w))
    for i in range(100):
        random, pair = round_once(random, i), add(*pair, step)
    assert random["w"].dtype == pair[0]["w"].dtype == pair[1]["w"].dtype == BF16
    # Variance of a step: 6e-4 (2^-8 - 6e-4) at most, so 0.014 after 100, and 80 times less in the mean of 6144.
    assert abs(wide(random["w"]).mean() - 0.94) < 5 * 0.014 / np.sqrt(K * D)
    np.testing.assert_allclose(wide(pair[0]["w"]), 0.94, atol=0.004)
    np.testing.assert_allclose(wide(pair[0]["w"]) + wide(pair[1]["w"]), 0.94, atol=100 * 2.0**-17)
    with jax.numpy_dtype_promotion("standard"):
        assert np.all(wide(optax.apply_updates(w, step)["w"]) == 1.0)


def low_rank(w, number=0):
    """Updates of two kinds: a factor of small integers for the stack, a vector of them for the norm."""
    rng = np.random.default_rng(number)
    factor = jnp.asarray(rng.integers(-3, 4, (STACK, 4, D)) * 2.0**-12, jnp.float32)
    tx = lift(SPEC)
    direction = {"up": factor, "norm": jnp.asarray(rng.integers(-9, 10, D) * 2.0**-14, jnp.float32)}
    return tx.update(direction, tx.init(w)._replace(count=jnp.int32(number)), w)[0]


@pytest.fixture
def weights():
    rng = np.random.default_rng(3)
    return {
        "up": jnp.asarray(rng.normal(size=(STACK, K, D)), BF16),
        "norm": jnp.asarray(rng.normal(size=D), BF16),
    }


def test_low_rank_updates_are_rounded_like_full_ones(weights) -> None:
    full = {"up": apply_updates({"up": jnp.zeros((STACK, K, D))}, {"up": low_rank(weights)["up"]})["up"]}
    full["norm"] = low_rank(weights)["norm"]
    keys = rounding_keys(SPEC, weights, 0)
    residual = init_residual(weights)
    for one, other in (
        (apply_updates(weights, low_rank(weights), keys=keys), apply_updates(weights, full, keys=keys)),
        (apply_with_residual(weights, residual, low_rank(weights)), apply_with_residual(weights, residual, full)),
    ):
        jax.tree.map(np.testing.assert_array_equal, one, other)
        assert not np.array_equal(jax.tree.leaves(one)[-1], weights["up"])


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (2, 4)])
def test_the_result_does_not_depend_on_the_mesh(weights, fsdp, tensor) -> None:
    """Sums of small integers are exact in any order, so what is compared is the rounding alone, bit by bit."""
    mesh = Mesh(np.array(jax.devices()).reshape(fsdp, tensor), ("fsdp", "tensor"))
    places = {
        "up": NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor")),
        "norm": NamedSharding(mesh, PartitionSpec("fsdp")),
    }

    def random(w):
        return apply_updates(w, low_rank(w, 3), keys=rounding_keys(SPEC, w, 3))

    def pair(w):
        return apply_with_residual(*apply_with_residual(w, init_residual(w), low_rank(w, 3)), low_rank(w, 4))

    spread = jax.device_put(weights, places)
    for function in (random, pair):
        got = jax.jit(function)(spread)
        jax.tree.map(np.testing.assert_array_equal, got, jax.jit(function)(weights))
        text = jax.jit(function).lower(spread).compile().as_text()
        assert not any(op in text for op in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.parametrize("mode", ["stochastic", "residual"])
@pytest.mark.parametrize("kind", ["low rank", "full"])
def test_weights_are_written_in_place(mode, kind) -> None:
    """The donated buffers are those of the result; beside them are a few matrices, no second copy of the stack.

    But for one in the stochastic mode on CPUs, which have no bfloat16 arithmetic, for XLA copies what it has
    to convert to write to; compiled for a GPU there is none.
    """
    layers, k, d = 32, 64, 128
    spec = SketchSpec(rank=4, targets=("w",))
    w = {"w": jnp.zeros((layers, k, d), BF16)}
    tx = lift(spec)
    updates, _ = tx.update({"w": jnp.ones((layers, 4, d))}, tx.init(w), w)
    updates = updates if kind == "low rank" else {"w": jnp.ones((layers, k, d))}

    def random(state, updates):
        return (apply_updates(state[0], updates, keys=rounding_keys(spec, state[0], 3)),)

    def pair(state, updates):
        return apply_with_residual(*state, updates)

    step, state = (random, (w,)) if mode == "stochastic" else (pair, (w, init_residual(w)))
    memory = jax.jit(step, donate_argnums=0).lower(state, updates).compile().memory_analysis()
    assert memory.alias_size_in_bytes == len(state) * 2 * layers * k * d
    copies = 1 if mode == "stochastic" and jax.default_backend() == "cpu" else 0
    assert memory.temp_size_in_bytes < 2 * layers * k * d * (copies + 0.25)


def test_keys_count_every_update_and_differ_between_weights(weights) -> None:
    keys = [rounding_keys(SPEC, weights, i) for i in range(4)]  # SPEC redraws its projections every second time
    data = np.concatenate([np.concatenate([k["up"], k["norm"][None]]) for k in keys])
    assert len(np.unique(data, axis=0)) == len(data) == 4 * (STACK + 1)
    assert rounding_keys(SPEC, {"up": weights["up"].astype(jnp.float32), "norm": None}, 0) == {"up": None, "norm": None}


def test_weights_stacked_along_a_later_axis() -> None:
    """Matrices stacked in the middle, `[k, stack, d]`: every sum goes to a neighbour, by both kinds of update."""
    w = {"w": jnp.ones((12, 2, 8), BF16)}
    spec = SketchSpec(rank=1, targets=(Target("w", in_axes=(-3,)),))
    tx = lift(spec)
    low = tx.update({"w": jnp.full((2, 1, 8), 1e-3)}, tx.init(w), w)[0]
    for update in (low, {"w": jnp.full((12, 2, 8), 1e-3)}):
        new = wide(apply_updates(w, update, keys=rounding_keys(spec, w, 0))["w"])
        exact = wide(apply_updates({"w": jnp.ones((12, 2, 8))}, update)["w"])
        down, up = neighbours(exact)
        assert np.all((new == down) | (new == up))
        assert 0 < np.mean(new != 1.0) < 0.5


def test_plain_rounding_is_refused(weights) -> None:
    with pytest.raises(UserError, match=r"norm is bfloat16.*loses small updates.*rounding_keys.*apply_with_residual"):
        apply_updates(weights, low_rank(weights))


def test_optimizers_keep_their_state_in_float32(weights) -> None:
    """adamw behind `in_float32` moves bfloat16 weights' gradients as it moves those of float32 weights."""
    with jax.numpy_dtype_promotion("standard"):
        tx = in_float32(optax.adamw(1e-3, weight_decay=0.1))
        state = tx.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights))
        same = jax.tree.map(lambda x: x.astype(jnp.float32), weights)
        want = optax.adamw(1e-3, weight_decay=0.1).update(same, optax.adamw(1e-3).init(same), same)[0]
        got, state = tx.update(weights, state, weights)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert {x.dtype for x in jax.tree.leaves((got, state))} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def test_updates_are_counted_where_they_were_usable() -> None:
    w = {"w": jnp.ones((8, 4))}
    tx = guard_nonfinite(sketch(SketchSpec(rank=2, targets=("w",))))
    state = tx.init(w)
    for value in (1.0, jnp.nan, 1.0):
        _, state = tx.update({"w": jnp.full((8, 4), value)}, state, w)
    assert int(update_count(state)) == 2
    with pytest.raises(UserError, match=r"update_count.*guard_nonfinite"):
        update_count(())
