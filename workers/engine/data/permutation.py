"""A random order of n things that is computed place by place: no table, no state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_WORD = 2**64 - 1


def permute(places: NDArray[np.uint64], size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Where each place goes in the permutation of ``range(size)`` that (seed, epoch) names.

    A Feistel network is a bijection of a power of four whatever its round function (Luby and Rackoff, 1988). Results
    beyond ``size`` are sent through again until they fall inside (cycle walking: Black and Rogaway, 2002), which keeps
    it a bijection; as the power of four is below 4 x size, that takes fewer than four passes on average.

    Args:
        places: whole numbers below ``size``, any shape.
        size: how many things are ordered, at least 1.
        seed: names a family of orders.
        epoch: names one of them.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    keys = _round_keys(seed, epoch)
    result = places.copy()
    outside = np.ones(places.shape, dtype=bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, keys)
        outside = result >= size
    return result


def _feistel(values: NDArray[np.uint64], half: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    """One key a round, from all 64 bits of the epoch and any number of bits of the seed."""
    state = np.zeros(1, dtype=np.uint64)
    words = [epoch & _WORD, seed & _WORD]
    while seed := seed >> 64:
        words.append(seed & _WORD)
    for word in words:
        state = _mixed(state ^ np.uint64(word))
    keys = []
    for _ in range(_ROUNDS):
        state = _mixed(state)
        keys.append(state[0])
    return keys


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea and Flood, 2014): each bit of the input moves half of the output."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
