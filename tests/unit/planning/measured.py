"""A calibration whose numbers are round."""

from __future__ import annotations

from typing import Any

from rubato.plans import Calibration


def calibration(
    alone: dict[str, Any] | None = None, together: dict[str, Any] | None = None, **more: Any
) -> Calibration:
    """Of a CPU of two cores, with changes; ``together={}`` of several workers, None of one."""
    rates = {"single_flops": 5e10, "half_flops": 1e11, "attention_flops": 2.5e10, "copy_bytes": 1e10}
    layer = {"layer_s": 0.2, "layer_hidden": 256, "layer_tokens": 1024, "layer_length": 256}
    pair = {"workers": 2, "slowdown": 1.25, "link_bytes": 1e9, "latency_s": 1e-4, "shared_gap_s": 0.01}
    return Calibration.model_validate(
        {
            "measured_at": "2026-01-02T03:04:05Z",
            "host": "here",
            "cores": 2,
            "alone": {"device": "cpu", **rates, **layer, "gap_s": 1e-3, "ends_s": 2e-3} | (alone or {}),
            "together": None if together is None else {**pair, "pipelined_s": 0.01, **together},
        }
    )
