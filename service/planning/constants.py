"""The ten fitted constants of the planner, and three that are only ever measured: what each means."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Constants:
    """Fitted once, to published runs of several trainers on several GPU generations; the same for all.

    matmul_share: share of the best measured matrix product that the products of a training step sustain.
    memory_bandwidth_share: share of the memory's data-sheet bandwidth that element-wise kernels sustain.
    attention_share: share of peak that fused attention sustains on the generation it was written for.
    layer_gap_s: seconds a layer's forward and backward leave the device idle between kernels.
    blocking_gap_s: the same, when hosts wait for every kernel, for each rank of the tensor group, all of whose hosts
        a collective waits for.
    link_share: share of a link's bandwidth that a ring of large messages sustains.
    hop_latency_s: seconds each hop adds to a ring.
    exposed_share: share of communication that is not hidden though there is enough to hide it behind.
    activation_factor: kept activations, measured against the count of what backward needs.
    reserved_share: what an allocator holds beside its tensors, in fragments and caches, as a share of them.

    What published runs do not tell apart, and a calibration measures where hosts are slow:

    tensor_gap_s: seconds that a layer's passes take longer for being split, beside the bytes that are sent.
    handover_s: seconds that a micro-batch costs the host of a pipeline rank, beside the bytes that are sent.
    ends_s: seconds that embedding, head and loss of a micro-batch leave the device idle.
    """

    matmul_share: float
    memory_bandwidth_share: float
    attention_share: float
    layer_gap_s: float
    blocking_gap_s: float
    link_share: float
    hop_latency_s: float
    exposed_share: float
    activation_factor: float
    reserved_share: float
    tensor_gap_s: float = 0.0
    handover_s: float = 0.0
    ends_s: float = 0.0


@cache
def fitted() -> Constants:
    """The constants of ``constants.json`` beside this file."""
    return Constants(**json.loads((files(__package__) / "constants.json").read_text(encoding="utf-8")))
