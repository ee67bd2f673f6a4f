"""Layers placed on several devices of one worker: how a map is written, and where there can be none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from rubato.problems import FieldProblem
from rubato.spec.model import ModelSpec
from rubato.spec.sections import ParallelismSpec, WorkersSpec

_FIELD = "parallelism.device_map"


class Placed(Protocol):
    """The sections of a spec that decide."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def parallelism(self) -> ParallelismSpec: ...
    @property
    def workers(self) -> WorkersSpec: ...


def devices_of_worker(workers: WorkersSpec) -> int:
    """Devices that a worker has: its GPUs, or its CPUs where it has none."""
    return workers.gpus or max(1, int(workers.cpus))


def layers_of(text: str) -> range | None:
    """The layers that a key of a map names, such as "4" or "0-3"; None: it names none."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if found is None:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return range(first, last + 1) or None


def device_map_problems(spec: Placed) -> Iterator[FieldProblem]:
    """Why the layers of this job cannot be placed as its map says."""
    given, shape, workers = spec.parallelism.device_map, spec.parallelism, spec.workers
    if given is None:
        return
    if shape.replica_size > 1:
        yield FieldProblem(
            _FIELD,
            f"it places layers on devices of one worker, and tensor {shape.tensor} x pipeline {shape.pipeline} splits "
            "them over workers",
            "use tensor 1 and pipeline 1, or leave device_map out",
        )
    if workers.max > 1:
        yield FieldProblem(
            _FIELD,
            f"it is for one worker with several devices and no process group, workers.max is {workers.max}",
            "use workers: {min: 1, max: 1, gpus: 2}, or a pipeline over several workers instead of device_map",
        )
    devices, layers = devices_of_worker(workers), spec.model.layers
    kind = "gpus" if workers.gpus else "cpus"
    if given == "balanced":
        if not 1 < devices <= layers:
            cause = f"{layers} layers are to be balanced over {devices} of the worker's {kind}"
            yield FieldProblem(_FIELD, cause, f"use workers.{kind} from 2 to {layers}, or leave device_map out")
        return
    yield from _placed_by_hand(given, layers, devices, kind)


def _placed_by_hand(given: dict[str, int], layers: int, devices: int, kind: str) -> Iterator[FieldProblem]:
    named: list[range] = []
    for text, device in given.items():
        stretch = layers_of(text)
        if stretch is None:
            yield FieldProblem(
                _FIELD, f"{text} names no layers", "write a layer or a stretch of them, such as 4 or 0-3"
            )
        elif stretch.stop > layers:
            cause = f"there is no layer {stretch.stop - 1}, the model has layers 0 to {layers - 1}"
            yield FieldProblem(_FIELD, cause, "name each layer once, or use balanced")
        else:
            named.append(stretch)
        if device >= devices:
            cause = f"layers {text} are on device {device}, the worker has {devices} {kind}, counted from 0"
            yield FieldProblem(_FIELD, cause, f"use devices up to {devices - 1}, or workers.{kind} {device + 1}")
    placed = Counter(layer for stretch in named for layer in stretch)
    wrong = [layer for layer in range(layers) if placed[layer] != 1]
    if wrong and len(named) == len(given):
        times = "not placed" if placed[wrong[0]] == 0 else "placed more than once"
        yield FieldProblem(_FIELD, f"layer {wrong[0]} is {times}", "name each layer once, or use balanced")
