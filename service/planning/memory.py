"""The memory model: peak bytes on a worker of each pipeline rank, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass

from service.planning.constants import Constants
from service.planning.shapes import Accelerator, Layout, Model, Runtime, Work

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


def kept_bytes_per_token(model: Model, layout: Layout, runtime: Runtime, sequence: int) -> tuple[float, float]:
    """Bytes a layer keeps of each token for its backward: with this layout's recomputation, and with none.

    Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, for any MLP: inputs of the norms and of the matrix
    products, masks of two dropouts where attention is unfused, queries, keys, values and the attention's output, what
    enters and leaves the activation function. Unfused attention keeps 5 bytes a score: softmax, its dropout and mask.
    """
    element = runtime.precision.activation
    unfused = runtime.attention == "unfused"
    shared: float = model.hidden * (4 * element + (2 if unfused else 0))
    mlp = (4 if model.gated else 2) * model.ffn
    split = element * (2 * (model.hidden + model.kv_hidden) + mlp) / layout.tensor
    scores = 5 * element / 2 * model.heads * sequence / layout.tensor if unfused else 0.0
    if layout.sequence_parallel:
        shared /= layout.tensor
    whole = shared + split + scores
    checkpoint = element * model.hidden / (layout.tensor if layout.sequence_parallel else 1)
    kept = {"none": whole, "selective": shared + split, "full": checkpoint}[layout.recompute]
    return kept, whole


def in_flight(layout: Layout, rank: int, micro_batches: int) -> float:
    """Micro-batches a pipeline rank holds activations of at its peak, in units of all its layers.

    1F1B holds as many as there are stages from here on (arXiv:2104.04473, section 2.2.1); interleaving starts
    2 (p - i - 1) + (v - 1) p chunks early (Megatron's schedule); GPipe holds all of them (arXiv:1811.06965).
    """
    if layout.pipeline == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.virtual_stages > 1:
        chunks = 2 * (layout.pipeline - rank - 1) + (layout.virtual_stages - 1) * layout.pipeline + 1
        return min(chunks / layout.virtual_stages, micro_batches)
    return min(layout.pipeline - rank, micro_batches)


class MemoryModel:
    """Predicts the peak memory of the workers of one piece of work; remembers what layouts have in common."""

    def __init__(self, work: Work, accelerator: Accelerator, runtime: Runtime, constants: Constants) -> None:
        self.work, self.accelerator, self.runtime, self.constants = work, accelerator, runtime, constants
        self._kept: dict[tuple[int, str, bool], tuple[float, float]] = {}

    def peak(self, layout: Layout) -> Memory:
        """The worker that needs most. First, middle and last pipeline ranks differ, so each kind is looked at."""
        return max(self.of_ranks(layout).values(), key=lambda memory: memory.allocated)

    def of_ranks(self, layout: Layout) -> dict[int, Memory]:
        """By pipeline rank: the first, the second and the last; ranks between hold no more than the second."""
        ranks = {0, min(1, layout.pipeline - 1), layout.pipeline - 1}
        return {rank: self.of_rank(layout, rank) for rank in sorted(ranks)}

    def of_rank(self, layout: Layout, rank: int) -> Memory:
        """Peak bytes on a worker of one pipeline rank."""
        model, precision = self.work.model, self.runtime.precision
        layers = layout.layers_on(model, rank)
        first, last = rank == 0, rank == layout.pipeline - 1
        embeddings = int(first) + int(last and not (first and model.tied))
        layer = model.layer_parameters / layout.tensor
        embedding = model.embedding_parameters / layout.tensor
        held = layers * layer + embeddings * embedding
        shards = layout.shards

        parameters = precision.parameter * held / (shards if layout.zero == 3 else 1)
        gradients = (precision.gradient + precision.computed_gradient) * held / (shards if layout.zero >= 2 else 1)
        optimizer = precision.optimizer * held / (shards if layout.zero else 1)

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
            gathered = max(gathered, layer + embedding) if embeddings else gathered
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
            self._kept[key] = kept_bytes_per_token(self.work.model, layout, self.runtime, self.work.sequence)
        return self._kept[key]
