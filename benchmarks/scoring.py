"""Scores predictions of published runs: errors of rows that were not fitted to, and how layouts are ranked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from random import Random

import numpy as np

from benchmarks.fitting import MEMORY_CONSTANTS, TIME_CONSTANTS, fit
from benchmarks.published_runs import Run
from service.planning.constants import Constants
from service.planning.memory import MemoryModel
from service.planning.throughput import TimeModel

FOLDS = 5
NOTEWORTHY = 0.03  # pairs closer than this are noise
GOOD_ENOUGH = 0.05  # a chosen layout this close to the best is as good

Figures = dict[str, float]


def tokens_per_gpu(run: Run, constants: Constants) -> float:
    """Predicted tokens a second and GPU."""
    model = TimeModel(run.work, run.cluster, run.runtime, constants)
    return model.tokens_per_s(run.layout) / run.cluster.count


def peak_gib(run: Run, constants: Constants) -> float:
    """Predicted peak memory in GiB, of the device or of the allocator, as the run measured it."""
    memory = MemoryModel(run.work, run.cluster.accelerator, run.runtime, constants).peak(run.layout)
    return (memory.device if run.driver_memory else memory.allocated) / 2**30


class Quantity:
    """One measured quantity of the runs: how it is predicted, by which constants, and what was measured."""

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        predict: Callable[[Run, Constants], float],
        measured: Callable[[Run], float | None],
        runs: Sequence[Run],
    ) -> None:
        self.title, self.names = title, names
        self._predict = predict
        self.measured = {run.line: value for run in runs if (value := measured(run)) is not None}
        self.runs = [run for run in runs if run.line in self.measured and not run.suspect]
        self.suspects = [run for run in runs if run.line in self.measured and run.suspect]

    @classmethod
    def speed(cls, runs: Sequence[Run]) -> Quantity:
        return cls("tokens/s/GPU", TIME_CONSTANTS, tokens_per_gpu, lambda run: run.measured_tokens, runs)

    @classmethod
    def memory(cls, runs: Sequence[Run]) -> Quantity:
        return cls("peak memory", MEMORY_CONSTANTS, peak_gib, lambda run: run.measured_gib, runs)

    def fit(self, runs: Sequence[Run]) -> Constants:
        """Constants from these runs alone, without those measured on a machine with a documented fault."""
        healthy = [run for run in runs if not run.faulty] or list(runs)
        return fit(
            self.names,
            lambda constants: np.array(
                [math.log(self._predict(run, constants) / self.measured[run.line]) for run in healthy]
            ),
        )

    def errors(self, runs: Iterable[Run], constants: Constants) -> dict[int, float]:
        """Relative error of the prediction, by line of the file."""
        return {run.line: self._predict(run, constants) / self.measured[run.line] - 1 for run in runs}

    def left_out(self, part_of: Callable[[Run], Hashable]) -> dict[int, float]:
        """Errors when each part is predicted from the others."""
        errors: dict[int, float] = {}
        for part in sorted({part_of(run) for run in self.runs}, key=str):
            others = [run for run in self.runs if part_of(run) != part]
            constants = self.fit(others or self.runs)
            errors |= self.errors((run for run in self.runs if part_of(run) == part), constants)
        return errors

    def cross_validated(self, seed: int) -> dict[int, float]:
        """Errors of five-fold cross-validation; rows of one (model, source, GPU) are never apart."""
        groups = sorted({run.group for run in self.runs})
        Random(seed).shuffle(groups)
        fold = {group: number % FOLDS for number, group in enumerate(groups)}
        return self.left_out(lambda run: fold[run.group])


def figures(errors: Iterable[float]) -> Figures:
    """Median and 90th percentile of absolute relative errors in percent, and how many they are."""
    sizes = np.abs(np.array(list(errors), dtype=float)) * 100
    if not len(sizes):
        return {"n": 0}
    return {
        "median": round(float(np.median(sizes)), 2),
        "p90": round(float(np.percentile(sizes, 90)), 2),
        "n": len(sizes),
    }


def ranking(runs: Sequence[Run], predicted: dict[int, float], measured: dict[int, float]) -> Figures:
    """How often layouts of one model, batch and cluster are ordered right, and how good the chosen one is."""
    clusters: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        work = run.work
        clusters[work, run.source, run.gpu, run.cluster.count, run.runtime, run.faulty].append(run)
    right = pairs = good = groups = 0
    for members in clusters.values():
        values = _mean_by_layout(members, measured)
        guesses = _mean_by_layout(members, predicted)
        for one, other in combinations(values, 2):
            if abs(values[one] / values[other] - 1) > NOTEWORTHY:
                pairs += 1
                right += (values[one] > values[other]) == (guesses[one] > guesses[other])
        if len(values) > 1:
            groups += 1
            good += values[max(guesses, key=guesses.__getitem__)] >= (1 - GOOD_ENOUGH) * max(values.values())
    return {
        "pairs": pairs,
        "right": round(right / pairs, 3) if pairs else 1.0,
        "groups": groups,
        "chosen_within_5_percent": round(good / groups, 3) if groups else 1.0,
    }


def _mean_by_layout(runs: Sequence[Run], values: dict[int, float]) -> dict[Hashable, float]:
    """Repeats of one layout count once, with their mean."""
    by_layout: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        by_layout[run.layout].append(values[run.line])
    return {layout: sum(found) / len(found) for layout, found in by_layout.items()}
