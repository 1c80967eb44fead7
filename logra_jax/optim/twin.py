"""The projections again, in plain numpy: what an engine without jax uses to rebuild a weight update.

Bit-identical to `logra_jax.optim.projection` for random signs. The generator is threefry2x32 with 20 rounds
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), in the counter layout jax calls
partitionable: word number i of a draw is a function of the key and i alone, so any block of columns can be
  drawn by itself.
"""

import numpy as np

from logra_jax.optim.names import name_hash

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry2x32(key: tuple[int, int], high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One threefry2x32 block per counter (high, low), both uint32 of one shape; returns two uint32 arrays."""
    first, second = np.uint32(key[0]), np.uint32(key[1])
    schedule = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):  # arithmetic modulo 2^32 is the point
        x, y = high + schedule[0], low + schedule[1]
        for group in range(5):
            for rotation in ROTATIONS[group % 2]:
                x = x + y
                y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
            x = x + schedule[(group + 1) % 3]
            y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def fold_in(key: tuple[int, int], number: int) -> tuple[int, int]:
    """The key of `number` under `key`: one block of the counter (0, number)."""
    x, y = threefry2x32(key, np.zeros(1, np.uint32), np.full(1, number, np.uint32))
    return int(x[0]), int(y[0])


def weight_key(seed: int, update: int, name: str) -> tuple[int, int]:
    """Key of one weight's projection. `update` is the update at which it was last redrawn, `seed` in [0,
    2^32)."""
    return fold_in(fold_in((0, seed), update), name_hash(name))


def signs(seed: int, update: int, name: str, r: int, k: int) -> np.ndarray:
    """Signs (int8 [r, k], +1 or -1) of weight `name`; the projection is these divided by sqrt(r).

    The sign in column j is bit j mod 32 of word j // 32 of its row.
    """
    words_per_row = -(-k // 32)
    index = np.arange(r * words_per_row, dtype=np.uint64)
    high, low = (index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32)
    x, y = threefry2x32(weight_key(seed, update, name), high, low)
    words = (x ^ y).reshape(r, words_per_row, 1)
    bits = (words >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return (bits.reshape(r, -1)[:, :k].astype(np.int8) * 2 - 1).astype(np.int8)
