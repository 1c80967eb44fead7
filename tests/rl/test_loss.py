"""Log-probabilities and policy loss against numpy in float64, and the properties an update relies on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from logra_jax.rl.loss import LossSettings, add_sums, entropy_of, policy_loss, token_logprobs, token_weights

NO_CLIP = {"clip_low": None, "clip_high": None}


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def make_rows(seed=0, b=6, c=5, empty=2):
    """Random float32 rows: mask from lengths (row `empty` has none), log-probabilities near each other."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, c + 1, size=b)
    lengths[empty] = 0
    old = -rng.exponential(size=(b, c))
    rows = {
        "logprobs": old + 0.3 * rng.normal(size=(b, c)),
        "old_logprobs": old,
        "rollout_logprobs": old + 0.5 * rng.normal(size=(b, c)),
        "ref_logprobs": old + 0.5 * rng.normal(size=(b, c)),
        "entropy": rng.exponential(size=(b, c)),
    }
    rows = {k: jnp.asarray(v, jnp.float32) for k, v in rows.items()}
    rows["advantages"] = jnp.asarray(rng.normal(size=b), jnp.float32)
    rows["mask"] = jnp.asarray(np.arange(c)[None] < lengths[:, None])
    rows["ended"] = rows["mask"] & jnp.asarray(np.arange(b) % 2 == 0)[:, None]
    return rows


def counts_of(rows):
    mask = np.asarray(rows["mask"])
    return {
        "longest": mask.shape[1],
        "total_tokens": jnp.asarray(mask.sum(), jnp.float32),
        "total_sequences": jnp.asarray(mask.any(1).sum(), jnp.float32),
    }


def loss_of(rows, counts=None, **options):
    counts, settings = counts_of(rows) if counts is None else counts, LossSettings(**options)
    weights = token_weights(settings.aggregation, jnp.sum(rows["mask"], axis=1), **counts)
    of_row = {"advantages": rows["advantages"][:, None], "weights": weights[:, None]}
    return policy_loss(**rows | of_row, settings=settings)


def numpy_loss(
    rows,
    *,
    aggregation="token",
    ratio="token",
    clip_low=None,
    clip_high=None,
    importance_cap=None,
    reference_kl=0.0,
):
    """The docstring's formula, token by token, in float64."""
    rows = {k: np.asarray(v, np.float64) for k, v in rows.items()}
    b, c = rows["mask"].shape
    total, tokens, filled = 0.0, rows["mask"].sum(), (rows["mask"].sum(1) > 0).sum()
    for i in range(b):
        row, n = 0.0, rows["mask"][i].sum()
        for t in range(c):
            if not rows["mask"][i, t]:
                continue
            logp, old, adv = rows["logprobs"][i, t], rows["old_logprobs"][i, t], rows["advantages"][i]
            mean = np.mean((rows["logprobs"] - rows["old_logprobs"])[i][rows["mask"][i] > 0])
            new_to_old = np.exp(logp - old if ratio == "token" else mean)
            low = 0 if clip_low is None else 1 - clip_low
            high = np.inf if clip_high is None else 1 + clip_high
            value = -min(new_to_old * adv, min(max(new_to_old, low), high) * adv)
            if importance_cap is not None:
                value *= min(np.exp(old - rows["rollout_logprobs"][i, t]), importance_cap)
            gap = rows["ref_logprobs"][i, t] - logp
            row += value + reference_kl * (np.exp(gap) - gap - 1)
        divisor = {"token": tokens, "sequence": max(n, 1) * filled, "constant": c * filled}[aggregation]
        total += row / divisor
    return total


OPTIONS = [
    {},
    {"clip_low": 0.2, "clip_high": 0.28},
    {"clip_high": 0.1},
    {"importance_cap": 2.0},
    {"ratio": "sequence", "reference_kl": 0.3, "clip_low": 0.05, "clip_high": 0.1},
    {"importance_cap": 1.1, "reference_kl": 0.3, "clip_low": 0.1, "clip_high": 0.1},
]
KINDS = [("token", "token"), ("sequence", "sequence"), ("constant", "token")]  # aggregation, ratio


