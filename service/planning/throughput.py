"""The time model: seconds of a step from kernels, collectives, the pipeline's bubble and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from service.planning import compute
from service.planning.communication import Ring, transfer
from service.planning.compute import Kernels, Passes
from service.planning.constants import Constants
from service.planning.shapes import Cluster, Layout, Runtime, Work


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer for one micro-batch on one rank, by cause; none of them depends on the data degree."""

    kernels: Passes
    recomputation: float
    gradient_sum: float
    gap: Passes
    communication: Passes

    @property
    def forward(self) -> float:
        return self.kernels.forward + self.gap.forward + self.communication.forward

    @property
    def backward(self) -> float:
        """With the forward that is done again, and the sum of the weights' gradients."""
        again = self.recomputation + self.gradient_sum
        return self.kernels.backward + again + self.gap.backward + self.communication.backward

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step, and where they go along the slowest pipeline rank; the parts add up."""

    computation: float
    recomputation: float
    gaps: float
    replica_communication: float
    data_communication: float
    bubble: float
    optimizer: float

    @property
    def seconds(self) -> float:
        work = self.computation + self.recomputation + self.gaps
        return work + self.replica_communication + self.data_communication + self.bubble + self.optimizer


class TimeModel:
    """Predicts steps of one piece of work on one kind of cluster; remembers what layouts have in common."""

    def __init__(self, work: Work, cluster: Cluster, runtime: Runtime, constants: Constants) -> None:
        self.work, self.cluster, self.runtime, self.constants = work, cluster, runtime, constants
        self._kernels = Kernels(cluster.accelerator, runtime, constants)
        self._layers: dict[tuple[int, int, int, str, bool], tuple[LayerTime, Passes]] = {}

    def layer(self, layout: Layout) -> tuple[LayerTime, Passes]:
        """One layer's seconds, and the head's, for one micro-batch."""
        key = (layout.tensor, layout.context, layout.micro_batch, layout.recompute, layout.sequence_parallel)
        if key not in self._layers:
            head = compute.head(self._kernels, self.work.model, layout, self.work.sequence)
            ends = Passes(self.constants.ends_s / 3, self.constants.ends_s * 2 / 3)
            self._layers[key] = self._layer(layout), head + ends
        return self._layers[key]

    def _layer(self, layout: Layout) -> LayerTime:
        model, k = self.work.model, self._kernels
        whole, core = compute.layer(k, model, layout, self.work.sequence)
        again = {"none": 0.0, "selective": core.forward, "full": whole.forward}[layout.recompute]
        if layout.recompute == "full" and self.runtime.early_stop:
            again -= compute.last_product(k, model, layout, self.work.sequence)
        blocking = self.constants.blocking_gap_s * layout.tensor
        gap = blocking if self.runtime.launch_blocking else self.constants.layer_gap_s
        gap += self.constants.tensor_gap_s if layout.tensor > 1 else 0.0
        forwards_in_backward = layout.recompute == "full"
        return LayerTime(
            kernels=whole,
            recomputation=again,
            gradient_sum=compute.gradient_sum(k, model.layer_parameters / layout.tensor),
            gap=Passes(gap / 3, gap * (3 if forwards_in_backward else 2) / 3),
            communication=self._replica_communication(layout, forwards_in_backward, whole.forward - core.forward),
        )

    def _replica_communication(self, layout: Layout, forwards_in_backward: bool, weights: float) -> Passes:
        """Tensor and context parallelism in one layer; ``weights`` are the seconds of its weights' gradients.

        Two all-reduces of the hidden states in each pass (arXiv:1909.08053, section 3), or an all-gather and a
        reduce-scatter of the same volume with sequence parallelism (arXiv:2205.05198, section 4.2.2). Ring attention
        passes keys and values around, and their gradients too on the way back (arXiv:2310.01889), behind attention.
        """
        model = self.work.model
        tokens = layout.micro_batch * self.work.sequence / layout.context
        element = self.runtime.precision.activation
        tensor = Ring(self.cluster, self.constants, layout.tensor, 1)
        once = 2 * tensor.reduce(element * tokens * model.hidden)
        if layout.context > 1:
            ring = Ring(self.cluster, self.constants, layout.context, layout.tensor)
            keys_and_values = 2 * element * tokens * layout.context * model.kv_hidden / layout.tensor
            around = self.constants.exposed_share * ring.gather(keys_and_values)
        else:
            around = 0.0
        redone = once / 2 if self.runtime.early_stop else once  # the second follows the last product
        again = redone + around if forwards_in_backward else 0.0
        shown = self.exposed(once, weights) if self.runtime.overlapped_tensor else once
        return Passes(once + around, shown + 2 * around + again)

    def exposed(self, communication: float, computation: float) -> float:
        """Seconds that show of communication which runs beside computation: a share, and what is longer whole."""
        share = self.constants.exposed_share
        return share * min(communication, computation) + max(0.0, communication - computation)

    def bound(self, layout: Layout) -> tuple[float, float]:
        """Seconds of a micro-batch on the slowest pipeline rank, and of the bubble, without any data axis."""
        layer, head = self.layer(layout)
        stages = self._stages(layout, layer.total, head.total)
        slowest = max(stages)
        return slowest, self._bubble(layout, stages)

    def _bubble(self, layout: Layout, stages: list[float]) -> float:
        """Seconds that the slowest rank waits; who computes meanwhile may have cores that the others leave."""
        waits = (sum(stages) - max(stages)) / layout.virtual_stages
        return waits * self.cluster.bubble_share(layout.pipeline)

    def _stages(self, layout: Layout, layer: float, head: float) -> list[float]:
        neighbour = self._pipeline_transfer(layout)
        stages = [count * layer + neighbour for count in layout.layers_of(self.work.model)]
        stages[-1] += head
        return stages

    def step(self, layout: Layout) -> StepTime:
        """Seconds of a step; layers that need not fit, or a batch that cannot be split so, are the caller's matter.

        A pipeline of stages with times t_i runs m micro-batches in m max(t) + (sum(t) - max(t)) / v with v virtual
        stages (arXiv:2104.04473, sections 2.2.1 and 2.2.2, with unequal stages).
        """
        model = self.work.model
        layer, head = self.layer(layout)
        per_rank = layout.layers_of(model)
        data = _DataAxis(self, layout, layer)
        stages = self._stages(layout, layer.total + data.per_layer, head.total + data.per_head)
        slowest = max(stages)
        micro_batches = layout.micro_batches(self.work.global_batch)
        last = stages[-1] == slowest
        layers = micro_batches * (per_rank[-1] if last else max(per_rank))
        heads = micro_batches if last else 0
        held = max(per_rank) * model.layer_parameters + model.embedding_parameters
        updated = held / layout.tensor / (layout.shards if layout.zero else 1)
        return StepTime(
            computation=layers * (layer.kernels.total + layer.gradient_sum) + heads * head.total,
            recomputation=layers * layer.recomputation,
            gaps=layers * layer.gap.total,
            replica_communication=layers * layer.communication.total + micro_batches * self._pipeline_transfer(layout),
            data_communication=layers * data.per_layer
            + heads * data.per_head
            + data.per_step(held / layout.tensor, max(per_rank)),
            bubble=self._bubble(layout, stages),
            optimizer=compute.optimizer(self._kernels, updated),
        )

    def _pipeline_transfer(self, layout: Layout) -> float:
        """Seconds a micro-batch's hidden states travel in and their gradients back, a tensor rank's part of them."""
        if layout.pipeline == 1:
            return 0.0
        stride = layout.tensor * (layout.shards if layout.data_inner else layout.context)
        tokens = layout.micro_batch * self.work.sequence / layout.context
        message = self.runtime.precision.activation * tokens * self.work.model.hidden / layout.tensor
        seconds = 2 * transfer(self.cluster, self.constants, stride, message) + self.constants.handover_s
        return layout.virtual_stages * seconds

    def tokens_per_s(self, layout: Layout) -> float:
        """Tokens a second of all workers together."""
        return self.work.tokens / self.step(layout).seconds


class _DataAxis:
    """Communication over the data axis: per layer and micro-batch from ZeRO 2 on, once a step below it.

    ZeRO 3 gathers a layer's parameters for its forward and again for its backward, ZeRO 2 once; both reduce-scatter its
    gradients (arXiv:1910.02054, section 7). What a layer's computation is long enough to hide is exposed by a share,
    what is longer is exposed whole. Gradients reduced once a step hide behind the last backward where there is no
    pipeline; in one, the last backward of the first stage is what the step ends with.
    """

    def __init__(self, model: TimeModel, layout: Layout, layer: LayerTime) -> None:
        self._exposed = model.exposed
        share = model.constants.exposed_share
        self._precision = model.runtime.precision
        self._layout, self._layer = layout, layer
        stride = layout.tensor * (1 if layout.data_inner else layout.pipeline)
        self._ring = Ring(model.cluster, model.constants, layout.shards, stride)
        self.per_layer = self.per_head = 0.0
        if layout.shards == 1 or layout.zero < 2:
            return
        sizes = model.work.model
        gathers = 1 if layout.zero == 3 else 0
        gather, scatter = self._gather_scatter(sizes.layer_parameters / layout.tensor)
        self.per_layer = self._exposed(gather, layer.forward)
        self.per_layer += self._exposed(gathers * gather + scatter, layer.backward)
        gather, scatter = self._gather_scatter(sizes.embedding_parameters / layout.tensor)
        self.per_head = share * ((1 + gathers) * gather + scatter)

    def _gather_scatter(self, parameters: float) -> tuple[float, float]:
        return (
            self._ring.gather(self._precision.activation * parameters),
            self._ring.gather(self._precision.wire * parameters),
        )

    def per_step(self, held: float, layers: int) -> float:
        """Exposed seconds of reducing ``held`` parameters' gradients, and gathering what ZeRO 1 has updated."""
        if self._layout.shards == 1 or self._layout.zero >= 2:
            return 0.0
        scatter = self._ring.gather(self._precision.wire * held)
        updated = self._precision.parameter if self._layout.zero else self._precision.wire
        communication = scatter + self._ring.gather(updated * held)
        if self._layout.pipeline > 1:
            return communication
        return self._exposed(communication, layers * self._layer.backward)
