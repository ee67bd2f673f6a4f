"""The job spec: what a job is to do, checked before anything starts."""

from rubato.spec.job import JobSpec
from rubato.spec.load import load_spec, parse_spec, read_spec
from rubato.spec.model import LLAMA_PRESETS, ModelSpec
from rubato.spec.sections import (
    CheckpointSpec,
    CommunicationSpec,
    CorpusSpec,
    DataSpec,
    FaultsSpec,
    LossScaleSpec,
    MemorySpec,
    OptimizerSpec,
    ParallelismSpec,
    RecomputeSpec,
    ScheduleSpec,
    TrainSpec,
    ValidationSpec,
    WorkersSpec,
)

__all__ = [
    "LLAMA_PRESETS",
    "CheckpointSpec",
    "CommunicationSpec",
    "CorpusSpec",
    "DataSpec",
    "FaultsSpec",
    "JobSpec",
    "LossScaleSpec",
    "MemorySpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelismSpec",
    "RecomputeSpec",
    "ScheduleSpec",
    "TrainSpec",
    "ValidationSpec",
    "WorkersSpec",
    "load_spec",
    "parse_spec",
    "read_spec",
]
