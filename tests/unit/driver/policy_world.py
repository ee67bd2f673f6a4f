"""Workers as the policy sees them: they train, vote, break, save and die by the engine's rules, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.driver.rendezvous.members import Incarnation, Member, State
from workers.driver.rendezvous.orders import (
    BoundaryOrder,
    BrokenOrder,
    Done,
    Ended,
    EvictOrder,
    Formed,
    FormOrder,
    Order,
    ReleaseOrder,
    Stopped,
)
from workers.driver.rendezvous.policy import Policy


@dataclass(eq=False)
class Worker:
    """A live process: ``state`` is what it truly holds, ``order`` the generation it is in."""

    key: int
    incarnation: Incarnation
    place: int
    state: State = field(default_factory=State)
    order: FormOrder | None = None
    waiting: bool = False
    told_to_leave: bool = False
    broken: bool = False
    released: bool = False
    saving: bool = False


class World:
    """Applies the orders of a policy to workers and checks, at each step, what must always hold.

    ``sharded``: replicas share one state out, and save it together before they leave a generation in agreement.
    """

    def __init__(self, policy: Policy, size: int, *, sharded: bool = False) -> None:
        self.policy = policy
        self.sharded = sharded
        self.size = size
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.keys = 0
        self.tokens = 0
        self.checkpoint = 0
        self.committed = 0
        self.formed: list[Formed] = []
        self.ended: list[Ended] = []
        self.done = False
        self.stopped: Stopped | None = None
        self.wanted: tuple[str, ...] = ()
        self.nodes: dict[str, str] = {}

    # What a test does.

    def want(self, *names: str) -> None:
        self.wanted = names
        self.apply(self.policy.want(names, self.now))

    def start(self, name: str, *, ready: bool = True) -> list[Worker]:
        self.tokens += 1
        incarnation = Incarnation(name, str(self.tokens))
        workers = [self.arrive(incarnation, place) for place in range(self.size)]
        if ready:
            for worker in workers:
                self.ready(worker)
        return workers

    def arrive(self, incarnation: Incarnation, place: int) -> Worker:
        self.keys += 1
        worker = self.workers[self.keys] = Worker(self.keys, incarnation, place)
        self.apply(
            self.policy.arrived(
                Member(worker.key, incarnation, place, self.nodes.get(incarnation.replica, "")), self.now
            )
        )
        if worker.key in self.workers and self.policy.group(worker.key).released:
            worker.released = True
        return worker

    def ready(self, worker: Worker) -> None:
        worker.order, worker.waiting, worker.told_to_leave, worker.broken = None, True, False, False
        if self.sharded:
            worker.state = State()  # a shard is none
        self.apply(self.policy.ready(worker.key, worker.state, self.now))

    def kill(self, worker: Worker) -> None:
        del self.workers[worker.key]
        self.apply(self.policy.lost(worker.key, self.now))

    def depart(self, worker: Worker) -> None:
        del self.workers[worker.key]
        self.apply(self.policy.departed(worker.key, self.now))

    def finish(self, worker: Worker) -> None:
        self.apply(self.policy.finished(worker.key, self.now))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.policy.tick(self.now))

    def stop(self) -> None:
        self.apply(self.policy.stop(self.now))

    # Generations.

    def current(self) -> list[Worker]:
        """The live workers of the newest generation, by rank."""
        if not self.formed:
            return []
        return [self.workers[key] for key in self.formed[-1].keys if key in self.workers]

    def intact(self, worker: Worker) -> bool:
        return len(self.mates(worker)) == self.size

    def mates(self, worker: Worker) -> list[Worker]:
        return [other for other in self.workers.values() if other.incarnation == worker.incarnation]

    def train(self, steps: int = 1) -> None:
        """All workers of the newest generation do steps together, and leave when they are told to."""
        for _ in range(steps):
            members = self.current()
            assert members
            assert all(worker.order and worker.order.number == self.formed[-1].number for worker in members)
            leaving = any(worker.told_to_leave for worker in members)
            step = (members[0].state.step or 0) + 1
            for worker in members:
                worker.state = State(step, False, {"norm": float(step)})
            self.committed = max(self.committed, step)
            if leaving:
                self.checkpoint = step if self.sharded else self.checkpoint
                for worker in members:
                    self.ready(worker)

    # Orders.

    def held(self) -> list[int]:
        """The steps of replicas that are whole, wait for a generation and were not let go."""
        found = []
        for incarnation in {worker.incarnation for worker in self.workers.values()}:
            group = [worker for worker in self.workers.values() if worker.incarnation == incarnation]
            if len(group) == self.size and all(worker.waiting and not worker.released for worker in group):
                steps = {worker.state.step for worker in group}
                if len(steps) == 1 and None not in steps:
                    found.append(group[0].state.step or 0)
        return found

    def apply(self, orders: list[Order]) -> None:
        evicted = []
        held = self.held()
        before = {worker.key: worker.state.step for worker in self.workers.values()}
        forms = [order for order in orders if isinstance(order, FormOrder)]
        for order in orders:
            match order:
                case FormOrder():
                    self.begin(self.workers[order.key], order)
                case BoundaryOrder():
                    self.workers[order.key].told_to_leave = True
                case BrokenOrder():
                    self.workers[order.key].broken = True
                case ReleaseOrder():
                    worker = self.workers[order.key]
                    assert worker.waiting, "only who waits is let go"
                    worker.waiting, worker.released, worker.saving = False, True, order.save
                case EvictOrder():
                    self.workers[order.key].order = None
                    evicted.append(order.key)
                case Formed():
                    self.check_formed(order, forms, held)
                    self.check_source(forms, before)
                    self.formed.append(order)
                case Ended():
                    self.ended.append(order)
                case Done():
                    self.done = True
                case Stopped():
                    self.stopped = order
        for key in evicted:
            if key in self.workers:
                self.kill(self.workers[key])

    def begin(self, worker: Worker, order: FormOrder) -> None:
        assert worker.waiting, "only who waits joins a generation"
        assert not worker.released
        worker.waiting, worker.order = False, order
        if order.step is None:
            worker.state = State(self.checkpoint)
        elif order.roll_forward:
            assert worker.state.step == order.step - 1
            assert worker.state.prepared
            assert order.commit == {"norm": float(order.step)}
            worker.state = State(order.step, False, order.commit)
        elif worker.state.step != order.step:
            assert order.source is not None, "state comes from somewhere"
            worker.state = State(order.step, False, order.commit)

    def check_formed(self, formed: Formed, forms: list[FormOrder], held: list[int]) -> None:
        assert formed.step == max(held, default=None), "no step is lost that a whole replica holds"
        numbers = {order.number for order in forms}
        assert numbers == {formed.number}, "one generation at a time"
        assert not self.formed or formed.number > self.formed[-1].number
        members = [self.workers[key] for key in formed.keys]
        assert len({worker.incarnation for worker in members}) == len(formed.replicas), "incarnations are never mixed"
        assert len({worker.incarnation.replica for worker in members}) == len(formed.replicas)
        size = self.size
        for index, name in enumerate(formed.replicas):
            group = members[index * size : (index + 1) * size]
            assert {worker.incarnation.replica for worker in group} == {name}
            assert [worker.place for worker in group] == list(range(size))
            assert {worker.order.replica for worker in group if worker.order} == {index}
        for worker in self.workers.values():
            if worker not in members and worker.order is not None:
                assert not self.intact(worker), "nobody trains on in an older generation"
        holders = [order for order in forms if order.source is not None]
        assert len(holders) in (0, len(forms)), "columns broadcast together"

    def check_source(self, forms: list[FormOrder], before: dict[int, int | None]) -> None:
        """Who gives its state away has it."""
        for order in forms:
            if order.source == order.replica:
                assert order.roll_forward or before[order.key] == order.step
