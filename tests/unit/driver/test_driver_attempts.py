"""A driver from begin to end, on a stage of threads instead of a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from stage import Stage
from test_journal import full_disk

from rubato.resources import DriverState, SyncReply
from rubato.spec import parse_spec
from workers.driver import driver as driver_module
from workers.driver.driver import Driver
from workers.driver.outcome import Outcome
from workers.engine.run import RunDirectory

SIZE = 2


class Performance:
    """One attempt under way."""

    def __init__(self, driver: Driver, stage: Stage, run: RunDirectory) -> None:
        self.driver = driver
        self.stage = stage
        self.run = run
        self.version = 0
        self.states: list[str] = []
        self.reasons: list[str] = []
        self.task = asyncio.create_task(driver.run())

    def command(
        self, workers: int, operation: str | None = None, cancel: Any = "no", profile: dict[str, Any] | None = None
    ) -> None:
        self.version += 1
        self.driver.wanted(
            SyncReply(
                version=self.version,
                workers=workers,
                operation=operation,
                cancel=cancel,
                profile=profile,
                events_acknowledged=0,
                metrics_acknowledged=0,
            )
        )

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        if not self.run.events.exists():
            return []
        events = [json.loads(line) for line in self.run.events.read_text().splitlines()]
        return [event for event in events if kind in (None, event["kind"])]

    def steps(self) -> list[int]:
        if not self.run.metrics.exists():
            return []
        return [json.loads(line)["step"] for line in self.run.metrics.read_text().splitlines()]

    def saw(self, condition: Callable[[], Any]) -> Any:
        if hasattr(self.driver, "_crew"):
            described = self.driver.describe()
            state, reason = described.state.value, described.reason_message
        else:
            state, reason = "STARTING", ""
        if not self.states or self.states[-1] != state:
            self.states.append(state)
        if not self.reasons or self.reasons[-1] != reason:
            self.reasons.append(reason)
        return condition()

    async def until(self, condition: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(20):
                while not self.saw(condition) and not self.task.done():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            pytest.fail(f"{self.driver.describe()}\n" + "\n".join(event["message"] for event in self.events()))
        assert condition(), self.events()

    async def end(self) -> Outcome:
        async with asyncio.timeout(20):
            return await self.task


Play = Callable[..., Any]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    @asynccontextmanager
    async def perform(
        *, workers: int = 4, steps: int = 200, epoch: int = 1, room: int = 8, spent: int = 0, **spec: Any
    ) -> AsyncIterator[Performance]:
        run = RunDirectory.create(tmp_path / "run")
        content: dict[str, Any] = {
            "name": "play",
            "model": {"preset": "tiny"},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 16},
            "train": {"steps": steps, "global_batch": 8},
            "parallelism": {"tensor": SIZE, "micro_batch": 2},
            "workers": {"min": 2, "max": 8},
        }
        stage = Stage(size=SIZE, steps=steps, room=room)
        monkeypatch.setattr(driver_module, "Replicas", lambda *_: stage)
        monkeypatch.setattr(driver_module, "Executioner", lambda: None)
        monkeypatch.setattr(ray, "available_resources", stage.available)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        assert run.claim(epoch)
        job = parse_spec(content | spec)
        driver = Driver(run, job, attempt="a1", epoch=epoch, workers=workers, hardware_restarts=spent)
        performance = Performance(driver, stage, run)
        try:
            yield performance
        finally:
            if not performance.task.done():
                driver.force("the test is over")
                await performance.end()
            await asyncio.to_thread(stage.close)

    return perform


def formed(performance: Performance) -> list[int]:
    return [event["data"]["workers"] for event in performance.events("generation.formed")]


async def test_a_job_runs_to_its_end(play: Play) -> None:
    async with play(steps=30) as it:
        outcome = await it.end()
        assert outcome.state is DriverState.SUCCEEDED
        assert it.steps() == list(range(1, 31))
        assert formed(it) == [4]
        kinds = [event["kind"] for event in it.events()]
        assert kinds[0] == "attempt.started"
        assert kinds.count("replica.ready") == 2
        assert kinds.index("training.finished") > kinds.index("generation.formed")
        assert kinds.count("replica.released") == 2


async def test_it_grows_and_shrinks_while_it_trains(play: Play) -> None:
    async with play(workers=2, steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.command(6, "op-1")
        await it.until(lambda: formed(it)[-1] == 6)
        it.command(2, "op-2")
        await it.until(lambda: formed(it)[-1] == 2 and it.events("replica.released")[1:])
        assert it.steps() == list(range(1, len(it.steps()) + 1))
        phases = [(event["operation"], event["phase"]) for event in it.events() if event["operation"]]
        assert phases == [
            ("op-1", "accepted"),
            ("op-1", "starting"),
            ("op-1", "regrouping"),
            ("op-1", "done"),
            ("op-2", "accepted"),
            ("op-2", "regrouping"),
            ("op-2", "done"),
        ]
        assert [state for state in it.states if state != "?"] == [
            "STARTING", "RUNNING", "RESIZING", "RUNNING", "RESIZING", "RUNNING",
        ]  # fmt: skip
        assert [member.rank for member in it.driver.describe().members] == [0, 1]


async def test_a_lost_worker_costs_one_restart_and_no_step(play: Play) -> None:
    async with play(steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.stage.kill("replica-0")
        await it.until(lambda: formed(it) == [4, 2, 4])
        assert it.driver.describe().restarts.hardware == 1
        (lost,) = it.events("worker.lost")
        assert (lost["data"]["replica"], lost["data"]["rank"], lost["data"]["fault"]) == ("replica-0", 1, "hardware")
        assert sorted(set(it.steps())) == list(range(1, it.steps()[-1] + 1))
        assert "RECOVERING" in it.states
        told = [reason for reason in it.reasons if "wanted workers train" in reason]
        assert told
        assert not [reason for reason in told if "4 of 4" in reason], "one was lost, so fewer train"
        await it.until(lambda: it.driver.describe().state is DriverState.RUNNING)
        assert it.stage.starts == ["replica-0", "replica-1"], "Ray restarts it, not the driver"


async def test_when_all_are_lost_the_checkpoint_is_where_it_goes_on(play: Play) -> None:
    async with play(steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [20])
        it.stage.checkpoint = 10
        it.stage.kill("replica-0", "replica-1")
        await it.until(lambda: formed(it)[1:] and 11 in it.steps()[21:])
        last = it.events("generation.formed")[-1]["data"]
        assert last["step"] == 10
        assert last["source"] is None
        assert it.driver.describe().restarts.hardware == 2


async def test_more_losses_than_allowed_end_it(play: Play) -> None:
    async with play(steps=2000, faults={"hardware": 1}) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.stage.kill("replica-0")
        await it.until(lambda: formed(it) == [4, 2, 4])
        it.stage.kill("replica-1")
        outcome = await it.end()
        assert (outcome.state, outcome.code) == (DriverState.FAILED, "too_many_losses")
        assert "faults.hardware allows 1" in outcome.message
        assert it.events()[-1]["kind"] == "attempt.failed"


async def test_the_losses_of_earlier_attempts_count(play: Play) -> None:
    async with play(steps=2000, faults={"hardware": 2}, spent=2) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.stage.kill("replica-0")
        outcome = await it.end()
        assert (outcome.state, outcome.code) == (DriverState.FAILED, "too_many_losses")
        assert it.driver.describe().restarts.hardware == 1, "what earlier attempts told of is not told again"


async def test_a_full_disk_keeps_nobody_from_going_on_without_a_lost_worker(play: Play) -> None:
    async with play(steps=4000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        size = it.run.events.stat().st_size
        with full_disk(size + 10):
            it.stage.kill("replica-0")
            formed_again = lambda: it.driver.describe().generation == 3  # noqa: E731
            await it.until(formed_again)
            assert it.run.events.stat().st_size == size
        await it.until(lambda: it.events("generation.formed")[2:])
        assert len(it.events("worker.lost")) == 1


async def test_the_users_mistake_ends_it_at_once(play: Play) -> None:
    async with play() as it:
        it.stage.refusal = "data.train.path: holds no text (give files that hold text)"
        outcome = await it.end()
        assert (outcome.state, outcome.code) == (DriverState.FAILED, "user_error")
        assert outcome.message == it.stage.refusal
        assert it.driver.describe().restarts.hardware == 0


async def test_a_drain_saves_at_a_boundary_and_ends(play: Play) -> None:
    async with play(steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [5])
        actors = [actor for troupe in it.stage.troupes.values() for actor in troupe.actors]
        it.command(4, "op-9", cancel="drain")
        outcome = await it.end()
        assert outcome.state is DriverState.CANCELLED
        saved = [actor.saved for actor in actors]
        assert sorted(saved, key=str) == [it.steps()[-1]] * 2 + [None] * 2, "one replica saves, whole"
        phases = [(event["phase"], event["done"]) for event in it.events() if event["operation"] == "op-9"]
        assert phases == [("accepted", False), ("saving", False), ("done", True)]


async def test_a_drain_before_anything_runs_ends_too(play: Play) -> None:
    async with play(room=0) as it:
        await it.until(lambda: it.events("replica.waiting"))
        it.driver.drain("told to")
        assert (await it.end()).state is DriverState.CANCELLED


async def test_force_does_not_wait_for_anybody(play: Play) -> None:
    async with play(steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.command(4, "op", cancel="force")
        assert (await it.end()).state is DriverState.CANCELLED


async def test_what_finds_no_room_is_said_and_disturbs_nobody(play: Play) -> None:
    async with play(workers=2, steps=4000, room=5) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.command(6, "op-1")
        await it.until(lambda: formed(it)[-1] == 4)
        (waiting,) = it.events("replica.waiting")
        assert waiting["data"] == {"replica": "replica-2", "cause": "no room"}
        described = it.driver.describe()
        assert described.state is DriverState.RESIZING
        assert "replica-2 waits: no room" in described.reason_message
        step = it.steps()[-1]
        await it.until(lambda: it.steps()[-1] > step + 5)
        it.command(4, "op-2")
        await it.until(lambda: it.driver.describe().state is DriverState.RUNNING)
        ends = [(event["operation"], event["phase"], event["failed"]) for event in it.events() if event["done"]]
        assert ends == [("op-1", "superseded", True), ("op-2", "done", False)]


async def test_who_was_fenced_writes_nothing_more(play: Play) -> None:
    async with play(steps=4000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        last = it.steps()[-1]
        assert it.run.claim(2)
        outcome = await it.end()
        assert (outcome.state, outcome.code) == (None, "fenced")
        lines = len(it.events())
        assert it.steps()[-1] <= last + 1, "nothing is written between two looks at the epoch either"
        it.driver.force("too late")
        assert len(it.events()) == lines
        assert it.events()[-1]["kind"] != "attempt.failed"


async def test_who_was_fenced_does_not_tell_of_its_own_end(play: Play) -> None:
    async with play(steps=4000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        assert it.run.claim(2)
        it.driver._fail("program_error", "it lost the run and did not know")
        outcome = await it.end()
        assert (outcome.state, outcome.code) == (None, "fenced")


async def test_the_next_attempt_counts_its_generations_on(play: Play) -> None:
    async with play(steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.command(4, cancel="drain")
        await it.end()
    async with play(steps=30, epoch=2) as it:
        it.stage.checkpoint = 10
        assert (await it.end()).state is DriverState.SUCCEEDED
        generations = [event["data"]["generation"] for event in it.events("generation.formed")]
        assert generations == [1, 2]


async def test_a_size_it_cannot_run_at_is_refused_and_changes_nothing(play: Play) -> None:
    async with play(steps=2000) as it:
        await it.until(lambda: it.steps()[-1:] > [3])
        it.command(5, "op-1")
        it.command(10, "op-2")
        refused = [(event["operation"], event["phase"], event["done"], event["failed"]) for event in it.events()[-2:]]
        assert refused == [("op-1", "refused", True, True), ("op-2", "refused", True, True)]
        assert it.driver.describe().state is DriverState.RUNNING


async def test_workers_record_steps_as_they_are_told_and_the_operation_ends_when_all_have(play: Play) -> None:
    async with play(workers=4, steps=10_000) as job:
        await job.until(lambda: job.steps())
        for _ in range(2):  # every reply says it until the operation is over
            job.command(4, profile={"operation": "op-1", "steps": 3, "ranks": [1, 2]})
        await job.until(lambda: job.events("profile.ended"))
        (started,), saved, (ended,) = (job.events(f"profile.{kind}") for kind in ("started", "saved", "ended"))
        assert (started["operation"], started["phase"], started["data"]) == (
            "op-1",
            "recording",
            {"steps": 3, "ranks": [1, 2]},
        )
        assert sorted(event["data"]["files"][0] for event in saved) == ["profile/replica-0-1", "profile/replica-1-0"]
        assert (ended["operation"], ended["done"], ended["failed"]) == ("op-1", True, False)
        assert sorted(ended["data"]["files"]) == ["profile/replica-0-1", "profile/replica-1-0"]
        job.command(4, profile={"operation": "op-2", "steps": 1, "ranks": [7]})
        await job.until(lambda: len(job.events("profile.ended")) == 2)
        assert job.events("profile.ended")[-1]["failed"]
        job.driver.force("enough")
        await job.end()


async def test_nobody_waits_for_what_a_lost_worker_was_to_record(play: Play) -> None:
    async with play(workers=4, steps=10_000) as job:
        await job.until(lambda: job.steps())
        job.stage.records = False
        job.command(4, profile={"operation": "op-1", "steps": 3, "ranks": [3]})
        await job.until(lambda: job.events("profile.started"))
        job.stage.kill("replica-1")
        await job.until(lambda: job.events("profile.ended"))
        (ended,) = job.events("profile.ended")
        assert (ended["failed"], "was gone before" in ended["message"]) == (True, True)
        job.driver.force("enough")
        await job.end()
