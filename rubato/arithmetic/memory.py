"""Bytes a rank holds of a model in training: parameters, gradients, optimizer states, activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rubato.arithmetic.decoder import Decoder
from rubato.arithmetic.precision import Precision

Recompute = Literal["none", "selective", "full"]


class Spread(Protocol):
    """How a model is laid out, as far as it decides what a rank holds.

    ``shards``: ranks over which ZeRO splits what they would all hold. ``zero``: 0 splits nothing, 1 optimizer states, 2
    gradients too, 3 parameters too. ``sequence_parallel``: between blocks the sequence is split over the tensor axis.
    """

    @property
    def tensor(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def virtual_stages(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def shards(self) -> int: ...
    @property
    def recompute(self) -> Recompute: ...
    @property
    def sequence_parallel(self) -> bool: ...


@dataclass(frozen=True)
class Software:
    """How a layer is computed, as far as it decides what it keeps for its backward.

    ``unfused_attention``: the scores. ``gathered_inputs``: under sequence parallelism, the inputs of the products as
    gathered over the tensor axis (DTensor), which are otherwise gathered once more in backward (Megatron).
    ``composed_norms``: an RMSNorm of several operations (torch on CPU), which keeps the normalised values too.
    ``autocast``: the residual stream stays in 32 bits, and every product casts its own copy of its input
    (torch.autocast, which remembers those of weights alone).
    ``selects_products``: selective recomputation keeps a layer's input and what products, attention and collectives
    gave (torch's selective checkpointing); else it is attention's scores that are recomputed, and nothing else
    (Megatron).
    """

    unfused_attention: bool = False
    gathered_inputs: bool = False
    composed_norms: bool = False
    autocast: bool = False
    selects_products: bool = False


ENGINE_GPU = Software(gathered_inputs=True, selects_products=True)
"""Rubato's engine on a GPU."""
ENGINE_CPU = Software(gathered_inputs=True, composed_norms=True, selects_products=True)
"""Rubato's engine on a CPU."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by what they are for, at the moment when it holds most activations."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory_of_rank(
    decoder: Decoder,
    spread: Spread,
    precision: Precision,
    *,
    sequence: int,
    micro_batches: int,
    rank: int,
    layers: int,
    software: Software = Software(),
) -> RankMemory:
    """What one pipeline rank holds; the ranks of its tensor and data axes hold as much.

    The logits and the temporaries of a layer at work are not in it.

    Args:
        sequence: positions of a sequence on this rank.
        micro_batches: of the replica in a step.
        rank: place on the pipeline axis, from 0.
        layers: how many this rank holds.
        software: what decides which of a layer's values are kept.
    """
    kept, _ = kept_bytes_per_token(decoder, spread, precision, sequence, software)
    return RankMemory(
        *sharded_states(precision, spread, parameters_of_rank(decoder, spread, rank, layers)),
        activations=in_flight(spread, rank, micro_batches) * layers * kept * spread.micro_batch * sequence,
    )


def sharded_states(precision: Precision, spread: Spread, held: float) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states on a rank that holds so many parameters.

    ZeRO as in Rajbhandari et al. 2020 (arXiv:1910.02054), section 5: each stage divides one more of the states by the
    number of shards.
    """
    gradient = precision.gradient + precision.computed_gradient
    return (
        precision.parameter * held / (spread.shards if spread.zero == 3 else 1),
        gradient * held / (spread.shards if spread.zero >= 2 else 1),
        precision.optimizer * held / (spread.shards if spread.zero else 1),
    )


def parameters_of_rank(decoder: Decoder, spread: Spread, rank: int, layers: int) -> float:
    """Parameters on a rank of a pipeline before ZeRO splits them; the vectors are counted as if split like matrices.

    The first rank has the embedding and the positions, the last one the head and the norm before it; a tied embedding
    is on both, and once where they are the same.
    """
    first, last = rank == 0, rank == spread.pipeline - 1
    held = layers * decoder.layer_parameters
    held += decoder.embedding_parameters * (first + (last and not (first and decoder.tied)))
    held += decoder.position_parameters * first + decoder.norm_parameters * last
    return held / spread.tensor


def kept_bytes_per_token(
    decoder: Decoder, spread: Spread, precision: Precision, sequence: int, software: Software = Software()
) -> tuple[float, float]:
    """Bytes a layer keeps of each token for its backward: with this layout's recomputation, and with none.

    Korthikanti et al. 2022 (arXiv:2205.05198), equations 1 to 4, for any MLP: inputs of the norms and of the matrix
    products, masks of two dropouts where attention is unfused, queries, keys, values and the attention's output, what
    enters and leaves the activation function. Unfused attention keeps 5 bytes a score: softmax, its dropout and mask.
    Sums that are one number a token, of norms and of softmax, are left out.
    """
    element, hidden = precision.activation, float(decoder.hidden)
    composed = software.composed_norms and decoder.biases != "all"  # a LayerNorm is one operation everywhere
    stream = 4 if software.autocast else element
    norms = stream * hidden * (4 if composed else 2)
    casts = 2 + (1 if decoder.gated else 0) if software.autocast else 0  # of queries, keys, values; of gate and up
    inputs = element * hidden * (2 + casts)
    masks = hidden * 2 if software.unfused_attention else 0.0
    scores = 5 * element / 2 * decoder.heads * sequence if software.unfused_attention else 0.0
    attended = decoder.query_hidden + decoder.kv_hidden
    heads = element * attended * 2
    if decoder.qk_norm:
        heads += element * attended * (2 if composed else 1)
    mlp = element * decoder.ffn * (4 if decoder.gated else 2)

    by_sequence = spread.tensor if spread.sequence_parallel else 1
    shared = (norms + masks) / by_sequence + inputs / (1 if software.gathered_inputs else by_sequence)
    split = (heads + mlp) / spread.tensor
    whole = shared + split + scores / spread.tensor
    layer_input = stream * hidden / by_sequence
    selected = shared + split
    if software.selects_products:
        gathered = 2 * hidden * (1 + 1 / by_sequence) if spread.tensor > 1 else 0.0  # what goes in and comes out
        products = 2 * decoder.query_hidden + 2 * decoder.kv_hidden + (decoder.mlp_matrices - 1) * decoder.ffn
        selected = layer_input + element * (products / spread.tensor + 2 * hidden + gathered)
    kept = {"none": whole, "selective": selected, "full": layer_input}[spread.recompute]
    return kept, whole


def in_flight(spread: Spread, rank: int, micro_batches: int) -> float:
    """Micro-batches a pipeline rank holds activations of at its peak, in units of all its layers.

    1F1B holds as many as there are stages from here on (arXiv:2104.04473, section 2.2.1); interleaving starts
    2 (p - i - 1) + (v - 1) p chunks early (Megatron's schedule); GPipe holds all of them (arXiv:1811.06965).
    """
    if spread.pipeline == 1:
        return 1.0
    if spread.schedule == "gpipe":
        return micro_batches
    if spread.virtual_stages > 1:
        chunks = 2 * (spread.pipeline - rank - 1) + (spread.virtual_stages - 1) * spread.pipeline + 1
        return min(chunks / spread.virtual_stages, micro_batches)
    return min(spread.pipeline - rank, micro_batches)
