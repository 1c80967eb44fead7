"""Numbers of this device against numbers from elsewhere: a Markdown table, exit code 1 if one is off.

    python scripts/device_checks.py [--json FILE]

Logits and gradients of tests/fixtures against torch's, projections against tests/golden and the numpy twin, sketches
against projected dense gradients, and cuDNN's attention against the blocked one where there is either choice.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from logra_jax import SketchSpec, merge, sketched_value_and_grad
from logra_jax.models import CausalLM, load_hf
from logra_jax.optim import projection, twin
from logra_jax.optim.spec import Matrix, leaves_with_paths

TESTS = Path(__file__).parent.parent / "tests"


class Found(NamedTuple):
    """What a check found: the largest deviation, in units of `of`, and how much is allowed."""

    deviation: float
    allowed: float
    of: str


def relative(got: object, want: object) -> float:
    """Largest deviation of two arrays, as a share of the largest entry wanted; not a number counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    deviation = np.abs(got - want).max() / max(np.abs(want).max(), 1e-300)
    return float(deviation) if np.isfinite(deviation) else float("inf")


def reference() -> tuple[CausalLM, dict, dict]:
    folder = TESTS / "fixtures" / "tiny-qwen2-tied"
    model, params = load_hf(folder)
    with np.load(folder / "reference.npz") as arrays:
        return model, params, dict(arrays)


def loss_of(model: CausalLM, ref: dict) -> Callable:
    """Mean negative log-probability of the labels, as in the reference run."""
    ids, mask = ref["right_input_ids"], ref["right_attention_mask"]
    labels = jnp.asarray(ref["right_label_mask"], jnp.float32)

    def loss(params):
        logprobs = jax.nn.log_softmax(model.logits(params, ids, mask)[:, :-1])
        return -(jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0] * labels).sum() / labels.sum()

    return loss


def logits_of_torch() -> Found:
    model, params, ref = reference()
    mask = ref["right_attention_mask"]
    with jax.default_matmul_precision("highest"):
        logits = jax.jit(model.logits)(params, ref["right_input_ids"], mask)
    return Found(float(np.abs(np.asarray(logits) - ref["right_logits"])[mask == 1].max()), 1e-4, "a logit")


def logits_at_default_precision() -> Found:
    model, params, ref = reference()
    mask = ref["right_attention_mask"]
    logits = jax.jit(model.logits)(params, ref["right_input_ids"], mask)
    # Products of TF32 have 11 significant bits; three layers of them, on logits of this size.
    return Found(relative(np.asarray(logits)[mask == 1], ref["right_logits"][mask == 1]), 2e-2, "the largest")


def projection_bits() -> Found:
    wrong = 0
    for case in json.loads((TESTS / "golden" / "projection.json").read_text())["cases"]:
        spec = SketchSpec(rank=case["r"], seed=case["seed"])
        matrix = Matrix("w", (case["name"],), (case["d_in"], 1), (-2,), (-1,))
        key = projection.weight_keys(spec, matrix, case["update"])
        signs = np.asarray(jax.jit(projection.signs, static_argnums=(1, 2))(key, case["r"], case["d_in"]))
        wrong += hashlib.sha256(signs.astype(np.int8).tobytes()).hexdigest() != case["signs_sha256"]
    return Found(wrong, 0, "golden draws that differ")


def sketches() -> Found:
    model, params, ref = reference()
    spec = SketchSpec(rank=16, names=model.weight_names())
    train, frozen = spec.split(params)
    loss = loss_of(model, ref)
    whole = lambda train: loss(merge(train, frozen))
    with jax.default_matmul_precision("highest"):
        dense = jax.jit(jax.grad(whole))(train)
        taken = jax.jit(lambda train: sketched_value_and_grad(whole, spec)(train, step=3)[1])(train)
    worst, taken = 0.0, dict(leaves_with_paths(taken))
    for path, gradient in leaves_with_paths(dense):
        for layer, name in enumerate(spec.matrices(train)[path].names):
            a = twin.signs(spec.seed, 3, name, spec.rank, gradient.shape[1]) / np.sqrt(spec.rank)
            worst = max(worst, relative(taken[path][layer], a @ np.asarray(gradient[layer], np.float64)))
    return Found(worst, 1e-4, "the largest entry")


def cudnn_attention() -> Found | None:
    """bfloat16 outputs and sketches, of cuDNN's attention against the blocked one; both round to bfloat16."""
    if jax.default_backend() != "gpu":
        return None
    model, _, ref = reference()
    config = model.config.replace(num_attention_heads=2, num_key_value_heads=1, head_dim=64)  # cuDNN wants wide heads
    mask = jnp.asarray(ref["right_attention_mask"], jnp.float32)[..., None]
    spec = SketchSpec(rank=16, names=model.weight_names())
    found = []
    for attention in ("blocked", "cudnn"):
        model = CausalLM(config, "bfloat16", attention=attention)
        train, frozen = spec.split(model.init_params(jax.random.key(0)))

        def value(train, model=model, frozen=frozen):
            hidden = model.hidden(merge(train, frozen), ref["right_input_ids"], ref["right_attention_mask"])
            return jnp.sum(jnp.square(hidden.astype(jnp.float32) * mask)) / jnp.sum(mask), hidden * mask

        take = sketched_value_and_grad(value, spec, has_aux=True, materialize=False)
        (_, hidden), grads = jax.jit(lambda train, take=take: take(train, step=0))(train)
        found.append([hidden, *jax.tree.leaves(grads)])
    return Found(max(relative(b, a) for a, b in zip(*found, strict=True)), 5e-2, "the largest entry")


CHECKS: dict[str, Callable[[], Found | None]] = {
    "logits are torch's, full float32": logits_of_torch,
    "logits are torch's, default precision": logits_at_default_precision,
    "projections are the golden ones": projection_bits,
    "sketches are projected dense gradients": sketches,
    "cuDNN attention is the blocked one": cudnn_attention,
}


def main() -> int:
    """Run every check; one that raises has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    file = parser.parse_args().json
    results = {}
    print("| check | deviation | allowed | of | |\n|---|---|---|---|---|")
    for name, check in CHECKS.items():
        try:
            found = check()
        except Exception as error:  # the table is to be complete
            results[name] = {"passed": False, "error": str(error)}
            print(
                f"| {name} | {(str(error).splitlines() or [type(error).__name__])[0][:100]} | | | **FAILED** |",
                flush=True,
            )
            continue
        if found is None:
            print(f"| {name} | | | | not here |", flush=True)
            continue
        passed = found.deviation <= found.allowed
        results[name] = found._asdict() | {"passed": passed}
        verdict = "ok" if passed else "**FAILED**"
        print(f"| {name} | {found.deviation:.1e} | {found.allowed:.0e} | {found.of} | {verdict} |", flush=True)
    if file:
        Path(file).write_text(json.dumps(results, indent=1))
    return 0 if all(result["passed"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
