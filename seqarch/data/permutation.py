"""A keyed permutation of 0 … n-1 that needs no memory: a Feistel network with cycle walking."""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from anything that can be written down; equal parts give equal keys on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words that mixes well."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class KeyedPermutation:
    """A pseudorandom bijection of 0 … n-1, chosen by ``key``, with constant memory and vectorised evaluation.

    A Feistel network permutes 0 … 4^w - 1 for the least w with 4^w >= n whatever its round function (Luby and Rackoff,
    1988). A value that leaves 0 … n-1 is sent through again until it is back (cycle walking, Black and Rogaway, 2002):
    fewer than four passes on average.

    Args:
        n: Number of elements, from 1 to 2^62.
        key: Which permutation; any integer.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 1 <= n <= 1 << 62:
            raise ValueError(f"n must be between 1 and 2^62, got {n}")
        self.n = n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half)
        self._low = np.uint64((1 << half) - 1)
        self._round_keys = [np.uint64(derive_key(key, r)) for r in range(_ROUNDS)]

    def _encrypt(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._low
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._low)
        return (left << self._half) | right

    def __call__(self, index: np.ndarray | int) -> np.ndarray:
        """Where each of ``index`` (integers in 0 … n-1, any shape) goes; int64 of the same shape."""
        index = np.asarray(index)
        if index.size and (index.min() < 0 or index.max() >= self.n):
            raise ValueError(f"index must be in 0 … {self.n - 1}, got {index.min()} … {index.max()}")
        out = self._encrypt(index.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            out[outside] = self._encrypt(out[outside])
            outside = outside[out[outside] >= self.n]
        return out.astype(np.int64).reshape(index.shape)
