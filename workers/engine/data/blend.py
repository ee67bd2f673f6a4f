"""Which source of a blend a sample comes from: exact shares, at any place, without counting from the beginning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction


def assign(numbers: Iterable[int], weights: Sequence[Fraction]) -> list[tuple[int, int]]:
    """The source of each sample, and which of that source's own samples it is.

    The first source gets sample n when the whole part of n times its share grows there (Bresenham's line), so of any
    first n samples it has its share, rounded down; the others share the rest in the same way. So the counts of k
    sources are never further than k - 1 samples from their exact shares, and each source numbers its samples without
    gaps.

    Args:
        numbers: of samples of the run, counted from 0.
        weights: of the sources, in any unit.
    """
    shares = [weight / sum(weights[place:]) for place, weight in enumerate(weights)]
    return [_one(number, shares) for number in numbers]


def _one(number: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    last = len(shares) - 1
    for source, share in enumerate(shares[:last]):
        before = number * share.numerator // share.denominator
        if (number + 1) * share.numerator // share.denominator > before:
            return source, before
        number -= before
    return last, number
