"""The driver of an attempt: compares what is wanted with what is there, and acts on the difference."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from typing import Any

import ray

from rubato.layout import possible_sizes
from rubato.resources import DriverState, Restarts, SyncReply, SyncRequest
from rubato.spec import JobSpec
from workers.driver.assignment import Assignment
from workers.driver.chronicle import Chronicle
from workers.driver.crew import Crew
from workers.driver.executioner import Executioner
from workers.driver.faults import Budget, Casualties, Verdict
from workers.driver.journal import Journal
from workers.driver.leftovers import end_own_runs
from workers.driver.operations import Command
from workers.driver.outcome import Outcome
from workers.driver.profiling import Profiling
from workers.driver.rendezvous.orders import Ended, Formed
from workers.driver.rendezvous.policy import Policy
from workers.driver.rendezvous.server import Link, Loss, Rendezvous
from workers.driver.replicas import Replicas
from workers.driver.sync import ControlPlane
from workers.driver.view import View
from workers.engine.run import RunDirectory

log = logging.getLogger(__name__)

TICK_S = 1.0
LEAVE_S = 60.0
"""How long workers that were let go may take to end; the rest end with this process."""
END_PATIENCE_S = 60.0
RUNS_END_S = 15.0


class Driver:
    """Runs one attempt of a job to its end.

    Args:
        run: the run directory.
        spec: what to train.
        attempt, epoch: which attempt this is.
        workers: how many there are to be at first.
        hardware_restarts: of ``faults.hardware``, those that earlier attempts have spent.
    """

    def __init__(
        self,
        run: RunDirectory,
        spec: JobSpec,
        *,
        attempt: str,
        epoch: int,
        workers: int,
        hardware_restarts: int = 0,
    ) -> None:
        self._run = run
        self._spec = spec
        self._attempt = attempt
        self._epoch = epoch
        self._size = spec.parallelism.replica_size
        self._journal = Journal(run, lambda: run.holds(epoch), board=spec.monitor.tensorboard)
        self._view = View(spec)
        self._profiling = Profiling(self._journal, self._view.rank)
        self._casualties = Casualties()
        self._budget = Budget(spec.faults.hardware, before=hardware_restarts)
        self._workers = workers
        self._end_by = math.inf
        self._outcome: Outcome | None = None
        self._ending: Outcome | None = None
        self._recovering: str | None = None
        self._command: Command | None = None
        self._chronicle = Chronicle(self._journal)
        self._wake = asyncio.Event()
        self._control: ControlPlane | None = None
        self._secret = secrets.token_urlsafe(24)

    def connect(self, url: str, token: str) -> None:
        """Reports to a control plane and obeys it."""
        self._control = ControlPlane(url, self._attempt, token, self._journal, self.describe, self)

    async def run(self) -> Outcome:
        """Runs to the end. Afterwards the rendezvous is closed; workers that are left end with this process."""
        self._loop = asyncio.get_running_loop()
        self._rendezvous = self._make_rendezvous()
        replicas = Replicas(self._spec, self._attempt, self._run.root / "ray")
        self._crew = Crew(replicas, self._assign, self._journal, self._changed, self._fail)
        self._crew.want(self._workers // self._size, ())
        self._address = await self._rendezvous.start()
        data = {"attempt": self._attempt, "epoch": self._epoch, "workers": self._workers}
        self._journal.event("attempt.started", f"attempt {self._epoch} begins, for {self._workers} workers", data)
        talking = asyncio.create_task(self._control.run(), name="control-plane") if self._control else None
        try:
            self._outcome = await self._pursue()
        finally:
            if talking:
                talking.cancel()
                await asyncio.gather(talking, return_exceptions=True)
            await self._rendezvous.close()
        self._tell_outcome(self._outcome)
        if self._journal.fenced:
            self._outcome = Outcome(None, "fenced", "a newer attempt has claimed the run directory")
        return self._outcome

    async def end_runs(self) -> bool:
        """Ends the runs of replicas that still go on, as after a failure; whether all have ended."""
        end_by = self._loop.time() + RUNS_END_S
        while self._crew.running and self._loop.time() < end_by:
            await asyncio.to_thread(end_own_runs)  # more than once, since one may only just have begun
            await self._wait_for_change()
        return not self._crew.running

    async def tell_end(self) -> None:
        """Tells the control plane how it ended, with patience: the run directory has it all, so not for ever."""
        if self._control:
            if self._outcome and self._outcome.state:
                await self._control.tell_end(END_PATIENCE_S)
            await self._control.close()

    def drain(self, cause: str, operation: str | None = None) -> None:
        """Ends the attempt at the next step boundary, with a checkpoint."""
        if self._ending is None and self._outcome is None:
            self._ending = Outcome(DriverState.CANCELLED, "cancelled", cause)
            self._crew.let_go()
            self._begin(Command(self._journal, "cancel", operation)).enter("accepted", cause)
            self._rendezvous.stop()
            self._changed()

    def force(self, cause: str) -> None:
        """Ends the attempt at once; what was trained since the last checkpoint is lost."""
        self._end(Outcome(DriverState.CANCELLED, "cancelled", cause))

    def describe(self) -> SyncRequest:
        """How things stand, for the control plane."""
        state, code, message = self._state()
        formed = self._view.formed
        return SyncRequest(
            epoch=self._epoch,
            state=state,
            reason_code=code,
            reason_message=message,
            generation=formed.number if formed else self._journal.last_generation,
            layout=self._view.layout,
            members=self._view.members(self._rendezvous.links()),
            restarts=Restarts(hardware=self._budget.spent, spike=self._journal.rollbacks),
        )

    # What is wanted against what is there.

    async def _pursue(self) -> Outcome:
        self._rendezvous.want(self._crew.wanted)
        while self._outcome is None:
            self._wake.clear()
            if self._overtaken():
                return Outcome(None, "fenced", "a newer attempt has claimed the run directory")
            self._journal.write()
            self._profiling.look(self._rendezvous.links())
            if self._ending is None:
                await self._crew.start_missing()
            elif not (self._crew.joined or self._rendezvous.links()) or self._loop.time() > self._end_by:
                return self._ending
            await self._wait_for_change()
        return self._outcome

    async def _wait_for_change(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()
        self._wake.clear()

    def _overtaken(self) -> bool:
        try:
            return not self._run.holds(self._epoch)
        except OSError as error:
            log.warning("cannot tell whether a newer attempt runs: %s", error)
            return False

    def _scale(self, count: int, operation: str | None) -> None:
        growing = count > len(self._crew.wanted)
        formed = self._view.formed
        self._crew.want(count, formed.replicas if formed else ())
        self._view.keep_lost(self._crew.wanted)
        workers = count * self._size
        command = self._begin(Command(self._journal, "scale", operation))
        command.enter("accepted", f"{workers} workers are wanted", {"workers": workers})
        if growing:
            command.enter("starting", f"replicas start: {', '.join(self._crew.wanted)} are to train")
        self._rendezvous.want(self._crew.wanted)
        self._check_scale()
        self._changed()

    def _begin(self, command: Command) -> Command:
        if self._command:
            self._command.enter("superseded", f"another {command.kind} came before this was done")
        self._command = command
        return command

    def _check_scale(self) -> None:
        """A scale is done when the wanted replicas have trained a step together."""
        command = self._command
        if command and command.kind == "scale" and self._chronicle.proved and self._as_wanted():
            command.enter("done", f"{len(self._crew.wanted) * self._size} workers train")

    def _as_wanted(self) -> bool:
        formed = self._view.formed
        return self._rendezvous.running and formed is not None and set(formed.replicas) == set(self._crew.wanted)

    def _state(self) -> tuple[DriverState, str, str]:
        if self._outcome and self._outcome.state:
            return self._outcome.state, self._outcome.code, self._outcome.message
        formed = self._view.formed
        waits = self._crew.waits()
        if formed is None:
            return DriverState.STARTING, "starting", "; ".join(waits) or "the first workers start"
        if self._ending:
            return DriverState.RUNNING, "ending", self._ending.message
        members = self._view.members(self._rendezvous.links())  # of a generation that broke not all are left
        training = sum(member.state == "training" for member in members)
        now = f"{training} of {len(self._crew.wanted) * self._size} wanted workers train"
        if self._as_wanted():
            return DriverState.RUNNING, "training", f"{len(formed.keys)} workers train"
        if self._recovering:
            return DriverState.RECOVERING, "worker_lost", "; ".join([self._recovering, now, *waits])
        return DriverState.RESIZING, "scaling", "; ".join([now, *waits])

    def _changed(self) -> None:
        self._wake.set()
        if self._control:
            self._control.tell()

    def _end(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or outcome
        self._crew.let_go()
        self._changed()

    def _fail(self, code: str, message: str) -> None:
        self._end(Outcome(DriverState.FAILED, code, message))

    def _tell_outcome(self, outcome: Outcome) -> None:
        if outcome.state is DriverState.FAILED:
            self._journal.event("attempt.failed", outcome.message, {"cause": outcome.message, "code": outcome.code})
        elif outcome.state is DriverState.CANCELLED and self._command and self._command.kind == "cancel":
            self._command.enter("done", outcome.message)

    # From the control plane.

    def wanted(self, reply: SyncReply) -> None:
        if reply.cancel == "force":
            self.force("cancelled at once, as the user asked")
        elif reply.cancel == "drain":
            self.drain("cancelled by the user", reply.operation)
        elif self._ending is None and self._outcome is None:
            self._profiling.order(reply.profile, self._rendezvous.links())
            count = reply.workers // self._size
            if reply.operation and self._knows(reply.operation):
                return
            if reply.workers not in self._spec.sizes:
                command = self._begin(Command(self._journal, "scale", reply.operation))
                command.enter("refused", f"this job cannot run on {reply.workers} workers")
            elif count != len(self._crew.wanted) or reply.operation:
                self._scale(count, reply.operation)

    def _knows(self, operation: str) -> bool:
        return self._command is not None and self._command.operation == operation

    def fenced(self, detail: str) -> None:
        self._end(Outcome(None, "fenced", detail))

    def control_unreachable(self, cause: str) -> None:
        self._journal.event("control.unreachable", f"the control plane is away ({cause}); training goes on")

    def control_reachable(self) -> None:
        self._journal.event("control.reachable", "the control plane is back")

    # From the rendezvous.

    def replica_in_trouble(self, replica: str, cause: str) -> None:
        self._crew.in_trouble(replica, cause)

    def worker_arrived(self, link: Link) -> None:
        self._crew.arrived(link.hello.replica)
        self._view.arrived(link)
        self._changed()

    def worker_ready(self, link: Link) -> None:
        whole = self._view.ready(link, self._rendezvous.links())
        if whole:
            self._journal.event("replica.ready", f"{whole.replica} is ready to train", {"replica": whole.replica})
            self._changed()

    def worker_departed(self, link: Link) -> None:
        self._view.departed(link)
        if not any(other.incarnation == link.incarnation for other in self._rendezvous.links()):
            message = f"{link.hello.replica} has ended as it was told to"
            self._journal.event("replica.released", message, {"replica": link.hello.replica})
        self._changed()

    def worker_lost(self, link: Link, loss: Loss) -> None:
        left = [other for other in self._rendezvous.links() if other.incarnation == link.incarnation]
        verdict = self._casualties.lost(link, loss, len(left))
        if verdict:
            self._judge(verdict)
        self._view.lost(link)
        self._changed()

    def _judge(self, verdict: Verdict) -> None:
        hello = verdict.link.hello
        name, rank = hello.replica, self._view.rank(verdict.link)
        message = f"{name} lost worker {hello.pid} at {hello.node_ip}: {verdict.cause}"
        data = {"replica": name, "pid": hello.pid, "rank": rank, "cause": verdict.cause, "fault": verdict.fault}
        self._journal.event("worker.lost", message, data)
        if self._ending or self._outcome or name not in self._crew.wanted:
            return
        if verdict.fault != "hardware":
            code = "user_error" if verdict.fault == "user" else "program_error"
            self._fail(code, verdict.cause)
            return
        self._recovering = message
        if self._budget.spend():
            self._journal.event("replica.restarting", f"{name} is started anew", {"replica": name})
        else:
            limit = self._budget.limit
            self._fail("too_many_losses", f"faults.hardware allows {limit} restarts, and now {message}")

    def reported(self, link: Link, topic: str, record: dict[str, Any]) -> None:
        if topic == "metric":
            self._journal.metric(record)
            self._changed()
        elif topic == "event":
            self._journal.event(record["kind"], record["message"], record.get("data"))
            self._profiling.heard(link, record)
            self._changed()
        elif topic == "step" and self._chronicle.stepped(link.key, record["step"], self._loop.time()):
            self._check_scale()
            self._changed()

    def boundary_asked(self, generation: int) -> None:
        command = self._command
        if command and command.kind == "scale":
            command.enter("regrouping", f"generation {generation} ends at the next step")
        elif command:
            command.enter("saving", f"generation {generation} ends at the next step, then the state is saved")
        self._changed()

    def generation_formed(self, formed: Formed) -> None:
        self._view.generation_formed(formed)
        self._chronicle.formed(formed)
        if self._as_wanted():
            self._recovering = None
        self._changed()

    def generation_ended(self, ended: Ended) -> None:
        self._chronicle.ended(ended)
        if ended.cause:
            self._recovering = self._recovering or f"generation {ended.number} broke: {ended.cause}"
        self._changed()

    def all_done(self) -> None:
        self._chronicle.finished(self._spec.train.steps, self._loop.time())
        self._check_scale()
        self._journal.event("training.finished", f"all {self._spec.train.steps} steps are done")
        self._ending = Outcome(DriverState.SUCCEEDED, "finished", f"all {self._spec.train.steps} steps are done")
        self._end_by = self._loop.time() + LEAVE_S
        self._crew.let_go()
        self._changed()

    def all_stopped(self, saved_by: str | None) -> None:
        log.info("stopped; the state was saved by %s", saved_by or "nobody")
        self._end_by = self._loop.time() + LEAVE_S
        self._changed()

    # How it is put together.

    def _make_rendezvous(self) -> Rendezvous:
        shape, batch = self._spec.parallelism, self._spec.train.global_batch
        degrees = [size // self._size for size in possible_sizes(shape, batch, 1, self._spec.workers.max)]
        policy = Policy(self._size, degrees=degrees, last_generation=self._journal.last_generation)
        executioner = Executioner()
        return Rendezvous(
            policy,
            self,
            kill=lambda link, cause: executioner.kill(link.hello.node_id, link.hello.pid, cause),
            host=ray.util.get_node_ip_address(),
            secret=self._secret,
            tensor=shape.tensor,
        )

    def _assign(self, name: str) -> Assignment:
        return Assignment.of(self._run, self._spec, self._epoch, name, self._address, self._secret)
