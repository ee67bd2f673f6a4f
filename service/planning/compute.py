"""Seconds of computation: matrix products, attention and memory-bound kernels of one layer, the head, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from rubato.arithmetic import Decoder
from service.planning.constants import Constants
from service.planning.shapes import Accelerator, Layout, Runtime

# Bytes an unfused attention moves for each score, forward and backward: the scaled and masked softmax, its dropout
# and the reads and writes of the products around them, in 16 bits (counted for Megatron's fused softmax kernels).
SCORE_BYTES_FORWARD = 11
SCORE_BYTES_BACKWARD = 18

# FLOPs of the backward of fused attention over its forward: five products against two (arXiv:2307.08691, section 4.1).
FLASH_BACKWARD = 2.5

# FlashAttention 2 is twice as fast as 1 (arXiv:2307.08691, abstract).
FLASH1_SHARE = 0.5

# Bytes one logit moves, forward and backward, 16-bit logits and a loss in 32 bits. Eager: cast 6, log-softmax 8, its
# gradient 4 + 12, cast back 6. Compiled: read and reduced in one kernel, written back in another.
LOSS_BYTES = 36
LOSS_BYTES_COMPILED = 12

# Adam in mixed precision: reads gradient, weight and two moments, writes three of them and the 16-bit copy.
OPTIMIZER_BYTES = 30


@dataclass(frozen=True)
class Passes:
    """Seconds of a part's forward, and of its backward without recomputation."""

    forward: float
    backward: float

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Kernels:
    """Kernels of one accelerator under one runtime."""

    accelerator: Accelerator
    runtime: Runtime
    constants: Constants

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return self.runtime.precision.activation

    @property
    def rate(self) -> float:
        """FLOPs a second of a large matrix product in training."""
        best = self.accelerator.matmul_flops if self.element == 2 else self.accelerator.single_flops
        return best * self.constants.matmul_share

    def product(self, rows: float, columns: float, depth: float) -> float:
        """Seconds of one matrix product [rows, depth] x [depth, columns].

        Its FLOPs at the sustained rate, or its operands through memory where that takes longer (the roofline model,
        Williams et al. 2009); then the result's way back, which a kernel begins when a tile is done and so hides least:
        the share of peak falls with the depth of the product.
        """
        flops = 2.0 * rows * columns * depth
        operands = self.move(self.element * (rows * depth + depth * columns))
        return max(flops / self.rate, operands) + self.move(self.element * rows * columns)

    def linear(self, tokens: float, inputs: float, outputs: float) -> Passes:
        """A linear layer: backward is two products of the same size."""
        once = self.product(tokens, outputs, inputs)
        return Passes(once, 2 * once)

    def move(self, moved: float) -> float:
        """Seconds to read and write so many bytes of device memory in element-wise kernels."""
        return moved / (self.accelerator.memory_bandwidth * self.constants.memory_bandwidth_share)

    def attention(self, sequences: float, queries: float, keys: float, heads: float, head_dim: int) -> Passes:
        """The core of causal attention: ``sequences`` x ``heads`` x [queries, keys] scores.

        Fused kernels skip what the mask hides, half of the square; unfused ones compute it and move every score.
        Products whose head dimension is not a multiple of 8 cannot be loaded 16 bytes at a time and leave the matrix
        units (NVIDIA, Matrix Multiplication Background, section on Tensor Core requirements).
        """
        scores = sequences * heads * queries * keys
        flops = 4.0 * scores * head_dim
        if self.runtime.attention != "unfused":
            generation = FLASH1_SHARE if self.runtime.attention == "flash1" else 1.0
            ceiling = 1.0 if self.runtime.attention == "native" else self.accelerator.older_kernel_share
            peak = self.accelerator.peak_flops if self.element == 2 else self.accelerator.single_flops
            forward = flops / 2 / (peak * ceiling * generation * self.constants.attention_share)
            return Passes(forward, FLASH_BACKWARD * forward)
        vector = self.accelerator.vector_flops * self.constants.matmul_share
        products = flops / (self.rate if head_dim % 8 == 0 else min(self.rate, vector))
        return Passes(
            products + self.move(SCORE_BYTES_FORWARD * scores),
            2 * products + self.move(SCORE_BYTES_BACKWARD * scores),
        )


