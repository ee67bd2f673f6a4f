"""The memory model of Rubato's own engine: what its tensors hold at the peak of a step, counted and not fitted."""

from __future__ import annotations

from rubato.arithmetic.memory import in_flight, parameters_of_rank
from service.planning.constants import Constants
from service.planning.memory import LOGIT_BYTES, Memory, MemoryModel
from service.planning.shapes import Accelerator, Layout, Runtime, Work

# A gradient is of 32 bits, both where backward adds micro-batches up and in the bucket that is reduced.
GRADIENT_BYTES = 4

# A weight that autocast has rounded for a pass, kept until the backward of that pass.
CAST_BYTES = 2

# An element of what pipeline stages exchange where the residual stream is of 32 bits.
STREAM_BYTES = 4


class EngineMemoryModel(MemoryModel):
    """Predicts what tensors hold, which a trace of the same step on tensors without content shows.

    Beside states and activations that is: gradients as backward computes them, beside the buckets they are reduced in;
    copies of the weights in 16 bits, one for each pass in flight whose layers are not recomputed; and what pipeline
    stages receive, for every micro-batch of a step at once, as torch.distributed.pipelining allocates it.
    """

    def of_rank(self, layout: Layout, rank: int) -> Memory:
        """Peak bytes on a worker of one pipeline rank."""
        model, precision, software = self.work.model, self.runtime.precision, self.runtime.engine
        assert software is not None  # chosen by it
        layers, first, last = layout.layers_on(model, rank), rank == 0, rank == layout.pipeline - 1
        held = parameters_of_rank(model, layout, rank, layers)
        layer = model.layer_parameters / layout.tensor
        roots = held - layers * layer
        shards = layout.shards
        count = layout.micro_batches(self.work.global_batch)
        tokens = layout.micro_batch * self.work.sequence / layout.context

        kept, whole = self._kept_bytes(layout)
        flight = in_flight(layout, rank, count)
        recomputed = layout.recompute == "full"
        cast = CAST_BYTES if software.autocast else 0
        head = model.embedding_parameters / layout.tensor if last else 0.0
        activations = flight * layers * kept * tokens
        activations += flight * cast * ((0.0 if recomputed else layers * model.layer_weights / layout.tensor) + head)

        stream = STREAM_BYTES if software.autocast else precision.activation
        boundaries = 2 * layout.virtual_stages - first - last
        received = stream * tokens * model.hidden / layout.tensor * count * boundaries

        working = whole * tokens + cast * layer if recomputed else 0.0
        if last:
            working = max(working, LOGIT_BYTES * tokens * model.vocab / layout.tensor / self.runtime.loss_chunks)
        computed = GRADIENT_BYTES * self._computed(layout, held, layer, roots)
        if count == 1:  # gradients come as activations go
            working, computed = max(working, computed - activations), 0.0
        if layout.zero and shards > 1:
            working += 2 * GRADIENT_BYTES * layer  # packed for its owners, and what came of the one before
        parameters = precision.parameter * held
        optimizer = precision.optimizer * held / (shards if layout.zero else 1)
        if layout.zero == 3 and shards > 1:
            parameters = precision.parameter * (held / shards + roots)
            working += 3 * precision.parameter * layer  # at work, gathered ahead, and as it arrives
        buckets = GRADIENT_BYTES * held / (shards if layout.zero else 1)
        allocated = parameters + buckets + computed + optimizer + activations + working + received
        return Memory(
            parameters=parameters,
            gradients=buckets + computed,
            optimizer=optimizer,
            activations=activations,
            transient=working + received,
            reserved=self.constants.reserved_share * allocated,
            context=self.accelerator.context_bytes,
        )

    def _computed(self, layout: Layout, held: float, layer: float, roots: float) -> float:
        """Parameters whose gradients backward holds at once: with ZeRO 2 and 3 a layer, and what is in none."""
        if layout.zero >= 2 and layout.shards > 1:
            return roots + layer
        return held


def memory_model(work: Work, accelerator: Accelerator, runtime: Runtime, constants: Constants) -> MemoryModel:
    """The model of the engine, or that of other software."""
    kind = MemoryModel if runtime.engine is None else EngineMemoryModel
    return kind(work, accelerator, runtime, constants)
