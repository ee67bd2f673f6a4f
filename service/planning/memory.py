"""The memory model: peak bytes on a worker of each pipeline rank, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.arithmetic import Recompute, Software, in_flight, kept_bytes_per_token, parameters_of_rank, sharded_states
from rubato.layout import distinct_stages
from service.planning.constants import Constants
from service.planning.shapes import Accelerator, Layout, Runtime, Work

# A logit on its way through the loss: 16 bits, then 32 for the cast, the log-probabilities and their gradient, and 16
# for the gradient of the product. The last two replace the first.
LOGIT_BYTES = 16

# Fully sharded layers held whole at a time: the one at work, and the next, fetched ahead.
GATHERED_LAYERS = 2

# 32-bit temporaries of an Adam step that works on all parameters at once (torch's foreach implementation).
OPTIMIZER_TEMPORARY = 4


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one worker by purpose, and what its device holds beside.

    ``reserved``: fragments and caches of the allocator, which it gives back before it fails; ``context``: driver and
    communicators.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    reserved: float
    context: float

    @property
    def allocated(self) -> float:
        """What the framework's allocator reports as its peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient

    @property
    def needed(self) -> float:
        """What has to fit into the device."""
        return self.allocated + self.context

    @property
    def device(self) -> float:
        """What nvidia-smi shows at the peak."""
        return self.allocated + self.reserved + self.context


class MemoryModel:
    """Predicts the peak memory of the workers of one piece of work; remembers what layouts have in common."""

    def __init__(self, work: Work, accelerator: Accelerator, runtime: Runtime, constants: Constants) -> None:
        self.work, self.accelerator, self.runtime, self.constants = work, accelerator, runtime, constants
        self._kept: dict[tuple[int, Recompute, bool], tuple[float, float]] = {}

    def peak(self, layout: Layout) -> Memory:
        """The worker that needs most. First, middle and last pipeline ranks differ, so each kind is looked at."""
        return max(self.of_ranks(layout).values(), key=lambda memory: memory.allocated)

    def of_ranks(self, layout: Layout) -> dict[int, Memory]:
        """By pipeline rank: those that may differ."""
        return {rank: self.of_rank(layout, rank) for rank in distinct_stages(layout.pipeline)}

    def of_rank(self, layout: Layout, rank: int) -> Memory:
        """Peak bytes on a worker of one pipeline rank."""
        model, precision = self.work.model, self.runtime.precision
        layers = layout.layers_on(model, rank)
        last = rank == layout.pipeline - 1
        held = parameters_of_rank(model, layout, rank, layers)
        layer = model.layer_parameters / layout.tensor
        embedding = model.embedding_parameters / layout.tensor
        shards = layout.shards

        parameters, gradients, optimizer = sharded_states(precision, layout, held)

        tokens = layout.micro_batch * self.work.sequence / layout.context
        kept, whole = self._kept_bytes(layout)
        flight = in_flight(layout, rank, layout.micro_batches(self.work.global_batch))
        factor = self.constants.activation_factor
        activations = factor * flight * layers * kept * tokens

        working = factor * whole * tokens if layout.recompute == "full" else 0.0
        if layout.recompute == "selective":
            working = factor * (whole - kept) * tokens
        if last:
            working = max(working, LOGIT_BYTES * tokens * model.vocab / layout.tensor)
        if layout.zero >= 2 and shards > 1:
            gathered = GATHERED_LAYERS * layer
            gathered = max(gathered, layer + embedding) if rank == 0 or last else gathered
            working += precision.activation * gathered * (2 if layout.zero == 3 else 1)
        step = OPTIMIZER_TEMPORARY * held / (shards if layout.zero else 1)
        transient = max(working, step - activations)
        allocated = parameters + gradients + optimizer + activations + transient
        return Memory(
            parameters,
            gradients,
            optimizer,
            activations,
            transient,
            reserved=self.constants.reserved_share * allocated,
            context=self.accelerator.context_bytes,
        )

    def _kept_bytes(self, layout: Layout) -> tuple[float, float]:
        key = (layout.tensor, layout.recompute, layout.sequence_parallel)
        if key not in self._kept:
            software = self.runtime.engine or Software(unfused_attention=self.runtime.attention == "unfused")
            self._kept[key] = kept_bytes_per_token(
                self.work.model, layout, self.runtime.precision, self.work.sequence, software
            )
        return self._kept[key]
