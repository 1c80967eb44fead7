"""Every number of update_seed7.json (float64, from the formulas alone). Its matrices are ours transposed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import (
    SketchSpec,
    apply_updates,
    cosine_budget,
    lift,
    mismatch_average,
    predict_kl,
    scale_by_predicted_kl,
    scale_by_row_adam,
    scale_by_update_ratio,
    sketch,
    sketched_value_and_grad,
)
from logra_jax.optim import projection, slot


@pytest.fixture
def doc(golden) -> dict:
    return json.loads((golden / "update_seed7.json").read_text())


def array(values) -> jnp.ndarray:
    return jnp.asarray(np.asarray(values).T, jnp.float32)


@pytest.fixture
def given_projection(monkeypatch):
    """Makes every projection the given A `[r, k]`: the file's matrices come from no key."""

    def use(a) -> None:
        unit = jnp.asarray(np.asarray(a) * np.sqrt(len(a)), jnp.float32)

        def drawn(key, r, k, distribution="rademacher", dtype=jnp.float32):
            return jnp.round(unit).astype(dtype)

        monkeypatch.setattr(projection, "signs", drawn)
        monkeypatch.setattr(slot, "signs", drawn)

    return use


def test_update(doc, given_projection) -> None:
    spec = SketchSpec(rank=4, targets=("w",))
    weights = {"w": array(doc["W0"])}
    forms = {"plain": scale_by_row_adam(), "norm_preserving": scale_by_row_adam(preserve_norm=True)}
    states = {name: tx.init(weights) for name, tx in forms.items()}

    def close(got, want):
        return np.testing.assert_allclose(got, np.asarray(want), rtol=0, atol=1e-5 * np.abs(want).max())

    for step in doc["steps"]:
        given_projection(step["A"])
        x, g = array(np.eye(24)), array(step["G"])

        def loss(p, x=x, g=g):
            return jnp.sum((x @ p["w"]) * g)

        by_slot = sketched_value_and_grad(loss, spec)(weights, step=0)[1]
        by_link, _ = sketch(spec).update({"w": array(step["G"])}, sketch(spec).init(weights), weights)
        for s in (by_slot, by_link):
            close(s["w"].T, step["S"])
        directions = {}
        for name, tx in forms.items():
            directions[name], states[name] = tx.update(by_slot, states[name], weights)
            close(directions[name]["w"].T, step[name]["D"])
            close(states[name].v["w"], step[name]["v"])
            assert int(states[name].count) == step["t"]
        d = directions["norm_preserving"]
        gram = projection.gram(jnp.zeros(2, jnp.uint32), 4, 24, "rademacher")
        close(jnp.sum((gram @ d["w"]) * d["w"]), step["lifted_sq_norm"])
        ratio = scale_by_update_ratio(step["update_ratio"]["ratio"], spec)
        scaled, _ = ratio.update(d, ratio.init(weights), weights)
        close(-scaled["w"].T, step["update_ratio"]["D"])
        # The file takes every step from the first weights, and scales it by alpha 0.7.
        close(apply_with(lift(spec), weights, {"w": 0.7 * scaled["w"]})["w"].T, step["W_after_alpha_0p7"])
    zero, _ = forms["norm_preserving"].update({"w": jnp.zeros((4, 7))}, forms["norm_preserving"].init(weights), weights)
    assert bool((zero["w"] == 0).all()) is doc["zero_sketch_gives_zero"]


def apply_with(tx, weights, direction):
    return apply_updates(weights, tx.update(direction, tx.init(weights), weights)[0])


def test_predicted_kl_and_alpha(doc) -> None:
    """Logits that are linear in one dense parameter: its direction 1 gives the file's tangent."""
    file = doc["predicted_kl"]
    logits, tangent = (jnp.asarray(file[name], jnp.float32) for name in ("logits", "tangent"))
    params, direction = {"s": jnp.zeros(())}, {"s": jnp.ones(())}
    for case in file["cases"]:

        def predict(mask, t=case["temperature"]):
            return predict_kl(
                lambda p: logits + p["s"] * tangent,
                params,
                None,
                step=0,
                mask=jnp.asarray(mask),
                temperature=t,
            )

        for i, q in enumerate(case["per_token"]):
            np.testing.assert_allclose(predict(np.eye(5)[i])(direction), q, rtol=2e-5)
        np.testing.assert_allclose(predict(file["mask"])(direction), case["mean"], rtol=2e-5)
        # q is the divergence to second order: the file has the real one of a step of 1e-3.
        for i, actual in enumerate(case["actual_kl_at_1e_3"]):
            small = predict(np.eye(5)[i])({"s": jnp.asarray(1e-3)})
            np.testing.assert_allclose(small, actual, rtol=5e-3)
        for alpha in case["alpha"].values():
            tx = scale_by_predicted_kl(alpha["budget"], alpha["alpha_max"])
            new, state = tx.update(direction, tx.init(params), params, predict_kl=predict(file["mask"]))
            np.testing.assert_allclose(state.alpha, alpha["alpha"], rtol=2e-5)
            np.testing.assert_allclose(new["s"], alpha["alpha"], rtol=2e-5)


def test_budget_schedule(doc) -> None:
    file = doc["budget_schedule"]
    budget = cosine_budget(file["start"], file["end"], file["steps"])
    for update, value in file["values"].items():
        np.testing.assert_allclose(budget(jnp.int32(int(update))), value, rtol=1e-5)


def test_mismatch(doc) -> None:
    m = 0.0
    params = {"s": jnp.ones(())}
    tx = scale_by_predicted_kl(2e-4)
    for entry in doc["mismatch"]["history"]:
        m = mismatch_average(m, entry["observed"], doc["mismatch"]["weight"])
        np.testing.assert_allclose(m, entry["ema"], rtol=1e-5)
        _, state = tx.update(params, tx.init(params), params, predict_kl=lambda _: jnp.float32(1), kl_mismatch=m)
        np.testing.assert_allclose(state.budget, entry["effective_budget_of_2e_4"], rtol=1e-5)