class TestTokenLogprobs:
    def arrays(self, b=3, c=7, d=4, v=11):
        rng = np.random.default_rng(1)
        hidden, head = rng.normal(size=(b, c, d)), rng.normal(size=(d, v)) * 2
        return (
            hidden.astype(np.float32),
            head.astype(np.float32),
            rng.integers(0, v, size=(b, c)).astype(np.int32),
        )

    @pytest.mark.parametrize("chunk", [None, 1, 2, 3, 7, 50])
    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    def test_matches_definition(self, chunk, temperature):
        hidden, head, targets = self.arrays()
        got, entropy = token_logprobs(*map(jnp.asarray, (hidden, head, targets)), temperature, chunk)
        want = log_softmax(hidden.astype(np.float64) @ head.astype(np.float64) / temperature)
        np.testing.assert_allclose(got, np.take_along_axis(want, targets[..., None], -1)[..., 0], atol=2e-5)
        np.testing.assert_allclose(entropy, -(np.exp(want) * want).sum(-1), atol=2e-5)
        assert got.dtype == entropy.dtype == jnp.float32

    @pytest.mark.parametrize("chunk", [1, 3, 7])
    def test_gradient_matches_definition(self, chunk):
        hidden, head, targets = self.arrays()
        weights = np.random.default_rng(2).normal(size=targets.shape).astype(np.float32)

        def loss(hidden, head):
            return jnp.sum(token_logprobs(hidden, head, jnp.asarray(targets), 0.6, chunk)[0] * weights)

        d_hidden, d_head = jax.grad(loss, argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(head))
        hidden, head = hidden.astype(np.float64), head.astype(np.float64)
        prob = np.exp(log_softmax(hidden @ head / 0.6))
        d_logits = (np.eye(head.shape[1])[targets] - prob) * weights[..., None] / 0.6
        np.testing.assert_allclose(d_hidden, d_logits @ head.T, atol=1e-4)
        np.testing.assert_allclose(d_head, np.einsum("bcd,bcv->dv", hidden, d_logits), atol=2e-4)

    @pytest.mark.parametrize("chunk", [3, None])
    def test_chunks_that_nobody_wants_are_zero(self, chunk):
        hidden, head, targets = map(jnp.asarray, self.arrays())
        wanted = jnp.zeros(targets.shape, bool).at[1, 2].set(chunk is not None)  # in the first chunk of three

        def values(hidden, wanted):
            logprobs, entropy = token_logprobs(hidden, head, targets, 0.6, chunk, wanted=wanted)
            return jnp.sum(logprobs + entropy**2), (logprobs, entropy)

        grad = jax.grad(values, has_aux=True)
        (d_hidden, found), (d_whole, whole) = grad(hidden, wanted), grad(hidden, None)
        kept = np.arange(7)[None] < (0 if chunk is None else 3)
        for one, other in zip((*found, d_hidden), (*whole, d_whole), strict=True):
            np.testing.assert_allclose(one, np.where(kept.reshape(1, 7, *(1,) * (one.ndim - 2)), other, 0), atol=1e-6)

    def test_a_chunk_that_nobody_wants_is_not_computed(self):
        """Its logits would be infinite, and their gradient no number."""
        hidden, head, targets = map(jnp.asarray, self.arrays())
        wanted = jnp.arange(7)[None] < jnp.asarray([[3], [0], [2]])

        def total(hidden):
            return jnp.sum(token_logprobs(hidden, head, targets, 1.0, 3, wanted=wanted)[0])

        assert np.isfinite(jax.grad(total)(hidden.at[:, 3:].set(jnp.inf))).all()

    def test_temperature_divides_the_logits(self):
        # One hidden unit of value 1 and a head that holds the logits themselves.
        head = jnp.asarray([[2.0, 1.0, 0.0]])
        got, _ = token_logprobs(jnp.ones((1, 1, 1)), head, jnp.zeros((1, 1), jnp.int32), 0.6)
        assert float(got[0, 0]) == pytest.approx(-0.20257309980325733, abs=1e-6)

    def test_no_array_of_all_tokens_by_vocabulary(self):
        hidden, head, targets = self.arrays(b=2, c=64, d=4, v=1000)
        fn = jax.grad(lambda h: jnp.sum(token_logprobs(h, jnp.asarray(head), jnp.asarray(targets), 1.0, 8)[0]))
        compiled = jax.jit(fn).lower(jnp.asarray(hidden)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * 64 * 1000 * 4 / 2

    def test_entropy_with_minus_infinity(self):
        logits = jnp.asarray([0.0, 0.0, -jnp.inf])
        value, gradient = jax.value_and_grad(entropy_of)(logits)
        assert float(value) == pytest.approx(np.log(2), abs=1e-6)
        np.testing.assert_allclose(gradient, [0.0, 0.0, 0.0], atol=1e-6)

    def test_bad_chunk(self):
        hidden, head, targets = map(jnp.asarray, self.arrays())
        with pytest.raises(ValueError, match="chunk"):
            token_logprobs(hidden, head, targets, 1.0, 0)


class TestPolicyLoss:
    @pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
    @pytest.mark.parametrize("options", OPTIONS)
    def test_matches_definition(self, aggregation, options):
        rows = make_rows()
        loss, _ = loss_of(rows, aggregation=aggregation, **options)
        assert float(loss) == pytest.approx(numpy_loss(rows, aggregation=aggregation, **options), rel=2e-5)

    @pytest.mark.parametrize("options", OPTIONS)
    def test_gradient_is_that_of_the_definition(self, options):
        """Central differences of the float64 formula, in which the importance weight does not move."""
        rows = make_rows(seed=3)
        got = jax.grad(lambda x: loss_of({**rows, "logprobs": x}, **options)[0])(rows["logprobs"])
        base, step = np.asarray(rows["logprobs"], np.float64), 1e-6
        want = np.zeros_like(base)
        for index in np.ndindex(*base.shape):
            sides = []
            for sign in (1, -1):
                moved = base.copy()
                moved[index] += sign * step
                sides.append(numpy_loss({**rows, "logprobs": moved}, **options))
            want[index] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(got, want, atol=1e-5)

    @pytest.mark.parametrize(("aggregation", "ratio"), KINDS)
    @pytest.mark.parametrize("parts", [1, 2, 3, 6])
    def test_parts_add_up(self, aggregation, ratio, parts):
        rows, options = make_rows(), OPTIONS[-1] | {"aggregation": aggregation, "ratio": ratio}
        counts = counts_of(rows)

        def value(x, keep):
            part = {k: v[keep] for k, v in {**rows, "logprobs": x}.items()}
            return loss_of(part, counts, **options)

        grad = jax.value_and_grad(value, has_aux=True)
        (whole, sums), gradient = grad(rows["logprobs"], slice(None))
        pieces = [grad(rows["logprobs"], slice(i, None, parts)) for i in range(parts)]
        assert sum(float(p[0][0]) for p in pieces) == pytest.approx(float(whole), rel=1e-5)
        np.testing.assert_allclose(sum(p[1] for p in pieces), gradient, atol=1e-7)
        total = functools.reduce(add_sums, (p[0][1] for p in pieces))
        np.testing.assert_allclose(total, sums, rtol=1e-5)

    @pytest.mark.parametrize(("aggregation", "ratio"), KINDS)
    def test_padding_changes_nothing(self, aggregation, ratio):
        """More columns and whole empty rows, filled with NaN, leave loss, gradient and sums as they are."""
        rows, options = make_rows(), OPTIONS[-1] | {"aggregation": aggregation, "ratio": ratio}

        def pad(x):
            fill = False if x.dtype == bool else jnp.nan
            return jnp.pad(x, [(1, 2), (0, 3)][: x.ndim], constant_values=fill)

        padded = {k: pad(v) for k, v in rows.items()}
        counts = counts_of(rows)
        grad = jax.value_and_grad(lambda x, rows: loss_of({**rows, "logprobs": x}, counts, **options), has_aux=True)
        (want, want_sums), want_gradient = grad(rows["logprobs"], rows)
        (got, sums), gradient = grad(padded["logprobs"], padded)
        assert float(got) == pytest.approx(float(want), rel=1e-6)
        np.testing.assert_allclose(sums, want_sums, rtol=1e-6)
        b, c = rows["mask"].shape
        np.testing.assert_allclose(gradient[1 : 1 + b, :c], want_gradient, atol=1e-8)
        assert float(jnp.sum(jnp.abs(gradient))) == pytest.approx(float(jnp.sum(jnp.abs(want_gradient))), rel=1e-5)

    @pytest.mark.parametrize("devices", [1, 2, 4])
    def test_sequence_mean_does_not_depend_on_the_mesh(self, devices):
        # 32 rows of different lengths with a loss of 1 per token: the mean of the row means is 1.
        rows = make_rows(b=32, empty=0)
        rows["mask"] = rows["mask"].at[0, 0].set(True)
        rows["old_logprobs"], rows["advantages"] = rows["logprobs"], -jnp.ones(32)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
        rows = jax.device_put(rows, NamedSharding(mesh, P("fsdp")))
        grad = jax.jit(jax.value_and_grad(lambda x: loss_of(rows | {"logprobs": x}, aggregation="sequence")[0]))
        loss, gradient = grad(rows["logprobs"])
        assert float(loss) == pytest.approx(1.0, rel=1e-6)
        lengths = np.asarray(rows["mask"]).sum(1, keepdims=True)
        np.testing.assert_allclose(gradient, np.asarray(rows["mask"]) / lengths / 32, rtol=1e-5)

    @pytest.mark.parametrize(("aggregation", "ratio"), KINDS)
    def test_no_valid_token(self, aggregation, ratio):
        rows = make_rows(b=2, c=2, empty=0)
        rows["mask"] = jnp.zeros((2, 2), bool)
        options = OPTIONS[-1] | {"aggregation": aggregation, "ratio": ratio}
        (loss, sums), gradient = jax.value_and_grad(
            lambda x: loss_of({**rows, "logprobs": x}, **options), has_aux=True
        )(rows["logprobs"])
        assert float(loss) == 0.0
        assert (np.asarray(gradient) == 0.0).all()
        assert all(float(x) == 0.0 for x in sums)

    def test_clipping_cases(self):
        ratio, advantage = np.array([1.5, 1.5, 0.5, 0.5]), np.array([1.0, -1.0, -1.0, 1.0])
        for i, (want, clipped) in enumerate([(-1.2, True), (1.5, False), (0.8, True), (-0.5, False)]):
            rows = {
                "logprobs": jnp.log(jnp.asarray([[ratio[i]]], jnp.float32)),
                "old_logprobs": jnp.zeros((1, 1)),
                "rollout_logprobs": jnp.zeros((1, 1)),
                "ref_logprobs": None,
                "entropy": jnp.zeros((1, 1)),
                "advantages": jnp.asarray([advantage[i]], jnp.float32),
                "mask": jnp.ones((1, 1), bool),
                "ended": jnp.zeros((1, 1), bool),
            }
            loss, sums = loss_of(rows, clip_low=0.2, clip_high=0.2)
            assert float(loss) == pytest.approx(want, rel=1e-6)
            assert float(sums.clipped) == float(clipped)
            gradient = jax.grad(lambda x, rows=rows: loss_of({**rows, "logprobs": x}, clip_low=0.2, clip_high=0.2)[0])(
                rows["logprobs"]
            )
            want_gradient = 0.0 if clipped else -ratio[i] * advantage[i]
            assert float(gradient[0, 0]) == pytest.approx(want_gradient, rel=1e-6)
            _, unclipped = loss_of(rows, **NO_CLIP)
            assert float(unclipped.clipped) == 0.0

    def test_current_policy_as_old_is_the_plain_policy_gradient(self):
        rows = make_rows() | {"old_logprobs": None}
        for options in (NO_CLIP, {"clip_low": 0.0, "clip_high": 0.0}):
            grad = jax.value_and_grad(lambda x, o=options: loss_of({**rows, "logprobs": x}, **o), has_aux=True)
            (_, sums), gradient = grad(rows["logprobs"])
            mask, advantages = np.asarray(rows["mask"]), np.asarray(rows["advantages"])
            np.testing.assert_allclose(gradient, -(mask * advantages[:, None]) / mask.sum(), rtol=1e-5)
            assert float(sums.ratio) == float(sums.tokens) == mask.sum()
            assert float(sums.step_kl) == float(sums.clipped) == 0.0

    @pytest.mark.parametrize(
        ("logp", "ref", "mask", "kl"),
        [
            ([-1.0, -5.0], [-1.0, 100.0], [True, False], 0.0),
            ([-5.0], [100.0], [True], None),
            ([-300.0], [-1.0], [True], None),
        ],
    )
    def test_extreme_reference(self, logp, ref, mask, kl):
        x, ref, mask = jnp.asarray([logp]), jnp.asarray([ref]), jnp.asarray([mask])

        rows = {
            "old_logprobs": x,
            "rollout_logprobs": x,
            "ref_logprobs": ref,
            "entropy": jnp.zeros_like(x),
            "advantages": jnp.zeros(1),
            "mask": mask,
            "ended": mask,
        }

        def loss(x):
            return loss_of({**rows, "logprobs": x}, reference_kl=1.0)

        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(x)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        if kl is not None:
            assert float(sums.reference_kl) == float(value) == kl
            assert (np.asarray(gradient) == 0.0).all()

    @pytest.mark.parametrize("gap", [100.0, -100.0, 1e30])
    def test_extreme_ratio_and_weight_stay_finite(self, gap):
        rows = make_rows()
        rows["old_logprobs"] = rows["logprobs"] - gap
        rows["rollout_logprobs"] = rows["old_logprobs"] + gap / 2
        (loss, sums), gradient = jax.value_and_grad(
            lambda x: loss_of({**rows, "logprobs": x}, **OPTIONS[-1]), has_aux=True
        )(rows["logprobs"])
        assert np.isfinite([loss, *sums]).all()
        assert np.isfinite(gradient).all()

    def test_sums(self):
        rows = make_rows()
        loss, sums = loss_of(rows, clip_low=0.1, clip_high=0.2, importance_cap=1.2)
        host = {k: np.asarray(v, np.float64) for k, v in rows.items()}
        mask, adv = host["mask"] > 0, host["advantages"][:, None]
        ratio = np.exp(host["logprobs"] - host["old_logprobs"])
        weight = np.exp(host["old_logprobs"] - host["rollout_logprobs"])
        gap = host["ref_logprobs"] - host["logprobs"]
        want = {
            "tokens": mask,
            "clipped": ((ratio > 1.2) & (adv > 0)) | ((ratio < 0.9) & (adv < 0)),
            "entropy": host["entropy"],
            "ratio": ratio,
            "step_kl": 1 / ratio + np.log(ratio) - 1,
            "reference_kl": np.exp(gap) - gap - 1,
            "importance": np.minimum(weight, 1.2),
            "capped": weight > 1.2,
            "deviation": np.abs(weight - 1),
            "mismatch": (host["rollout_logprobs"] - host["old_logprobs"]) * host["ended"],
            "ended_tokens": host["ended"],
        }
        assert set(want) | {"loss", "max_deviation"} == set(sums._fields)
        for name, values in want.items():
            assert float(getattr(sums, name)) == pytest.approx((values * mask).sum(), rel=1e-5, abs=1e-6), name
        assert float(sums.loss) == float(loss)
        assert float(sums.max_deviation) == pytest.approx((np.abs(weight - 1) * mask).max(), rel=1e-5)
        assert 0 < float(sums.clipped) < float(sums.tokens)
        assert 0 < float(sums.capped) < float(sums.tokens)

    def test_mistakes_are_named(self):
        rows = make_rows()
        with pytest.raises(ValueError, match="aggregation"):
            loss_of(rows, aggregation="mean")
        with pytest.raises(ValueError, match="ratio"):
            loss_of(rows, ratio="constant")
        with pytest.raises(ValueError, match="ref_logprobs"):
            loss_of(rows | {"ref_logprobs": None}, reference_kl=0.1)
