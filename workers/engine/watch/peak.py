"""The peak of one worker in FLOP/s: what its maker states for a GPU, what a matrix product reaches elsewhere."""

from __future__ import annotations

import re
import time

import torch

_T = 10**12

# Dense, from the data sheets: (bf16 or fp16 on tensor cores with fp32 accumulation, plain fp32).
# A longer name comes before a shorter one that it contains.
GPU_PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500 * _T, 80 * _T),
    "B200": (2250 * _T, 75 * _T),
    "H200 NVL": (835.5 * _T, 60 * _T),
    "H200": (989.4 * _T, 66.9 * _T),
    "H100 PCIe": (756 * _T, 51 * _T),
    "H100 NVL": (835.5 * _T, 60 * _T),
    "H100": (989.4 * _T, 66.9 * _T),
    "A100": (312 * _T, 19.5 * _T),
    "A40": (149.7 * _T, 37.4 * _T),
    "A10G": (70 * _T, 31.5 * _T),
    "A10": (125 * _T, 31.2 * _T),
    "L40S": (362 * _T, 91.6 * _T),
    "L40": (181 * _T, 90.5 * _T),
    "L4": (121 * _T, 30.3 * _T),
    "RTX 6000 Ada": (364.2 * _T, 91.1 * _T),
    "RTX A6000": (154.8 * _T, 38.7 * _T),
    "RTX 5090": (209.5 * _T, 104.8 * _T),
    "RTX 4090": (165.2 * _T, 82.6 * _T),
    "RTX 3090": (71 * _T, 35.6 * _T),
    "V100": (125 * _T, 15.7 * _T),
    "T4": (65 * _T, 8.1 * _T),
    "MI300X": (1307.4 * _T, 163.4 * _T),
    "MI250X": (383 * _T, 47.9 * _T),
}


def peak_flops(device: torch.device, precision: str) -> float:
    """FLOP/s of one worker on a device at a precision of the spec; float8 by the peak of bf16.

    A GPU that the table does not know, and a CPU with the threads torch has now, is measured; that takes about 50 ms.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, (half, single) in GPU_PEAKS.items():
            if re.search(rf"\b{re.escape(known)}\b", name, re.IGNORECASE):
                return single if precision == "fp32" else half
    return measured_peak(device, precision)


def measured_peak(device: torch.device, precision: str, size: int = 512, seconds: float = 0.05) -> float:
    """FLOP/s of the fastest of several square matrix products, which is the nearest to a peak that can be seen.

    Args:
        size: rows and columns of the matrices.
        seconds: how long to go on trying.
    """
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    left, right = torch.ones(size, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    fastest = float("inf")
    with torch.no_grad():
        torch.mm(left, right)  # the first call chooses kernels
        until = time.perf_counter() + seconds
        while fastest == float("inf") or time.perf_counter() < until:
            _wait(device)
            began = time.perf_counter()
            torch.mm(left, right)
            _wait(device)
            fastest = min(fastest, time.perf_counter() - began)
    return 2 * size**3 / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
