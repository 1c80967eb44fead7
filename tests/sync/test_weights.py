"""Updates in place, on a plain torch module whose loader fuses and cuts as vLLM's does."""

import ml_dtypes
import numpy as np
import pytest

from logra_jax.errors import UserError
from logra_jax.optim import twin
from logra_jax.sync.blob import Update, decode, encode
from logra_jax.sync.client import uncovered

torch = pytest.importorskip("torch")
Weights = pytest.importorskip("logra_jax.sync.weights").Weights

K, Q, KV, RANKS, SEED, DRAWN = 40, 8, 2, 2, 7, 5
SHAPES = {f"model.{n}_proj.weight": s for n, s in {"q": (Q, K), "k": (KV, K), "down": (6, K)}.items()}
SHAPES["model.norm.weight"] = (6,)


class Served(torch.nn.Module):
    """q and k fused, and cut by rows: k is on all ranks, as few KV heads are. down is cut by columns."""

    def __init__(self, rank: int, file: dict, dtype=torch.float32) -> None:
        super().__init__()
        self.rank = rank
        self.qk = torch.nn.Parameter(torch.zeros(Q // RANKS + KV, K, dtype=dtype), requires_grad=False)
        self.down = torch.nn.Parameter(torch.zeros(6, K // RANKS, dtype=dtype), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(6, dtype=dtype), requires_grad=False)
        self.load_weights([(name, torch.tensor(value)) for name, value in file.items()])

    def load_weights(self, weights) -> None:
        half = Q // RANKS
        for name, value in weights:
            if "q_proj" in name:
                self.qk.data.narrow(0, 0, half).copy_(value.narrow(0, self.rank * half, half))
            elif "k_proj" in name:
                self.qk.data[half:] = value
            elif "down" in name:
                width = K // RANKS
                self.down.data.copy_(value.narrow(1, self.rank * width, width))
            elif name == "model.norm.weight":
                self.norm.data.copy_(value)
            elif name == "model.scaled.weight":
                self.down.data.copy_((value * 2).narrow(1, 0, K // RANKS))

    def read(self) -> dict[str, np.ndarray]:
        return {name: value.float().numpy().copy() for name, value in self.named_parameters()}


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def update(number: int = 0, size: float = 0.1, decay: float = 0.01, r: int = 3) -> Update:
    rng = np.random.default_rng(100 + number)
    targets = [name for name in SHAPES if "proj" in name]
    factors = {n: (rng.normal(size=(r, SHAPES[n][0])) * size).astype(ml_dtypes.bfloat16) for n in targets}
    dense = {"model.norm.weight": rng.normal(size=6).astype(np.float32)}
    return Update(number, number + 1, SEED, DRAWN, decay, factors, dense)


def expected(file: dict, change: Update) -> dict[str, np.ndarray]:
    """The formula in float64."""
    new = {}
    for name, value in file.items():
        if name in change.dense:
            new[name] = change.dense[name].astype(np.float64)
            continue
        d = change.factors[name].astype(np.float64)
        a = twin.signs(SEED, DRAWN, name, len(d), value.shape[1]) / np.sqrt(len(d))
        new[name] = (1 - change.decay) * value.astype(np.float64) + d.T @ a
    return new


def on_rank(file: dict, rank: int) -> dict[str, np.ndarray]:
    half, width = Q // RANKS, K // RANKS
    q, k, down, norm = (file[name] for name in SHAPES)
    rows, columns = slice(rank * half, (rank + 1) * half), slice(rank * width, (rank + 1) * width)
    return {"qk": np.concatenate([q[rows], k]), "down": down[:, columns], "norm": norm}


def sent(change: Update) -> tuple[Update, str]:
    return decode(encode(change))


@pytest.mark.parametrize("rank", range(RANKS))
def test_updates_reach_fused_and_cut_weights(rank: int) -> None:
    file = start()
    model = Served(rank, file)
    weights = Weights(model, SHAPES)
    for number in range(3):
        change = update(number)
        assert weights.apply(*sent(change))
        file = expected(file, change)
    assert weights.version == 3
    for name, value in on_rank(file, rank).items():
        np.testing.assert_allclose(model.read()[name], value, rtol=0, atol=2e-6)


def test_planning_changes_nothing_and_finds_every_element() -> None:
    models = [Served(rank, start()) for rank in range(RANKS)]
    before = [model.read() for model in models]
    parts = [Weights(model, SHAPES).parts() for model in models]
    for model, old in zip(models, before, strict=True):
        for name, value in model.read().items():
            np.testing.assert_array_equal(value, old[name])
    for name, shape in SHAPES.items():
        assert uncovered(shape, [part for found in parts for part in found[name]]) == ""
    assert parts[1]["model.q_proj.weight"] == [((4, 8), (0, 40))]
    assert parts[1]["model.down_proj.weight"] == [((0, 6), (20, 40))]
    only = parts[0]["model.down_proj.weight"]
    assert "hold 120 of 240 elements" in uncovered((6, K), only)
    assert "overlap" in uncovered((6, K), [*only, ((0, 6), (19, 40))])


def test_small_updates_of_bfloat16_weights_add_up_in_the_residual() -> None:
    file = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    kept, lost = (Served(0, file, torch.bfloat16) for _ in range(2))
    weights = Weights(kept, SHAPES), Weights(lost, SHAPES, residual=False)
    for number in range(40):
        change = update(number, size=1e-4, decay=0.0)
        for one in weights:
            one.apply(*sent(change))
        file = expected(file, change)
    true = on_rank(file, 0)["down"]
    step = 2.0**-8  # of bfloat16 below 1; above, twice that
    assert np.abs(true - 1).max() > 2 * 1e-4
    residual = weights[0].blocks["model.down_proj.weight"][0].residual.float().numpy()
    np.testing.assert_allclose(kept.read()["down"] + residual, true, rtol=0, atol=40 * step * 2.0**-9)
    assert np.all(lost.read()["down"] == 1)


def test_the_same_blob_again_changes_nothing() -> None:
    model = Served(0, start())
    weights = Weights(model, SHAPES)
    change = sent(update())
    assert weights.apply(*change)
    after = model.read()
    assert not weights.apply(*change)
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, after[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (update(1), "at version 0, the update goes from 1 to 2"),
        (Update(0, 1, SEED, 0, factors={"model.q_proj.weight": np.ones((2, 3), np.float32)}), "does not fit"),
        (Update(0, 1, SEED, 0, dense={"model.norm.weight": np.ones(5, np.float32)}), "does not fit"),
        (Update(0, 1, SEED, 0, dense={"model.other.weight": np.ones(5, np.float32)}), "not announced"),
    ],
)
def test_unfit_updates_are_refused_before_any_weight_changes(change: Update, message: str) -> None:
    model = Served(0, start())
    weights, before = Weights(model, SHAPES), model.read()
    with pytest.raises(UserError, match=message):
        weights.apply(*sent(change))
    assert (weights.version, weights.broken) == (0, "")
    for name, value in model.read().items():
        np.testing.assert_array_equal(value, before[name])


def test_after_a_failure_half_way_the_weights_are_of_no_version() -> None:
    weights = Weights(Served(0, start()), SHAPES)
    change, digest = sent(update())
    cut = Update(**{**vars(change), "dense": {"model.norm.weight": "neither array nor number"}})
    weights.check = lambda update: None
    with pytest.raises((TypeError, AttributeError)):
        weights.apply(cut, digest)
    del weights.check
    with pytest.raises(UserError, match="of no version"):
        weights.apply(change, digest)


def test_replaced_parameters_are_noticed() -> None:
    model = Served(0, start())
    weights = Weights(model, SHAPES)
    model.down = torch.nn.Parameter(model.down.data.clone(), requires_grad=False)
    with pytest.raises(UserError, match=r"down_proj\.weight: its parameter was replaced"):
        weights.apply(*sent(update()))


def test_a_loader_that_computes_is_refused() -> None:
    with pytest.raises(UserError, match="does not copy a plain block"):
        Weights(Served(0, start()), {"model.scaled.weight": (6, K)})


def test_quantized_weights_are_refused() -> None:
    model = Served(0, start(), torch.float8_e4m3fn)
    with pytest.raises(UserError, match=r"served as torch\.float8_e4m3fn; quantized"):
        Weights(model, SHAPES)


def test_names_of_the_served_file_may_have_another_start() -> None:
    class Multimodal(Served):
        def load_weights(self, weights) -> None:
            super().load_weights([(n.replace("model.language_model.", "model."), v) for n, v in weights if "la" in n])

    weights = Weights(Multimodal(0, {}), SHAPES, prefix="model.language_model.")
    assert all(weights.blocks.values())
