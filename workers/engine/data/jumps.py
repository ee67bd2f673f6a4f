"""Which data step an optimizer step reads, where a run leaves some out."""

from __future__ import annotations

from collections.abc import Iterable


def data_step(step: int, jumped: Iterable[int]) -> int:
    """The data step of an update: the ``step``-th, from 0, of those that are not left out.

    Args:
        step: updates done before.
        jumped: data steps that are left out, ascending.
    """
    for left_out in jumped:
        if left_out <= step:
            step += 1
    return step
