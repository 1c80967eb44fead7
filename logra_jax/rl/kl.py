"""The KL divergence that an update really caused, over the whole vocabulary, and the rows on which it is looked at."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.mesh import constrain
from logra_jax.optim.predicted_kl import HiddenHead


def policy_kl(
    old: HiddenHead,
    new: HiddenHead,
    mask: Bool[Array, "n c"],
    temperature: float,
    chunk: int = 512,
    mesh: Mesh | None = None,
) -> Float[Array, ""]:
    """Mean KL(old || new) per counted token, in nats, of ``softmax(hidden @ head / temperature)``.

    With d = (z_new - z_old) / T it is log E_old[e^d] - E_old[d]. Centring d first leaves only small numbers, so that
    a divergence of 1e-7 survives float32. About ``chunk`` positions are taken at a time: no ``[tokens, vocab]`` array
    exists.

    Args:
      old, new: final hidden states ``[n, c, d]`` and heads ``[d, v]`` before and after the update.
      mask: which positions count; none counted gives 0.
      temperature: of the sampling distribution.
      chunk: positions per piece, over all rows.
      mesh: its devices share the vocabulary of each piece, as in ``token_logprobs``.
    """
    rows, length = mask.shape
    width = max(1, min(chunk // rows, length))
    pieces = -(-length // width)

    def split(hidden: Array) -> Array:
        # Along the positions: rows stay on their devices.
        padded = jnp.pad(hidden, ((0, 0), (0, pieces * width - length), (0, 0)))
        return padded.reshape(rows, pieces, width, -1).swapaxes(0, 1)

    def logits(hidden: Array, head: Array) -> Array:
        hidden = constrain(hidden, mesh, None, None, None)
        z = jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        return constrain(z, mesh, None, None, "logits") / temperature

    def piece(hidden: tuple[Array, Array]) -> Array:
        z_old, z_new = (logits(h, side.head) for h, side in zip(hidden, (old, new), strict=True))
        p = jax.nn.softmax(z_old, axis=-1)
        change = z_new - z_old
        change = change - jnp.sum(p * change, axis=-1, keepdims=True)
        return jnp.log1p(jnp.sum(p * (jnp.expm1(change) - change), axis=-1))

    per_piece = jax.lax.map(piece, (split(old.hidden), split(new.hidden)))
    per_token = per_piece.swapaxes(0, 1).reshape(rows, -1)[:, :length]
    total = jnp.sum(jnp.where(mask, per_token, 0.0))
    return total / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)


def draw_probe(seed: int, update: int, prompts: int, generations: int, responses: int) -> Int[np.ndarray, " r"]:
    """Row numbers of the responses that predict the KL: prompts differ as long as there are any left.

    A seeded draw over global row numbers (row = prompt * generations + sample), so it depends neither on the mesh nor
    on micro-batches.
    """
    rng = np.random.default_rng((seed, update))
    responses = min(responses, prompts * generations)
    # Each round visits every prompt once, in a fresh order, with a sample that the prompt has not given yet.
    samples = np.argsort(rng.random((prompts, generations)), axis=1)
    rounds = [rng.permutation(prompts) * generations for _ in range(generations)]
    rows = [start + samples[start // generations, turn] for turn, start in enumerate(rounds)]
    return np.concatenate(rows)[:responses].astype(np.int32)
