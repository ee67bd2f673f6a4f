"""Examples of what the routes of jobs take, for their documentation."""

from __future__ import annotations

SPEC_EXAMPLE = {
    "name": "byte-llama",
    "model": {"preset": "tiny"},
    "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 128},
    "train": {"steps": 100, "global_batch": 8},
    "optimizer": {"lr": 0.001},
    "parallelism": {"tensor": 2, "pipeline": 2},
    "workers": {"min": 4, "max": 8},
    "checkpoint": {"every": 50},
}
