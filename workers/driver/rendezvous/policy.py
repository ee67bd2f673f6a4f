"""Who trains together next: the rules by which generations begin and end, without sockets, clocks or threads.

The rules, in the order in which they win:

1. A worker that is lost takes its incarnation of the replica with it: the others of it are never chosen again.
2. There is one generation at a time. The next is formed only when nobody trains in the last one any more, except
   workers whose replica is broken.
3. A generation goes on from the highest step that a whole replica holds. A replica one step behind that had its
   gradients ready applies them; every other one receives the state. Only when nobody with state is left does
   everybody load the newest checkpoint. Workers of a job whose replicas share one state out (ZeRO) have none to tell
   of: at a boundary they have saved it together, so nothing is lost; after a loss they go back to what was saved last.
4. A running generation is changed at a step boundary, and only when the change can be made at once: newcomers train
   on nothing until they are ready, and those who are no longer wanted stay until someone wanted holds the state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from rubato.placement import order_replicas
from workers.driver.rendezvous.current import Current, Patience
from workers.driver.rendezvous.members import Group, Incarnation, Member, Phase, Start, State, where_to_start
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


class Policy:
    """Decides on every change. Each method takes the time in seconds and returns what is to be done, in order.

    Args:
        replica_size: workers of a replica.
        degrees: data degrees the global batch can be split into, or None for any.
        last_generation: the highest number given out before.
    """

    def __init__(
        self,
        replica_size: int,
        *,
        degrees: Collection[int] | None = None,
        last_generation: int = 0,
        patience: Patience | None = None,
    ) -> None:
        self._size = replica_size
        self._degrees = None if degrees is None else frozenset(degrees)
        self._patience = patience or Patience()
        self._number = last_generation
        self._wanted: tuple[str, ...] = ()
        self._members: dict[int, Member] = {}
        self._groups: dict[Incarnation, Group] = {}
        self._current: Current | None = None
        self._stopping = False
        self._saver: Group | None = None
        self._saved_by: str | None = None
        self._over = False
        self._deadline: float | None = None
        self._waiting_since: float | None = None
        self.link_speeds: Mapping[tuple[str, str], float] = {}  # between nodes, as far as measured

    @property
    def generation(self) -> int:
        """The number of the newest generation."""
        return self._number

    @property
    def running(self) -> bool:
        """Whether a generation trains and nothing has ended it."""
        return self._current is not None and self._current.broken is None

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is to be called next, if nothing else happens before."""
        return self._deadline

    @property
    def over(self) -> bool:
        """Whether no generation will form any more."""
        return self._over

    def group(self, key: int) -> Group:
        """The incarnation a worker belongs to. Raises KeyError when it is not here."""
        return self._groups[self._members[key].incarnation]

    # What happens.

    def want(self, replicas: Sequence[str], now: float) -> list[Order]:
        """These replicas are to train, and no others."""
        self._wanted = tuple(replicas)
        return self._settle(now)

    def stop(self, now: float) -> list[Order]:
        """The job is to end at the next boundary, with a checkpoint."""
        self._stopping = True
        return self._settle(now)

    def arrived(self, member: Member, now: float) -> list[Order]:
        """A worker is here. The caller tells it whether its group is released."""
        orders: list[Order] = []
        group = self._groups.get(member.incarnation)
        if group is None:
            group = Group(member.incarnation, self._size)
            # One name never stands for two sets of workers: those of before are dead or as good as dead.
            for older in [old for old in self._groups.values() if old.name == group.name and not old.released]:
                orders += self._evict(older, "its replica has started anew", now)
            self._groups[member.incarnation] = group
            group.released = self._over or self._stopping or group.name not in self._wanted
        if member.place in group.members:
            raise ValueError(f"two workers claim place {member.place} of {group.name}")
        group.members[member.place] = member
        self._members[member.key] = member
        return orders + self._settle(now)

    def ready(self, key: int, state: State, now: float) -> list[Order]:
        """A worker waits for the next generation."""
        member = self._members[key]
        orders: list[Order] = []
        current = self._current
        if member.phase is Phase.TRAINING and current and key in current.keys and not current.ending:
            orders += self._break(f"a worker of {member.incarnation.replica} left it", now)
        member.phase, member.state, member.busy = Phase.READY, state, None
        group = self.group(key)
        if group.released:
            return [*orders, *self._release([group])]
        return orders + self._settle(now)

    def progressed(self, key: int, busy: str | None, now: float) -> list[Order]:
        """A worker got on with something, and is busy with something else or, None, about to step."""
        self._members[key].progressed, self._members[key].busy = now, busy
        return self._settle(now) if self._current and self._current.ending else []

    def failed(self, key: int, generation: int, cause: str, now: float) -> list[Order]:
        """The data axis of a generation failed under a worker."""
        if self._current is None or self._current.number != generation:
            return []
        return self._break(f"{self._members[key].incarnation.replica}: {cause}", now) + self._settle(now)

    def finished(self, key: int, now: float) -> list[Order]:
        """A worker has done all steps."""
        self._members[key].phase = Phase.FINISHED
        current = self._current
        if current is None or key not in current.keys:
            return self._settle(now)
        current.finished.add(key)
        orders: list[Order] = []
        if not self._over and current.first_keys <= current.finished:
            self._over = True
            orders.append(Done())
        return orders + self._settle(now)

    def departed(self, key: int, now: float) -> list[Order]:
        """A worker ended as it was told to."""
        member, group = self._forget(key)
        if group is self._saver and not group.members and not group.broken:
            self._saver, self._saved_by = None, group.name
        if member.phase not in (Phase.FINISHED, Phase.RELEASED):
            group.released = True  # it left before it was told to, as when a mate heard that the replica is not wanted
            if self._current and key in self._current.keys:
                return self._break(f"a worker of {group.name} ended", now) + self._settle(now)
        return self._settle(now)

    def lost(self, key: int, now: float) -> list[Order]:
        """A worker is gone without having been told to."""
        member, group = self._forget(key)
        orders: list[Order] = []
        if member.phase is not Phase.FINISHED:
            group.broken = True
        if group is self._saver:
            self._saver = None
        if group.broken and self._current and group in self._current.groups:
            orders += self._break(f"a worker of {group.name} was lost", now)
        return orders + self._settle(now)

    def tick(self, now: float) -> list[Order]:
        """Time has passed."""
        orders: list[Order] = []
        current = self._current
        leave_by = current.leave_by(self._patience) if current else None
        if current and leave_by is not None and now >= leave_by:
            cause = f"generation {current.number} was not left, and nobody in it gets on"
            if current.broken is None:
                orders += self._break(cause, now)
            else:
                stuck = {member.incarnation for member in current.staying()}
                for group in [group for group in current.groups if group.incarnation in stuck]:
                    orders += self._evict(group, cause, now)
        return orders + self._settle(now)

    # What follows from it.

    def _settle(self, now: float) -> list[Order]:
        self._deadline = None
        orders = self._decide(now)
        current = self._current
        leave_by = current.leave_by(self._patience) if current else None
        if leave_by is not None:
            self._wake(leave_by)
        return orders

    def _decide(self, now: float) -> list[Order]:
        current = self._current
        if current and not current.ending and not self._over:
            orders = self._review(current, now)
            if not current.ending:
                return orders + self._release(self._unwanted(current.groups))
            return orders
        if any(group.usable and group.any_in(Phase.TRAINING) for group in self._groups.values()):
            return []
        agreed = current is not None and current.broken is None
        orders = self._end(current) if current else []
        if self._over:
            return orders + self._release(self._groups.values())
        if self._stopping:
            return orders + self._stop()
        return orders + self._form(current.groups if current else (), now, agreed=agreed)

    def _review(self, current: Current, now: float) -> list[Order]:
        """Asks for a boundary when the running generation is not the one that is wanted."""
        target = self._target(current)
        if not self._stopping:
            if target == list(current.groups):
                self._waiting_since = None
                return []
            growing = set(target) > set(current.groups)
            if growing and self._others_are_coming(target) and not self._waited(self._patience.batch, now):
                return []
        self._waiting_since = None
        current.asked, current.ending_since = True, now
        return [BoundaryOrder(key, current.number) for key in self._training(current)]

    def _target(self, current: Current) -> list[Group]:
        stay = [group for group in current.groups if group.name in self._wanted]
        new = [group for group in self._candidates() if group not in current.groups]
        if not stay and not new:
            return list(current.groups)  # nobody could take over the state
        degree = self._degree(len(stay) + len(new))
        return (stay + new)[:degree] if degree else list(current.groups)

    def _form(self, before: Sequence[Group], now: float, *, agreed: bool) -> list[Order]:
        orders: list[Order] = []
        for group in [group for group in self._groups.values() if group.ready and not group.consistent]:
            orders += self._evict(group, "its workers do not hold the same step", now)
        start = where_to_start(group for group in self._groups.values() if group.ready)
        chosen = self._candidates()
        if start.capable and not any(group in start.capable for group in chosen):
            chosen.append(start.capable[0])
        elif not start.capable and not agreed and not self._assembled(chosen, now):
            return orders
        # Who has the state comes first, in the order of before: who reports and saves changes as seldom as possible.
        order = {group: place for place, group in enumerate(before)}
        chosen.sort(key=lambda group: (group not in start.capable, order.get(group, len(order))))
        degree = self._degree(len(chosen))
        if not degree:
            return orders
        self._waiting_since = None
        nodes = [group.by_place()[0].node for group in chosen[:degree]]
        return orders + self._begin([chosen[place] for place in order_replicas(nodes, self.link_speeds)], start, now)

    def _begin(self, chosen: list[Group], start: Start, now: float) -> list[Order]:
        self._number += 1
        healed = [group for group in chosen if group not in start.capable] if start.capable else []
        source = 0 if healed else None
        members = [member for group in chosen for member in group.by_place()]
        orders: list[Order] = []
        for index, group in enumerate(chosen):
            forward = group in start.capable and group.state.step != start.step
            for member in group.by_place():
                member.phase = Phase.TRAINING
                nodes = tuple(other.members[member.place].node for other in chosen)
                step = (start.step, forward, source, start.commit)
                orders.append(FormOrder(member.key, self._number, len(chosen), index, *step, nodes))
        self._current = Current(
            self._number,
            tuple(chosen),
            frozenset(member.key for member in members),
            frozenset(member.key for member in chosen[0].members.values()),
        )
        # Whoever is ready but left out falls behind from here on, so what it holds counts for nothing.
        for member in self._members.values():
            if member.phase is Phase.READY:
                member.state = State()
        formed = Formed(
            self._number,
            tuple(group.name for group in chosen),
            tuple(member.key for member in members),
            start.step,
            None if source is None else chosen[source].name,
            tuple(group.name for group in healed),
        )
        # Of those chosen, one may be there for its state only: the next change is asked for at once.
        return [*orders, formed, *self._release(self._unwanted(chosen)), *self._review(self._current, now)]

    def _stop(self) -> list[Order]:
        if self._saver is not None:
            return []
        start = where_to_start(group for group in self._groups.values() if group.ready and group.consistent)
        if self._saved_by is None and start.capable:
            self._saver = start.capable[0]  # one at the highest step itself
            return self._release([self._saver], save=True)
        self._over = True
        return [Stopped(self._saved_by), *self._release(self._groups.values())]

    def _assembled(self, chosen: list[Group], now: float) -> bool:
        if not chosen:
            self._waiting_since = None
            return False
        everybody = {group.name for group in chosen} >= set(self._wanted)
        return everybody or self._waited(self._patience.assemble, now)

    def _others_are_coming(self, target: list[Group]) -> bool:
        return any(
            group.usable and group not in target and group.name in self._wanted and group.any_in(Phase.STARTING)
            for group in self._groups.values()
        )

    def _waited(self, seconds: float, now: float) -> bool:
        if self._waiting_since is None:
            self._waiting_since = now
        if now >= self._waiting_since + seconds:
            return True
        self._wake(self._waiting_since + seconds)
        return False

    def _wake(self, at: float) -> None:
        self._deadline = at if self._deadline is None else min(self._deadline, at)

    def _candidates(self) -> list[Group]:
        """Ready and wanted replicas, in the order they are wanted."""
        ready = [group for group in self._groups.values() if group.ready and group.consistent]
        return sorted(
            (group for group in ready if group.name in self._wanted), key=lambda group: self._wanted.index(group.name)
        )

    def _degree(self, most: int) -> int:
        if self._degrees is None:
            return most
        return max((degree for degree in self._degrees if degree <= most), default=0)

    def _unwanted(self, staying: Iterable[Group]) -> list[Group]:
        """Those to let go. Workers that still start may be wanted again before they are ready."""
        staying = set(staying)
        return [
            group
            for group in self._groups.values()
            if group not in staying and group.name not in self._wanted and group.any_in(Phase.READY)
        ]

    def _training(self, current: Current) -> list[int]:
        return [
            member.key
            for group in current.groups
            if not group.broken
            for member in group.by_place()
            if member.phase is Phase.TRAINING
        ]

    def _break(self, cause: str, now: float) -> list[Order]:
        current = self._current
        if current is None or current.broken is not None:
            return []
        current.broken = cause
        current.ending_since = now
        return [BrokenOrder(key, current.number) for key in self._training(current)]

    def _end(self, current: Current) -> list[Order]:
        self._current = None
        return [Ended(current.number, current.broken)]

    def _release(self, groups: Iterable[Group], *, save: bool = False) -> list[Order]:
        orders: list[Order] = []
        for group in groups:
            group.released = True
            for member in group.by_place():
                if member.phase is Phase.READY:
                    member.phase = Phase.RELEASED
                    orders.append(ReleaseOrder(member.key, save))
        return orders

    def _evict(self, group: Group, cause: str, now: float) -> list[Order]:
        group.broken = True
        orders: list[Order] = [EvictOrder(member.key, cause) for member in group.by_place()]
        if self._current and group in self._current.groups:
            orders += self._break(f"{group.name}: {cause}", now)
        return orders

    def _forget(self, key: int) -> tuple[Member, Group]:
        member = self._members.pop(key)
        group = self._groups[member.incarnation]
        del group.members[member.place]
        if not group.members:
            del self._groups[member.incarnation]
        return member, group
