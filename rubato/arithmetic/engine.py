"""The peak of a rank of Rubato's engine: what it holds throughout, and the moment of a step in which most comes on top.

Beyond `memory_of_rank`, whose figures any software shares, it counts what this engine adds: gradients twice, as they
add up in the parameters and in the buckets they are reduced and applied in; the logits on their way through the loss;
a layer at work; what ZeRO has under way (``workers/engine/parallel/zero.py``); copies of the weights in 16 bits, one
for each pass in flight; and what pipeline stages receive, for every micro-batch of a step at once, as
torch.distributed.pipelining allocates it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rubato.arithmetic.decoder import Decoder
from rubato.arithmetic.memory import (
    RankMemory,
    Software,
    Spread,
    in_flight,
    kept_bytes_per_token,
    parameters_of_rank,
    sharded_states,
)
from rubato.arithmetic.precision import Precision

# Room for a layer's gradients on their way, as they are sent and as they arrive; it is kept from layer to layer.
REDUCED_COPIES = 2
# Room for fully sharded layers on their way: the one that arrives, and the next.
GATHERED_COPIES = 2

# A logit on its way through the loss: as it comes, its logarithm of probability and its gradient, all in 32 bits; split
# over a tensor axis there is one copy more.
LOGIT_BYTES, SPLIT_LOGIT_BYTES = 12, 16
# A weight that autocast has rounded for a pass, which keeps it for its backward pass.
CAST_BYTES = 2
# An element of what pipeline stages exchange where the residual stream is of 32 bits.
STREAM_BYTES = 4


@dataclass(frozen=True)
class EnginePeak(RankMemory):
    """Bytes of one rank at its peak. ``transient``: beside what is held for long, at the worst moment of a step."""

    transient: float

    @property
    def total(self) -> float:
        return super().total + self.transient


def engine_peak(
    decoder: Decoder,
    spread: Spread,
    precision: Precision,
    *,
    sequence: int,
    micro_batches: int,
    rank: int = 0,
    layers: int | None = None,
    every: int = 1,
    loss_chunks: int = 1,
    software: Software,
) -> EnginePeak:
    """What one pipeline rank holds at its peak.

    Args:
        sequence: positions of a sequence.
        micro_batches: of the replica in a step.
        rank: place on the pipeline axis, from 0.
        layers: how many this rank holds; None: all.
        every: one layer in so many is recomputed as the layout says, from the first on.
        loss_chunks: parts that logits and loss of a micro-batch are computed in.
        software: what decides which of a layer's values are kept.
    """
    layers = decoder.layers if layers is None else layers
    recomputed = -(-layers // every)
    last = rank == spread.pipeline - 1
    held = parameters_of_rank(decoder, spread, rank, layers)
    layer = decoder.layer_parameters / spread.tensor
    rest = held - layers * layer  # what is in no layer: whole from first to last use
    parameters, buckets, optimizer = sharded_states(precision, spread, held)
    if spread.zero == 3:
        parameters += precision.parameter * (rest + GATHERED_COPIES * layer)
    if spread.zero == 1:
        buckets /= spread.shards
    if spread.zero:
        buckets += precision.gradient * REDUCED_COPIES * layer
    accumulated = precision.gradient * (rest if spread.zero > 1 else held) if micro_batches > 1 else 0.0

    tokens = spread.micro_batch * sequence
    kept, whole = (each * tokens for each in kept_bytes_per_token(decoder, spread, precision, sequence, software))
    flight = in_flight(spread, rank, micro_batches)
    activations = flight * (recomputed * kept + (layers - recomputed) * whole)
    cast = CAST_BYTES if software.autocast else 0
    head_weights = decoder.embedding_parameters / spread.tensor if last else 0.0
    weights = decoder.layer_weights / spread.tensor
    kept_casts = layers if spread.recompute == "none" else layers - recomputed
    activations += flight * cast * (kept_casts * weights + head_weights)

    # Moments of a backward pass: at the head, in the last layer, and at the end when what is in no layer is reduced.
    element, gradient = precision.activation, precision.gradient
    working = element * tokens * (3 * decoder.ffn / spread.tensor + 2 * decoder.hidden)
    working += whole - kept + cast * weights if (layers - 1) % every == 0 else 0.0
    computed = gradient * layer if spread.zero > 1 or micro_batches == 1 else 0.0
    gathered = precision.parameter * layer if spread.zero == 3 else 0.0
    norms = 2 if software.composed_norms else 1
    logits = decoder.vocab / spread.tensor / loss_chunks
    a_logit = LOGIT_BYTES if spread.tensor == 1 else SPLIT_LOGIT_BYTES + (2 if element == 2 else 0)
    head = tokens * (element * (1 + norms) * decoder.hidden + a_logit * logits) if last else 0.0
    looked_up = 0.0
    if rank == 0 and spread.tensor > 1:  # DTensor makes the gradient of a lookup whole before it shares it out
        embedding = decoder.embedding_parameters
        accumulated += gradient * embedding * (1 - 1 / spread.tensor) if micro_batches > 1 else 0.0
        looked_up = (gradient + (2 if precision.parameter == 2 else 0)) * embedding - activations / flight
    moments = [
        head,
        working + gathered + computed,
        looked_up,
        gradient * rest * REDUCED_COPIES * (spread.zero > 0) - activations,
    ]
    stream = STREAM_BYTES if software.autocast else element
    neighbours = 2 * spread.virtual_stages - (rank == 0) - last
    received = stream * tokens * decoder.hidden / spread.tensor * micro_batches * neighbours
    return EnginePeak(parameters, buckets + accumulated, optimizer, activations, max(moments) + received)
