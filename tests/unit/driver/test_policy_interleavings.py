"""What holds in every order of events: arrivals, kills in the middle of a step, scaling, the passing of time."""

from __future__ import annotations

import random

import pytest
from policy_world import Worker, World

from workers.driver.rendezvous.current import Patience
from workers.driver.rendezvous.members import Incarnation, State
from workers.driver.rendezvous.policy import Policy

SIZE = 2
NAMES = ("a", "b", "c")
EVENTS = 600


class Walk:
    """A random walk through what can happen. `World.check_formed` asserts on each generation, `check` on each event."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(Policy(SIZE, patience=Patience(batch=1, assemble=5, leave=60)), SIZE)
        self.starting: dict[str, Incarnation] = {}
        self.committing: dict[int, bool] = {}
        self.world.want(*NAMES[: self.random.randint(1, 3)])

    def step(self) -> None:
        """One event, likely ones more often."""
        events = {
            self.train: 30,
            self.worker_arrives: 30,
            self.worker_is_ready: 40,
            self.worker_departs: 20,
            self.mate_of_a_dead_worker_is_taken_down: 20,
            self.replica_leaves_a_broken_generation: 40,
            self.time_passes: 10,
            self.worker_is_killed: 4,
            self.scale: 3,
        }
        (event,) = self.random.choices(list(events), list(events.values()))
        event()
        self.check()

    def worker_arrives(self) -> None:
        """The workers of a replica come one by one, once those of before are gone."""
        name = self.random.choice(NAMES)
        incarnation = self.starting.get(name)
        if incarnation is None:
            if name not in self.world.wanted or any(self.of(name)):
                return
            self.world.tokens += 1
            incarnation = self.starting[name] = Incarnation(name, str(self.world.tokens))
        worker = self.world.arrive(incarnation, len(self.of(name)))
        if len(self.world.mates(worker)) == SIZE:
            del self.starting[name]

    def worker_is_ready(self) -> None:
        workers = [w for w in self.world.workers.values() if not w.waiting and w.order is None and not w.released]
        if workers:
            self.world.ready(self.random.choice(workers))

    def worker_departs(self) -> None:
        workers = [worker for worker in self.world.workers.values() if worker.released]
        if workers:
            worker = self.random.choice(workers)
            self.starting.pop(worker.incarnation.replica, None)
            self.world.depart(worker)

    def worker_is_killed(self) -> None:
        workers = list(self.world.workers.values())
        if workers:
            victim = self.random.choice(workers)
            self.starting.pop(victim.incarnation.replica, None)
            self.world.kill(victim)

    def mate_of_a_dead_worker_is_taken_down(self) -> None:
        workers = [
            worker
            for worker in self.world.workers.values()
            if worker.incarnation not in self.starting.values() and not self.world.intact(worker)
        ]
        if workers:
            self.world.kill(self.random.choice(workers))

    def scale(self) -> None:
        self.world.want(*self.random.sample(NAMES, self.random.randint(1, 3)))

    def time_passes(self) -> None:
        self.world.advance(self.random.choice([0.5, 1.0, 5.0]))

    def train(self) -> None:
        if self.healthy():
            self.world.train()

    def replica_leaves_a_broken_generation(self) -> None:
        """Its workers vote, so they leave alike.

        Either the break came before the commit: nobody has stepped, some are prepared. Or in the middle of it:
        everybody was prepared, and some have stepped.
        """
        workers = [w for w in self.world.workers.values() if w.broken and w.order and self.world.intact(w)]
        if not workers:
            return
        worker = self.random.choice(workers)
        assert worker.order
        committing = self.committing.setdefault(worker.order.number, self.random.random() < 0.5)
        step, ahead = worker.state.step or 0, self.random.random() < 0.5
        if committing and ahead:
            state = State(step + 1, False, {"norm": float(step + 1)})
        else:
            state = State(step, committing or ahead, worker.state.commit)
        for mate in self.world.mates(worker):
            mate.state = state
            self.world.ready(mate)

    def of(self, name: str) -> list[Worker]:
        return [worker for worker in self.world.workers.values() if worker.incarnation.replica == name]

    def healthy(self) -> bool:
        """Whether a generation is whole, so that its collectives go through."""
        members = self.world.current()
        return (
            bool(members)
            and len(members) == len(self.world.formed[-1].keys)
            and all(worker.order is not None and not worker.broken for worker in members)
        )

    def check(self) -> None:
        world = self.world
        if self.healthy():
            assert len({worker.state.step for worker in world.current()}) == 1, "a generation holds one state"
        elif world.formed and any(key not in world.workers for key in world.formed[-1].keys):
            left = [worker for worker in world.current() if worker.order is not None and world.intact(worker)]
            assert all(worker.broken for worker in left), "whoever lost a member of its generation knows"
        training = [w for w in world.workers.values() if w.order is not None and world.intact(w)]
        assert training or not world.held(), "nobody with state waits in vain"
        ready = [n for n in world.wanted if len(self.of(n)) == SIZE and all(w.waiting for w in self.of(n))]
        changing = any(w.told_to_leave or w.broken for w in world.workers.values())
        assert not ready or changing or world.policy.deadline is not None, "whoever is ready is let in"


@pytest.mark.parametrize("seed", range(60))
def test_every_generation_goes_on_from_the_highest_step_that_is_left(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(EVENTS):
        walk.step()


def test_the_walks_get_somewhere() -> None:
    """The seeds above would prove nothing if they never met the cases that matter."""
    formed, rolled, broken, steps = [], 0, 0, 0
    for seed in range(60):
        walk = Walk(seed)
        for _ in range(EVENTS):
            before = len(walk.world.formed)
            walk.step()
            if len(walk.world.formed) > before:
                rolled += any(w.order.roll_forward for w in walk.world.current() if w.order)
        formed += walk.world.formed
        broken += sum(ended.cause is not None for ended in walk.world.ended)
        steps += walk.world.committed
    assert sum(len(one.replicas) == 3 for one in formed) > 50
    assert sum(bool(one.healed) for one in formed) > 100
    assert sum(one.step is None for one in formed[60:]) > 20
    assert rolled > 5
    assert broken > 100
    assert steps > 500
