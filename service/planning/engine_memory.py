"""The memory model of Rubato's own engine: what its tensors hold at the peak of a step, counted and not fitted."""

from __future__ import annotations

from rubato.arithmetic import engine_peak
from service.planning.constants import Constants
from service.planning.memory import Memory, MemoryModel
from service.planning.shapes import Accelerator, Layout, Runtime, Work


class EngineMemoryModel(MemoryModel):
    """Predicts what tensors hold, which a trace of the same step on tensors without content shows."""

    def of_rank(self, layout: Layout, rank: int) -> Memory:
        """Peak bytes on a worker of one pipeline rank."""
        software = self.runtime.engine
        assert software is not None  # chosen by it
        found = engine_peak(
            self.work.model,
            layout,
            self.runtime.precision,
            sequence=self.work.sequence,
            micro_batches=layout.micro_batches(self.work.global_batch),
            rank=rank,
            layers=layout.layers_on(self.work.model, rank),
            loss_chunks=self.runtime.loss_chunks,
            software=software,
        )
        return Memory(
            parameters=found.parameters,
            gradients=found.gradients,
            optimizer=found.optimizer,
            activations=found.activations,
            transient=found.transient,
            reserved=self.constants.reserved_share * found.total,
            context=self.accelerator.context_bytes,
        )


def memory_model(work: Work, accelerator: Accelerator, runtime: Runtime, constants: Constants) -> MemoryModel:
    """The model of the engine, or that of other software."""
    kind = MemoryModel if runtime.engine is None else EngineMemoryModel
    return kind(work, accelerator, runtime, constants)
