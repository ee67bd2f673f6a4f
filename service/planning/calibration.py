"""From what a calibration measured to what the planner takes: an accelerator and constants of this cluster's own."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from rubato.arithmetic import FP32, Decoder
from rubato.plans import Calibration
from service.planning import compute
from service.planning.accelerators import catalogue
from service.planning.compute import Kernels
from service.planning.constants import Constants, fitted
from service.planning.fleet import CPU, Measured, kind_of
from service.planning.shapes import Accelerator, Layout, Runtime

# Hops of the four collectives in the passes of a layer that two ranks share: a gather and a reduction each way.
HOPS_OF_A_SHARED_LAYER = 4


def measured_by(calibration: Calibration) -> tuple[str, Measured]:
    """The catalogue's name of what was measured, and what it was found to be.

    On a CPU hosts are as slow as what they drive, so their overheads are measured too; on a GPU the fitted constants
    stay, which its rates do not tell, and only rates and links are replaced.
    """
    if calibration.alone.device == "cpu":
        return CPU, _cpu(calibration)
    name = kind_of(calibration.alone.device)
    alone, together, known = calibration.alone, calibration.together, catalogue()[name]
    one = replace(
        known,
        matmul_flops=alone.half_flops,
        single_flops=alone.single_flops,
        memory_bandwidth=alone.copy_bytes / fitted().memory_bandwidth_share,
        link_bytes=together.link_bytes / fitted().link_share if together else known.link_bytes,
    )
    return name, Measured(one, fitted())


def _cpu(calibration: Calibration) -> Measured:
    alone, together = calibration.alone, calibration.together
    slowdown = together.slowdown if together else 1.0
    known, base = catalogue()[CPU], fitted()
    constants = replace(
        base,
        matmul_share=1.0,
        memory_bandwidth_share=1.0,
        link_share=1.0,
        exposed_share=1.0,  # what is sent takes the cores that it would hide behind
        attention_share=alone.attention_flops / alone.single_flops,
        layer_gap_s=alone.gap_s,
        ends_s=alone.ends_s,
    )
    one = replace(
        known,
        peak_flops=alone.half_flops,
        matmul_flops=alone.half_flops,
        single_flops=alone.single_flops,
        vector_flops=alone.single_flops,
    )
    one = replace(one, memory_bandwidth=_bandwidth(calibration, one, constants))
    if together is None:
        return Measured(one, constants)
    latency = together.latency_s / slowdown
    shared = together.shared_gap_s / slowdown - alone.gap_s - HOPS_OF_A_SHARED_LAYER * latency
    handover = together.pipelined_s / slowdown - alone.gap_s - alone.ends_s - 2 * latency
    return Measured(
        replace(one, link_bytes=together.link_bytes * slowdown, network_bytes=together.link_bytes * slowdown),
        replace(constants, hop_latency_s=latency, tensor_gap_s=max(0.0, shared), handover_s=max(0.0, handover)),
        cores=together.workers / slowdown,
    )


def _bandwidth(calibration: Calibration, one: Accelerator, constants: Constants) -> float:
    """Bytes a second at which the model takes as long for the layer that was measured as it took, by bisection."""
    alone = calibration.alone
    hidden = alone.layer_hidden
    model = Decoder(layers=1, hidden=hidden, heads=8, kv_heads=8, ffn=4 * hidden, vocab=256)
    layout = Layout(micro_batch=alone.layer_tokens // alone.layer_length)
    runtime = Runtime(precision=FP32)

    def seconds(bandwidth: float) -> float:
        kernels = Kernels(replace(one, memory_bandwidth=bandwidth), runtime, constants)
        whole, _ = compute.layer(kernels, model, layout, alone.layer_length)
        return whole.total + compute.gradient_sum(kernels, model.layer_parameters) + constants.layer_gap_s

    low, high = alone.copy_bytes / 100, alone.copy_bytes * 100
    for _ in range(50):
        middle = sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > alone.layer_s else (low, middle)
    return high
