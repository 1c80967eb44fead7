"""The projections again, without jax: what a rollout engine uses to rebuild a weight update, in numpy or torch.

Bit-identical to `logra_jax.optim.projection` for random signs. The generator is threefry2x32 with 20 rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), in the counter layout jax calls
partitionable: word number i of a draw is a function of the key and i alone, so any block of columns can be
drawn by itself.

Words are int32, whose sums wrap as unsigned ones do and which torch can shift; numpy is imported, torch handed in.
"""

from typing import Any

import numpy as np

from logra_jax.optim.names import name_hash

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key: tuple[int, int], high: Any, low: Any) -> tuple[Any, Any]:
    """One threefry2x32 block per counter (high, low), both int32 arrays of one shape; returns two like them."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = high + _wrap(schedule[0]), low + _wrap(schedule[1])
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            # The shift to the right fills up with the sign, which the mask takes off.
            y = ((y << rotation) | ((y >> (32 - rotation)) & ((1 << rotation) - 1))) ^ x
        x = x + _wrap(schedule[(group + 1) % 3])
        y = y + _wrap(schedule[(group + 2) % 3] + group + 1)
    return x, y


def _wrap(number: int) -> int:
    """The int32 with the bits of a whole number's lowest 32."""
    return (number + 2**31) % 2**32 - 2**31


def fold_in(key: tuple[int, int], number: int) -> tuple[int, int]:
    """The key of `number` under `key`: one block of the counter (0, number)."""
    x, y = threefry2x32(key, np.zeros(1, np.int32), np.full(1, _wrap(number), np.int32))
    return int(x[0]) % 2**32, int(y[0]) % 2**32


def weight_key(seed: int, update: int, name: str) -> tuple[int, int]:
    """Key of one weight's projection. `update` is the update at which it was last redrawn, `seed` in [0,
    2^32)."""
    return fold_in(fold_in((0, seed), update), name_hash(name))


def signs(
    seed: int,
    update: int,
    name: str,
    r: int,
    k: int,
    columns: tuple[int, int] | None = None,
    xp: Any = np,
    device: Any = "cpu",
) -> Any:
    """Signs (int8 [r, k], +1 or -1) of weight `name`; the projection is these divided by sqrt(r).

    The sign in column j is bit j mod 32 of word j // 32 of its row.

    Args:
      columns: first column and the one after the last, to draw only those: int8 [r, last - first].
      xp: numpy, or torch with a `device` of its.
    """
    begin, end = columns or (0, k)
    first, last, per_row = begin // 32, -(-end // 32), -(-k // 32)
    rows = xp.arange(r, dtype=xp.int64, device=device)[:, None]
    halves = (rows * per_row + xp.arange(first, last, dtype=xp.int64, device=device)).view(xp.int32)
    x, y = threefry2x32(weight_key(seed, update, name), halves[:, 1::2], halves[:, ::2])
    octets = (x ^ y).view(xp.uint8)[:, :, None]
    bits = (octets >> xp.arange(8, dtype=xp.uint8, device=device)) & 1
    return bits.reshape(r, -1)[:, begin - 32 * first : end - 32 * first].view(xp.int8) * 2 - 1
