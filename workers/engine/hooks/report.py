"""Hands over what each step came to."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict

from rubato.spec import JobSpec
from workers.engine.hooks.hook import Session
from workers.engine.hooks.record import Record
from workers.engine.membership import Generation, Membership
from workers.engine.mesh import ReplicaMesh
from workers.engine.optim.norms import layer_groups
from workers.engine.watch import Throughput, flops_per_token, model_flops_utilization, peak_flops
from workers.engine.watch.gradients import GradientWatch
from workers.engine.watch.memory import memory_of

log = logging.getLogger(__name__)


class Report:
    """Hands the record of each step over; the first worker of the first replica does."""

    every = 1
    at_end = False

    def __init__(self, spec: JobSpec, membership: Membership, mesh: ReplicaMesh) -> None:
        self._spec = spec
        self._membership = membership
        self._mesh = mesh
        self._throughput = Throughput()
        self._generation: int | None = None
        self._reported: int | None = None
        self._gradients = GradientWatch(layer_groups(spec.model.layers))
        self._first = mesh.pipeline.index == mesh.tensor.index == 0
        self._peak = peak_flops(mesh.device.torch_device, spec.train.precision) if self._first else 0.0

    def __call__(self, session: Session) -> None:
        if session.generation.replica == 0 and session.record is not None:
            self.tell(session.generation, session.record)

    def tell(self, generation: Generation, record: Record) -> None:
        """Hands over what a step of this generation came to, once; the first worker of a replica does."""
        if not self._first or (record.again and record.step == self._reported):
            return
        if self._generation != generation.number:
            self._generation = generation.number
            self._throughput.restart()
        rate = self._throughput.add(record.step_tokens, record.step_s)
        self._reported = record.step
        if record.skipped:
            self._tell_skipped(record)
        else:
            self._tell_metric(generation, record, rate)
            for event in self._gradients.see(record.step, record.gradient_norms) if record.gradient_norms else ():
                self._membership.report("event", event)
        loss = record.validation_loss
        if loss is not None:
            message = f"validation loss {loss:.4f} (perplexity {perplexity(loss):.2f}) at step {record.step}"
            data = {"step": record.step, "loss": loss, "perplexity": perplexity(loss)}
            event = {"kind": "validation", "message": message, "data": data}
            self._membership.report("event", event)

    def _tell_metric(self, generation: Generation, record: Record, rate: float) -> None:
        memory = memory_of(self._mesh.device.torch_device)
        metric = asdict(record) | {
            "tokens_per_s": rate,
            "flops_per_s": rate * flops_per_token(self._spec),
            "mfu": model_flops_utilization(rate, self._spec, self._mesh.layout(generation.data).world_size, self._peak),
            "memory_bytes": memory.now,
            "memory_peak_bytes": memory.peak,
            "generation": generation.number,
            "data": generation.data,
        }
        del metric["step_tokens"], metric["loss_scale"]
        due = record.step % self._spec.monitor.every == 0
        if not due:
            del metric["gradient_norms"]
        self._membership.report("metric", metric)
        if due or record.step == self._spec.train.steps:
            log.info(
                "step %d/%d  loss %.4f  gradient norm %.3g  lr %.3g  %.0f tokens/s  MFU %.1f %%  step %.3g s, of it "
                "data wait %.2g and exposed communication %.2g  memory %.0f MB, at most %.0f",
                record.step, self._spec.train.steps, record.loss, record.grad_norm, record.lr, rate,
                100 * metric["mfu"], record.step_s, record.data_s or 0.0, record.exposed_comm_s or 0.0,
                memory.now / 1e6, memory.peak / 1e6,
            )  # fmt: skip

    def _tell_skipped(self, record: Record) -> None:
        what = "gradients" if record.loss is not None else "loss"
        message = f"step {record.step} was skipped: its {what} overflowed or came to no number"
        data = {"step": record.step, "loss": record.loss, "loss_scale": record.loss_scale}
        if self._spec.train.precision == "fp16":
            message += f"; the loss scale is {record.loss_scale} now"
        self._membership.report("event", {"kind": "step.skipped", "message": message, "data": data})


def perplexity(loss: float) -> float:
    """Of a mean loss in nats a token."""
    return math.exp(min(loss, 700.0))
