"""The layout to use at each size, with few changes of tensor x pipeline between sizes."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from service.planning.search import Choice, Search

# A change of tensor or pipeline degree is a checkpoint, new replicas and a reshard, so it has to raise the speed that
# a job has on average over all its sizes by this much.
CHANGE_WORTH = 0.005

# Replica shapes this much slower than the best of their size are not considered for it. Kept wide, so that a plan need
# not change where it would rather bear a slow size.
SLACK = 0.3


def elastic_plan(search: Search, sizes: Iterable[int], change_worth: float = CHANGE_WORTH) -> list[Choice]:
    """One choice for every size at which anything fits, in ascending order.

    Minimises the summed logarithm of slowdowns against the best of each size, plus what changes are worth, by dynamic
    programming over the sizes.
    """
    options = [(size, found) for size in sorted(sizes) if (found := search.within(size, SLACK))]
    if not options:
        return []
    price = change_worth * len(options)
    cost: dict[tuple[int, int], float] = {}
    came_from: list[dict[tuple[int, int], tuple[int, int]]] = []
    for _, found in options:
        fastest = min(seconds for seconds, _ in found.values())
        cheapest = min(cost, key=cost.__getitem__, default=None)
        now, origin = {}, {}
        for degrees, (seconds, _) in found.items():
            stay = cost.get(degrees)
            if cheapest is None:
                before, origin[degrees] = 0.0, degrees
            elif stay is not None and stay <= cost[cheapest] + price:
                before, origin[degrees] = stay, degrees
            else:
                before, origin[degrees] = cost[cheapest] + price, cheapest
            now[degrees] = before + log(seconds / fastest)
        cost = now
        came_from.append(origin)
    degrees = min(cost, key=cost.__getitem__)
    chosen = []
    for (size, found), origin in zip(reversed(options), reversed(came_from), strict=True):
        chosen.append(search.judge(found[degrees][1], size))
        degrees = origin[degrees]
    return chosen[::-1]
