"""Which part of a spec shapes the curve: the rest may change while a run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from rubato.spec.job import JobSpec


def curve_hash(spec: JobSpec) -> str:
    """A SHA-256 in hex over what the losses of a run depend on; equal hashes are one curve.

    Compression is in it, since what it leaves out of a step is owed to the next. Left out are names and priorities,
    the layout, the workers, when to save or to evaluate, and the number of steps where the learning rate does not
    depend on it.
    """
    text = json.dumps(_curve_of(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def curve_differences(old: JobSpec, new: JobSpec) -> list[tuple[str, Any, Any]]:
    """The fields (dotted) in which two specs have different curves, each with its old and its new value."""
    before, after = dict(_flat(_curve_of(old))), dict(_flat(_curve_of(new)))
    return [
        (field, before.get(field), after.get(field))
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field)
    ]


def _curve_of(spec: JobSpec) -> dict[str, Any]:
    curve = spec.model_dump(mode="json", include={"model", "data", "train", "optimizer"})
    del curve["model"]["preset"]  # its sizes are there in full
    del curve["train"]["compile"]
    del curve["data"]["cache"]
    curve["data"]["validation"] = spec.data.validation.model_dump(include={"fraction", "source"})  # what is trained on
    if spec.communication.compression.name != "none":
        curve["communication"] = {"compression": spec.communication.compression.model_dump(mode="json")}
    if spec.optimizer.schedule.name == "constant":
        del curve["train"]["steps"]
    return curve


def _flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
