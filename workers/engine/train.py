"""The loop: what a worker does, step by step, through generations that come and go.

A step is atomic over all workers of a job. Each computes the gradients of its samples, sums them with its peers on the
data axis and is then *prepared*; all commit together, and only then does anybody step the optimizer. Whenever the data
axis breaks, a worker therefore holds the state of the last step or of the one before with the gradients to catch up,
and the next generation goes on from there (``membership.py``).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rubato.layout import fewest_micro_batches, micro_batches, sample_range
from rubato.spec import JobSpec
from workers.engine.checkpoint import CheckpointStore
from workers.engine.checkpoint.recovery import Recovery
from workers.engine.comm.exchange import Start
from workers.engine.comm.reduction import Reduction
from workers.engine.compiled import CompileReport, keep_in
from workers.engine.data import Ahead, Sampler, data_step, open_corpus
from workers.engine.hooks import Checkpoint, Hook, Record, Report, Session, busy, due, watching
from workers.engine.membership import Generation, Membership, Standing
from workers.engine.mesh import ReplicaMesh
from workers.engine.optim import GroupNorms, LossScale, NotFiniteError, clip_factor, learning_rate
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.data import DataAxisError, DataGroup
from workers.engine.parallel.pipeline import Runner
from workers.engine.parallel.tensor import NOT_COUNTED
from workers.engine.parallel.zero import exchange_of
from workers.engine.run import RunDirectory
from workers.engine.state import TrainingState
from workers.engine.watch.spikes import SpikeGuard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """Where a worker was when it ended.

    Attributes:
        step: optimizer steps its state holds; None: it never had one.
        finished: whether that is all of them; else it was let go before.
        tokens: real tokens trained on since the first step of the job.
        loss: of the last step, nats a token; None when it took part in none.
    """

    step: int | None
    finished: bool
    tokens: int
    loss: float | None


def train(
    spec: JobSpec,
    *,
    membership: Membership,
    mesh: ReplicaMesh,
    run: RunDirectory,
    fence: Callable[[], bool] = lambda: True,
    warm_up_steps: int = 2,
) -> TrainResult:
    """Trains until the job is done or this worker is let go.

    Args:
        spec: what to train.
        membership: tells which generation this worker belongs to.
        mesh: its place in its replica.
        run: where the corpus and the checkpoints are.
        fence: whether this attempt may still write checkpoints.
        warm_up_steps: steps on made-up data before the first generation, so that nobody has to wait for the first,
            slow ones of a newcomer. 0 where nobody waits.

    Raises:
        RubatoError: the corpus or a checkpoint cannot be used.
        RuntimeError: a mate of this worker's replica is gone.
    """
    worker = Worker(spec, membership, mesh, run, fence)
    worker.warm_up(warm_up_steps)
    finished = False
    while not finished and (generation := membership.join(worker.standing())) is not None:
        finished = worker.live(generation)
    if finished:
        membership.finish()
    elif membership.save_requested() and worker.state.step is not None:
        worker.end_early()
    worker.close()
    step = worker.state.step
    return TrainResult(step, step == spec.train.steps, worker.state.tokens, worker.loss)


class Worker:
    """One rank of the job: its share of the model, and what it knows of the last step."""

    def __init__(
        self, spec: JobSpec, membership: Membership, mesh: ReplicaMesh, run: RunDirectory, fence: Callable[[], bool]
    ) -> None:
        self.spec, self.membership, self.mesh = spec, membership, mesh
        self.device = mesh.device.torch_device
        self.nominal_tokens = spec.train.global_batch * spec.data.sequence_length
        self.sampler = Ahead(Sampler(spec, open_corpus(spec, run.corpus)))
        keep_in(run.compiled)
        self.share = ModelShare(spec, mesh)
        self.sharded, scale = spec.memory.zero > 0, LossScale(spec.train)
        self.state = TrainingState(self.share.parameters, spec.optimizer, scale, sharded=self.sharded)
        self.exchange = exchange_of(spec, self.share, self.state, mesh.tensor.group)
        self.buckets = self.exchange.buckets
        self.norms = GroupNorms(self.share.parameters, self.share.counted, spec.model.layers, self.device)
        self.guard = SpikeGuard(spec.faults.spike)
        self.reduction = Reduction(spec, mesh, self.buckets, self.state)
        keep_last = spec.checkpoint.keep_last
        self.checkpoints = CheckpointStore(run.checkpoints, keep_last=keep_last, fence=fence, report=self.tell)
        self.recovery = Recovery(self.checkpoints, membership, mesh, self.share, self.state, self.exchange)
        self.checkpoint = Checkpoint(spec, membership, mesh, self.checkpoints, self.state)
        self.report = Report(spec, membership, mesh)
        watched = watching(spec, membership, mesh, run, self.sampler, self.share, self.state, self.report)
        compiled = CompileReport(self.share.compilation, mesh, self.tell)
        self.hooks: list[Hook] = [*watched, compiled, self.reduction, self.checkpoint]
        self.prepared: dict[str, float] | None = None
        self.commit: dict[str, float] | None = None
        self.generation: Generation | None = None
        self.data: DataGroup | None = None

    def end_early(self) -> None:
        """Saves the state, and tells of the step that led to it, which no hook was called for any more."""
        generation, record = self.generation, self.record(again=True)
        assert generation is not None  # nobody has state before the first one
        if record is not None:
            self.report.tell(generation, record)
        self.checkpoint.save(generation.data, self.loss)

    @property
    def loss(self) -> float | None:
        """Of the last step, when one was taken since the last checkpoint was loaded."""
        return self.commit.get("loss") if self.commit else None

    def standing(self) -> Standing:
        """What this worker brings to the next generation: nothing where it holds a shard, which is no state alone."""
        return Standing(None) if self.sharded else Standing(self.state.step, self.prepared is not None, self.commit)

    def live(self, generation: Generation) -> bool:
        """One generation: True when all steps are done, False when another generation is to be joined."""
        self.close()  # whoever joined a new generation is done with the old one
        fail = partial(self.membership.failed, generation)
        self.data = data = DataGroup(generation, self.mesh, fail, self.spec.memory.shard_over)
        self.membership.on_broken(data.abort)
        try:
            session, leave = self.enter(generation, data), False
            while True:
                for hook in self.hooks:
                    if due(hook, self.state.done, self.spec.train.steps):
                        hook(session)
                if self.state.done >= self.spec.train.steps:
                    data.max([0.0])  # nobody ends before the first replica has saved
                    return True
                if leave:
                    self.checkpoint(session)  # the next generation has other shards
                    return False
                leave = self.step(session)
                if leave and not self.sharded:
                    self.reduction.share_out(data)
                    return False
        except DataAxisError as error:
            log.warning("%s", error)
            if self.prepared is None:
                self.buckets.renew()
            return False
        finally:
            self.membership.on_broken(None)

    def enter(self, generation: Generation, data: DataGroup) -> Session:
        """Comes to hold the state that the generation goes on from."""
        data.form()
        if generation.roll_forward:
            self.update(generation.commit or self.prepared or {})
        self.prepared = None
        self.reduction.form(data, generation, self.tell)
        self.generation = generation
        with busy(self.membership, "state"):
            if generation.step is None:
                self.recovery.restore(data)
            elif generation.source is not None:
                self.state.receive(data, generation.source, generation.step, self.buckets.mb)
        self.commit = generation.commit
        shape, batch = self.spec.parallelism, self.spec.train.global_batch
        samples = sample_range(shape, batch, generation.data, generation.replica)
        counts = micro_batches(shape, batch, generation.data)
        runner = self.exchange.runner(self.share, counts, generation.replica)
        rows = max(counts) * shape.micro_batch if self.sharded else len(samples)
        return Session(generation, data, samples, rows, runner, self.record(again=True))

    def step(self, session: Session) -> bool:
        """One optimizer step. True when all have agreed to leave the generation after it."""
        began = time.perf_counter()
        tokens_BS, targets_BS = self.sampler.batch(data_step(self.state.done, self.state.jumped), session.samples)
        fetched = time.perf_counter()
        start = self.reduction.start(session.data, self.state.scale.value)
        loss = self.backward(session.runner, tokens_BS, targets_BS, start)
        sums = torch.stack([loss, (targets_BS != NOT_COUNTED).sum().to(loss)])
        exposed_s = session.data.sum([sums])  # and waits for the buckets, which are on their way since backward
        self.share.sum_tied(self.buckets.gradients)

        # Over the replica: each stage knows its own gradients, the last one the loss.
        squares = self.norms.squares(self.buckets.gradients)
        loss_here = float(sums[0]) if self.mesh.tensor.index == 0 else 0.0
        asked = float(self.membership.boundary_requested())
        *squares, loss_sum, asked = self.mesh.sum([*squares, loss_here, asked])
        squares = self.exchange.totals(squares)
        tokens = max(1.0, float(sums[1]))  # no answer may be in a whole batch, and then none counts
        weight = self.nominal_tokens / tokens
        norms = self.norms.by_group(squares, weight / self.state.scale.value)
        found = {
            "loss": loss_sum * weight,
            "grad_norm": sum(squares) ** 0.5 * weight / self.state.scale.value,
            "tokens": tokens,
            "exposed_comm_s": exposed_s,
            "data_s": fetched - began,
            **self.reduction.traffic,
            "seconds": time.perf_counter() - began,  # since whoever reports next may not have been there
        }
        # What is missing is not finite: the step will be skipped.
        self.prepared = commit = {name: value for name, value in found.items() if math.isfinite(value)}
        commit["spike"] = float(self.guard.judges(commit.get("loss"), self.state.losses))

        leave, commit["spike"] = session.data.max([asked, commit["spike"]])  # the commit
        if commit["spike"] and self.guard.rolls_back:
            self.prepared = self.commit = None
            with busy(self.membership, "state"):
                self.recovery.roll_back(session.data, self.guard, commit["loss"])
        else:
            self.update(commit)
            self.prepared = None
            commit["seconds"] = time.perf_counter() - began
        session.record = self.record(gradient_norms=norms)
        return leave > 0

    def backward(self, runner: Runner, tokens_BS: Tensor, targets_BS: Tensor, start: Start) -> Tensor:
        """Gradients of these samples into the buckets, which `start` is given; losses' sum over ``nominal_tokens``."""
        batch = tokens_BS.to(self.device), targets_BS.to(self.device)
        with self.exchange.reducing(start):
            return runner.train(*batch, self.state.scale.value, self.exchange.last_pass)

    def update(self, commit: dict[str, float]) -> None:
        """Steps the optimizer with the gradients in the buckets, as all have committed to; skips what is not finite."""
        if commit.get("spike"):
            event = self.guard.pass_over(self.state, commit)
            if self.data is not None and self.data.first:
                self.membership.report("event", event)
        elif "loss" in commit and "grad_norm" in commit:
            weight = self.nominal_tokens / commit["tokens"] / self.state.scale.value
            self.buckets.scale(weight * clip_factor(commit["grad_norm"], self.spec.train.clip_norm))
            lr = learning_rate(self.spec.optimizer, self.state.done, self.spec.train.steps)
            self.state.update(lr, int(commit["tokens"]))
            self.state.losses.add(commit["loss"])
        else:
            self.state.skip(int(commit["tokens"]))
            if self.state.scale.failing >= self.spec.faults.nonfinite_steps:
                raise NotFiniteError(self.state.done, self.state.scale.failing)
        self.commit = commit
        self.membership.report("step", {"step": self.state.done})

    def warm_up(self, steps: int) -> None:
        """Takes steps of the real shapes whose result is dropped."""
        shape, length = self.spec.parallelism, self.spec.data.sequence_length
        count = fewest_micro_batches(shape)
        tokens_BS = torch.zeros(count * shape.micro_batch, length, dtype=torch.int64)
        if steps:
            runner = self.exchange.runner(self.share, [count], 0)
            self.share.initialise(self.state.weights)
            self.state.begin()
        for _ in range(steps):
            self.backward(runner, tokens_BS, tokens_BS, lambda bucket: None)
            self.share.sum_tied(self.buckets.gradients)
            self.norms.squares(self.buckets.gradients)
            self.state.update(lr=0.0, tokens=0)
        self.state.drop()

    def record(self, **more: Any) -> Record | None:
        """What the last commit came to, with what else is known of its step."""
        return None if self.commit is None else Record.of(self.spec, self.state, self.commit, **more)

    def tell(self, kind: str, message: str, data: dict[str, Any]) -> None:
        """Reports an event."""
        self.membership.report("event", {"kind": kind, "message": message, "data": data})

    def close(self) -> None:
        """Frees the data group, which everybody has left."""
        if self.data is not None:
            self.data.close()
            self.data = None