def layer(kernels: Kernels, model: Decoder, layout: Layout, sequence: int) -> tuple[Passes, Passes]:
    """One layer's whole passes for one micro-batch on one rank, and the part of them that is the attention core."""
    local = sequence / layout.context
    tokens = layout.micro_batch * local
    shared = tokens / layout.tensor if layout.sequence_parallel else tokens  # what norms and residuals see
    heads, ffn = model.heads / layout.tensor, model.ffn / layout.tensor
    attended = model.query_hidden / layout.tensor
    qkv = attended + 2 * model.kv_hidden / layout.tensor
    core = kernels.attention(layout.micro_batch, local, sequence, heads, model.head_size)
    products = (
        kernels.linear(tokens, model.hidden, qkv)
        + kernels.linear(tokens, attended, model.hidden)
        + kernels.linear(tokens, model.hidden, ffn * (model.mlp_matrices - 1))
        + kernels.linear(tokens, ffn, model.hidden)
    )
    return products + core + _element_wise(kernels, model, tokens, shared, ffn, qkv), core


def last_product(kernels: Kernels, model: Decoder, layout: Layout, sequence: int) -> float:
    """Seconds of a layer's last product and residual, whose results nothing in the layer's backward needs."""
    tokens = layout.micro_batch * sequence / layout.context
    shared = tokens / layout.tensor if layout.sequence_parallel else tokens
    residual = kernels.move(3 * kernels.element * model.hidden * shared)
    return kernels.product(tokens, model.hidden, model.ffn / layout.tensor) + residual


def _element_wise(kernels: Kernels, model: Decoder, tokens: float, shared: float, ffn: float, qkv: float) -> Passes:
    """Norms, residuals, activation function and gradient sums, in reads and writes of one element.

    Forward: two norms of 2, two residuals of 3, the activation (2, or 3 with a gate). Backward: a norm's 3, the sum
    where the residual branches 3, the activation 3 or 5. A compiler fuses a residual into its norm. Gated models turn
    queries and keys by rotary embeddings, 8 each way unless in one kernel; unfused attention transposes heads into and
    out of batches.
    """
    compiled = kernels.runtime.compiled
    wide = ffn * tokens
    narrow = model.hidden * shared
    forward = (6 if compiled else 10) * narrow + (3 if model.gated else 2) * wide
    backward = (8 if compiled else 12) * narrow + (5 if model.gated else 3) * wide
    both = 2 * qkv * tokens if kernels.runtime.attention == "unfused" else 0.0
    if model.gated:
        fused = compiled or kernels.runtime.attention == "native"
        both += (2 if fused else 8) * qkv * tokens * (1 - model.kv_hidden / (model.query_hidden + 2 * model.kv_hidden))
    return Passes(kernels.move(kernels.element * (forward + both)), kernels.move(kernels.element * (backward + both)))


def head(kernels: Kernels, model: Decoder, layout: Layout, sequence: int) -> Passes:
    """The final norm, the logits and the loss of one micro-batch on the last pipeline rank."""
    tokens = layout.micro_batch * sequence / layout.context
    vocabulary = model.vocab / layout.tensor
    a_logit = LOSS_BYTES_COMPILED if kernels.runtime.compiled else LOSS_BYTES
    loss = kernels.move(a_logit * tokens * vocabulary)
    return kernels.linear(tokens, model.hidden, vocabulary) + Passes(loss / 2, loss / 2)


def gradient_sum(kernels: Kernels, parameters: float) -> float:
    """Seconds to add one micro-batch's weight gradients to those kept: read, and the kept read and written."""
    return kernels.move((kernels.element + 2 * kernels.runtime.precision.gradient) * parameters)


def optimizer(kernels: Kernels, parameters: float) -> float:
    """Seconds of one Adam step over the parameters this rank updates."""
    return kernels.move(OPTIMIZER_BYTES * parameters)
