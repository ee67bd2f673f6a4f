"""The job spec: what a job is to do, checked before anything starts."""

from rubato.spec.communication import CommunicationSpec, CompressionSpec
from rubato.spec.data import CorpusSpec, DataSpec, SourceSpec, ValidationSpec
from rubato.spec.job import JobSpec
from rubato.spec.load import load_spec, parse_spec, read_spec
from rubato.spec.model import ModelSpec, RopeScalingSpec
from rubato.spec.planned import as_given, is_planned
from rubato.spec.presets import PRESETS, Preset
from rubato.spec.sections import (
    CheckpointSpec,
    FaultsSpec,
    LossScaleSpec,
    MemorySpec,
    OptimizerSpec,
    ParallelismSpec,
    RecomputeSpec,
    ScheduleSpec,
    TrainSpec,
    WorkersSpec,
)
from rubato.spec.stored import stored_spec

__all__ = [
    "PRESETS",
    "CheckpointSpec",
    "CommunicationSpec",
    "CompressionSpec",
    "CorpusSpec",
    "DataSpec",
    "FaultsSpec",
    "JobSpec",
    "LossScaleSpec",
    "MemorySpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelismSpec",
    "Preset",
    "RecomputeSpec",
    "RopeScalingSpec",
    "ScheduleSpec",
    "SourceSpec",
    "TrainSpec",
    "ValidationSpec",
    "WorkersSpec",
    "as_given",
    "is_planned",
    "load_spec",
    "parse_spec",
    "read_spec",
    "stored_spec",
]
