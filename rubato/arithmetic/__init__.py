"""What a model costs, worked out before it runs: parameters, floating-point operations, bytes."""

from rubato.arithmetic.decoder import Decoder
from rubato.arithmetic.engine import EnginePeak, engine_peak
from rubato.arithmetic.flops import (
    forward_flops_per_token,
    recomputed_flops_per_token,
    training_flops,
    training_flops_per_token,
)
from rubato.arithmetic.memory import (
    ENGINE_CPU,
    ENGINE_GPU,
    RankMemory,
    Recompute,
    Software,
    Spread,
    in_flight,
    kept_bytes_per_token,
    memory_of_rank,
    parameters_of_rank,
    sharded_states,
)
from rubato.arithmetic.precision import AUTOCAST, BF16, FP16, FP32, SHARDED, Precision

__all__ = [
    "AUTOCAST",
    "BF16",
    "ENGINE_CPU",
    "ENGINE_GPU",
    "FP16",
    "FP32",
    "SHARDED",
    "Decoder",
    "EnginePeak",
    "Precision",
    "RankMemory",
    "Recompute",
    "Software",
    "Spread",
    "engine_peak",
    "forward_flops_per_token",
    "in_flight",
    "kept_bytes_per_token",
    "memory_of_rank",
    "parameters_of_rank",
    "recomputed_flops_per_token",
    "sharded_states",
    "training_flops",
    "training_flops_per_token",
]
