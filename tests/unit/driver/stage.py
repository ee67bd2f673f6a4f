"""A cluster of threads: replicas whose workers speak to the rendezvous as the engine does, and train nothing."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from workers.driver.assignment import Assignment
from workers.driver.rendezvous import protocol
from workers.driver.rendezvous.client import RendezvousLostError, RendezvousMembership
from workers.driver.replicas import Ending
from workers.engine.membership import Generation, Standing

STEP_S = 0.005
RESTART_S = 0.2


class GenerationBrokenError(Exception):
    """A member of the generation is gone."""


class Actor(threading.Thread):
    """One worker: joins, steps together with the others of its generation, reports, leaves when all agree to."""

    def __init__(self, troupe: Troupe, place: int) -> None:
        super().__init__(daemon=True)
        self.troupe = troupe
        self.place = place
        self.killed = threading.Event()
        self.broken = threading.Event()
        self.step: int | None = None
        self.saved: int | None = None
        self.reported: int | None = None

    def run(self) -> None:
        stage, assignment = self.troupe.stage, self.troupe.assignment
        hello = protocol.Hello(
            secret=assignment.secret,
            replica=assignment.replica,
            incarnation=self.troupe.incarnation,
            pipeline=0,
            tensor=self.place,
            pid=stage.pid(self),
            node_ip="127.0.0.1",
            node_id="node",
        )
        try:
            membership = RendezvousMembership(assignment.host, assignment.port, hello, beat_s=0.2)
        except RendezvousLostError:  # the driver has ended
            return
        if stage.refusal:
            membership.crashed("user", stage.refusal)
            membership.close(goodbye=False)
            return
        try:
            if not membership.released:
                self.live(membership)
            membership.close()
        except GenerationBrokenError:
            if not self.killed.is_set():
                membership.crashed("replica", "connection closed by peer")
            membership.close(goodbye=False)
        except RendezvousLostError:
            membership.close(goodbye=False)

    def live(self, membership: RendezvousMembership) -> None:
        stage = self.troupe.stage
        while (generation := membership.join(Standing(self.step))) is not None:
            self.broken.clear()
            membership.on_broken(self.broken.set)
            if generation.step is None:
                self.step = stage.checkpoint
            elif generation.source is not None or self.step is None:
                self.step = generation.step
            try:
                if self.train(membership, generation):
                    membership.finish()
                    return
            except GenerationBrokenError:
                if self.troupe.dead.is_set():
                    raise
        if membership.save_requested():
            self.saved = self.step

    def train(self, membership: RendezvousMembership, generation: Generation) -> bool:
        """Whether all steps are done; False when the generation is to be left."""
        stage = self.troupe.stage
        assert self.step is not None
        self.report(membership, generation)  # whoever reported before may have died before it did
        while self.step < stage.steps:
            leaving = f"leave-{self.step}"
            if membership.boundary_requested():
                generation.store.set(leaving, "yes")
            self.meet(generation, f"step-{self.step}")
            self.step += 1
            membership.report("step", {"step": self.step})
            self.report(membership, generation)
            self.record(membership)
            if generation.store.check([leaving]):
                return False
            stage.may_step(self.step)
        return True

    def report(self, membership: RendezvousMembership, generation: Generation) -> None:
        if generation.replica == self.place == 0 and self.step and self.step != self.reported:
            membership.report("metric", metric(self.step, generation))
            self.reported = self.step

    def record(self, membership: RendezvousMembership) -> None:
        steps = membership.profile_requested()
        if steps is not None and self.troupe.stage.records:
            data = {"steps": [self.step, steps], "files": [f"profile/{self.troupe.assignment.replica}-{self.place}"]}
            membership.report("event", {"kind": "profile.saved", "message": "recorded", "data": data})

    def meet(self, generation: Generation, key: str) -> None:
        """A collective of all workers of the generation; the replica votes on how it went."""
        size = generation.data * self.troupe.stage.size
        generation.store.add(key, 1)
        met = True
        while generation.store.add(key, 0) < size and met:
            met = not (self.killed.is_set() or self.troupe.dead.is_set() or self.broken.is_set())
            time.sleep(STEP_S / 5)
        if not self.troupe.vote(self.place, met):
            raise GenerationBrokenError


class Troupe:
    """The workers of a replica that started together."""

    def __init__(self, stage: Stage, assignment: Assignment) -> None:
        self.stage = stage
        self.assignment = assignment
        self.incarnation = secrets.token_hex(4)
        self.dead = threading.Event()
        self._votes = [True] * stage.size
        self._everybody = threading.Barrier(stage.size)
        self.actors = [Actor(self, place) for place in range(stage.size)]

    def kill(self) -> None:
        """SIGKILL of the last worker; its mates notice."""
        self.actors[-1].killed.set()
        self.dead.set()
        self._everybody.abort()

    def vote(self, place: int, met: bool) -> bool:
        """Whether all have met, which all hear alike."""
        try:
            self._votes[place] = met
            self._everybody.wait()
            outcome = all(self._votes)
            self._everybody.wait()  # nobody votes anew before all have counted
        except threading.BrokenBarrierError:
            return False
        return outcome

    def play(self) -> None:
        for actor in self.actors:
            actor.start()
        for actor in self.actors:
            actor.join()


class Stage:
    """Stands for Ray. ``limit`` is the step beyond which nobody goes until it is raised."""

    def __init__(self, *, size: int, steps: int, room: int = 8) -> None:
        self.size = size
        self.steps = steps
        self.room = room
        self.checkpoint = 0
        self.refusal: str | None = None
        self.limit = steps
        self.troupes: dict[str, Troupe] = {}
        self.starts: list[str] = []
        self.ended: Callable[[Ending], None] = lambda ending: None
        self._pids: dict[int, Actor] = {}
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._fits: list[threading.Thread] = []
        self.closed = False
        self.records = True

    # What the driver sees of it.

    @property
    def running(self) -> bool:
        return bool(self._running)

    def alive(self, name: str) -> bool:
        return name in self._running

    def start(self, assignment: Assignment) -> None:
        self._running.add(assignment.replica)
        self.starts.append(assignment.replica)
        self._fits.append(threading.Thread(target=self._fit, args=(assignment,), daemon=True))
        self._fits[-1].start()

    def forget(self, name: str) -> None:
        self._running.remove(name)

    def shortage(self, available: Any) -> str | None:
        return None if available["CPU"] >= self.size else "no room"

    def without_one(self, available: Any) -> dict[str, float]:
        return {"CPU": available["CPU"] - self.size}

    def available(self) -> dict[str, float]:
        return {"CPU": float(self.room - self.size * len(self.troupes))}

    def _fit(self, assignment: Assignment) -> None:
        name = assignment.replica
        if self.available()["CPU"] < self.size:
            self.ended(Ending(name, "unplaced", "no room"))
            return
        while True:
            troupe = self.troupes[name] = Troupe(self, assignment)
            troupe.play()
            if not troupe.dead.is_set() or self.closed:
                break
            time.sleep(RESTART_S)
        del self.troupes[name]
        self.ended(Ending(name, "returned", ""))

    # What a test does.

    def pid(self, actor: Actor) -> int:
        with self._lock:
            pid = 100 + len(self._pids)
            self._pids[pid] = actor
            return pid

    def kill(self, *names: str) -> None:
        """Each of these replicas loses a worker."""
        for name in names:
            self.troupes[name].kill()

    def close(self) -> None:
        """Takes everybody off the stage: what runs into the end of the process takes the process down."""
        self.closed = True
        for troupe in list(self.troupes.values()):
            troupe.kill()
        for fit in self._fits:
            fit.join()

    def may_step(self, step: int) -> None:
        while step >= self.limit and step < self.steps and not any(t.dead.is_set() for t in self.troupes.values()):
            time.sleep(STEP_S)
        time.sleep(STEP_S)


def metric(step: int, generation: Generation) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 1 / step,
        "grad_norm": 1.0,
        "lr": 0.1,
        "tokens": 10 * step,
        "tokens_per_s": 5.0,
        "step_s": STEP_S,
        "mfu": None,
        "generation": generation.number,
        "data": generation.data,
        "validation_loss": None,
    }
