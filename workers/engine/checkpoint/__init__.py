"""The state of a job on shared storage: complete and verified, or not there."""

from workers.engine.checkpoint.crew import Crew, JobCrew
from workers.engine.checkpoint.store import CheckpointStore, FencedError

__all__ = ["CheckpointStore", "Crew", "FencedError", "JobCrew"]
