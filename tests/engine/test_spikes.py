"""The loss-spike guard: a poisoned batch is caught before it changes a weight, and jumped over for good."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rubato.checkpoints import list_checkpoints
from rubato.layout import Layout
from rubato.spec import JobSpec
from tests.engine.forked import RankError, in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine import train as loop
from workers.engine.checkpoint.recovery import Recovery
from workers.engine.data import Sampler, data_step
from workers.engine.device import Device
from workers.engine.membership import Generation, Standing, StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.data import DataAxisError, DataGroup
from workers.engine.run import RunDirectory
from workers.engine.watch.losses import LossHistory

CPU = Device.of_rank(0, gpu=False)
STEPS, EVERY = 24, 5


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spec_of(corpus: Path, layout: Layout, steps: int = STEPS, every: int = EVERY, **spike: Any) -> JobSpec:
    return tiny_spec(
        corpus,
        train={"steps": steps},
        optimizer={"schedule": {"name": "constant", "warmup": 0}},
        checkpoint={"every": every},
        faults={"spike": {"action": "rollback", "deviations": 3.0, "after": 8, "jump": 3, **spike}},
        parallelism={"tensor": layout.tensor, "pipeline": layout.pipeline},
        workers=layout.world_size,
    )


def poison(data_steps: set[int], without: tuple[int, ...] = ()) -> None:
    """In this process, some data steps hold noise, and others are not in the data at all."""

    class Spoiled(Sampler):
        def batch(self, step: int, samples: range) -> tuple[Tensor, Tensor]:
            step = data_step(step, without)
            tokens_BS, targets_BS = super().batch(step, samples)
            if step in data_steps:
                generator = torch.Generator().manual_seed(step)
                noise = torch.randint(0, 256, targets_BS.shape, generator=generator)
                return tokens_BS, noise
            return tokens_BS, targets_BS

    loop.Sampler = Spoiled  # type: ignore[misc]


def last_of_each(metrics: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {metric["step"]: (metric["loss"], metric["grad_norm"]) for metric in metrics}


LAYOUTS = [Layout(1, 1, 1), Layout(2, 1, 1), pytest.param(Layout(1, 2, 2), marks=pytest.mark.long)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_curve_is_that_of_a_run_that_never_saw_the_poison(layout: Layout, corpus: Path, tmp_path: Path) -> None:
    """Two poisoned batches, the second after a restart: the statistic and what is jumped over outlive both."""
    # Many ranks add up in another order than one, which fp64 hides.
    dtype = torch.float32 if layout.world_size == 1 else torch.float64

    def guarded(rank: int, store: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        poison({13, 22})
        metrics, events = [], []
        for steps in (15, STEPS):
            spec, name = spec_of(corpus, layout, steps), f"until {steps}"
            metrics += train_at(layout, spec, tmp_path / "run", rank, store, name, dtype, events)
        return metrics, events

    def never_saw() -> list[dict[str, Any]]:
        poison({13, 22}, without=(11, 12, 13, 20, 21, 22))
        return train_at(Layout(1, 1, 1), spec_of(corpus, Layout(1, 1, 1)), tmp_path / "reference", dtype=dtype)

    metrics, events = run_ranks(layout.world_size, guarded)[0]
    reference = last_of_each(in_one_process(never_saw))
    told = [event["data"] for event in events if event["kind"] == "spike.rolled_back"]
    assert [(each["step"], each["to"], each["data_steps"]) for each in told] == [
        (14, 10, [12, 13, 14]),
        (20, 15, [21, 22, 23]),
    ]
    assert [each["spikes"] for each in told] == [1, 2]
    found = last_of_each(metrics)
    assert list(reference) == sorted(found) == list(range(1, STEPS + 1))
    for step, expected in reference.items():
        assert found[step] == pytest.approx(expected, abs=1e-6)
    assert found[STEPS][0] < found[1][0] - 1
    assert 14 not in [metric["step"] for metric in metrics][:14]  # the step that spiked was never taken


def test_checkpoints_of_the_way_that_was_left_are_removed(corpus: Path, tmp_path: Path) -> None:
    def work() -> list[int]:
        poison({13})
        spec = spec_of(corpus, Layout(1, 1, 1), 14, jump=7, limit=0)
        with pytest.raises(Exception, match=r"loss of step 14 is one spike more than the 0 that faults\.spike\.limit"):
            train_at(Layout(1, 1, 1), spec, tmp_path)
        return [stored.step for stored in list_checkpoints(tmp_path / "checkpoints")]

    assert in_one_process(work) == [5]


@pytest.mark.long
def test_shards_go_back_together(corpus: Path, tmp_path: Path) -> None:
    def work(zero: int, layout: Layout, rank: int = 0, store: Any = None) -> list[dict[str, Any]]:
        poison({13})
        spec = spec_of(corpus, layout, 16)
        spec = spec.model_copy(update={"memory": spec.memory.model_copy(update={"zero": zero})})
        return train_at(layout, spec, tmp_path / str(zero), rank, store)

    reference = in_one_process(lambda: work(0, Layout(1, 1, 1)))
    found = run_ranks(2, lambda rank, store: work(2, Layout(2, 1, 1), rank, store))[0]
    assert [metric["step"] for metric in found] == [metric["step"] for metric in reference]
    assert len(found) == 16 + 3
    assert last_of_each(found) == {
        step: pytest.approx(told, rel=1e-9) for step, told in last_of_each(reference).items()
    }


def test_the_step_right_after_the_checkpoint_is_told_again(corpus: Path, tmp_path: Path) -> None:
    def work() -> list[dict[str, Any]]:
        poison({12})
        return train_at(Layout(1, 1, 1), spec_of(corpus, Layout(1, 1, 1), 14, every=11, jump=2), tmp_path)

    metrics = in_one_process(work)
    assert [metric["step"] for metric in metrics][9:] == [10, 11, 12, 12, 13, 14]
    assert metrics[11]["loss"] != metrics[12]["loss"]  # data step 12 was jumped over, too


class Watched(loop.Worker):
    """Writes down which updates changed weights."""

    log: list[tuple[int, bool]] = []  # noqa: RUF012 (one worker a process)

    def update(self, commit: dict[str, float]) -> None:
        before = [leaf.clone() for leaf in self.state.leaves]
        super().update(commit)
        self.log.append((self.state.done, not all(map(torch.equal, before, self.state.leaves))))


def test_skipping_leaves_out_one_update_on_all_ranks(corpus: Path, tmp_path: Path) -> None:
    layout = Layout(2, 1, 1)

    def work(rank: int, store: Any) -> tuple[list[tuple[int, bool]], list[dict[str, Any]], list[int]]:
        poison({13})
        loop.Worker = Watched  # type: ignore[misc]
        events: list[dict[str, Any]] = []
        spec = spec_of(corpus, layout, 18, action="skip")
        metrics = train_at(layout, spec, tmp_path, rank, store, dtype=torch.float32, events=events)
        return Watched.log, events, [metric["step"] for metric in metrics]

    by_rank = run_ranks(2, work)
    assert all(log == [(step, step != 14) for step in range(1, 19)] for log, _, _ in by_rank)
    _, events, steps = by_rank[0]
    assert steps == list(range(1, 19))
    told = [(event["kind"], event["data"]["step"]) for event in events if event["kind"].startswith("spike")]
    assert told == [("spike.skipped", 14)]
    assert not any(events for _, events, _ in by_rank[1:])


def test_a_break_while_going_back_goes_on_before_the_spike_and_goes_back_anew(corpus: Path, tmp_path: Path) -> None:
    class Again(StaticMembership):
        def join(self, standing: Standing) -> Generation | None:
            if not self._joined:
                return super().join(standing)
            assert not standing.prepared
            store = self._generation.store
            return Generation(2, 1, 0, standing.step, roll_forward=False, source=None, commit=None, store=store)

    def work(broken: bool) -> tuple[list[int], list[int], list[Tensor]]:
        poison({13})
        original, begun = Recovery.restore, []

        def break_once(recovery: Recovery, data: DataGroup, latest: int | None = None) -> None:
            if latest is not None:
                begun.append(recovery._state.done)
                if broken and len(begun) == 1:
                    raise DataAxisError("broken on purpose")
            original(recovery, data, latest)

        Recovery.restore = break_once  # type: ignore[method-assign]
        spec, run = spec_of(corpus, Layout(1, 1, 1)), RunDirectory.create(tmp_path / str(broken))
        mesh = ReplicaMesh.of_world(Layout(1, 1, 1), 0, CPU)
        membership = Again()
        worker = loop.Worker(spec, membership, mesh, run, lambda: True)
        while not worker.live(membership.join(worker.standing())):  # type: ignore[arg-type]
            pass
        return begun, worker.state.jumped, [leaf.clone() for leaf in worker.state.leaves]

    begun, jumped, leaves = in_one_process(lambda: work(broken=True))
    once, same_jumped, same_leaves = in_one_process(lambda: work(broken=False))
    assert (begun, once) == ([13, 13], [13])
    assert jumped == same_jumped == [11, 12, 13]
    assert all(map(torch.equal, leaves, same_leaves))


def test_more_spikes_than_allowed_end_the_job(corpus: Path, tmp_path: Path) -> None:
    def work() -> None:
        poison({10, 12, 14})
        train_at(Layout(1, 1, 1), spec_of(corpus, Layout(1, 1, 1), action="skip", limit=2), tmp_path)

    with pytest.raises(RankError, match="loss of step 15 is one spike more than the 2"):
        in_one_process(work)


@pytest.mark.long
def test_without_an_action_nothing_is_judged(corpus: Path, tmp_path: Path) -> None:
    def work() -> list[dict[str, Any]]:
        poison({13})
        events: list[dict[str, Any]] = []
        train_at(Layout(1, 1, 1), spec_of(corpus, Layout(1, 1, 1), 16, action="none"), tmp_path, events=events)
        return events

    assert not [event for event in in_one_process(work) if event["kind"].startswith("spike")]


def test_a_falling_noisy_curve_has_no_spikes_and_a_jump_is_one() -> None:
    draw = random.Random(0)
    history = LossHistory()
    highest = 0.0
    for step in range(500):
        loss = 2 + 8 / (1 + step / 20) + draw.gauss(0, 0.05)
        if history.count >= 50:
            highest = max(highest, history.deviations(loss))
        history.add(loss)
    assert highest < 4.5
    assert history.deviations(2 + 8 / 26 + 0.8) > 6
    flat = LossHistory()
    for _ in range(100):
        flat.add(3.0)
    assert flat.deviations(3.03) < 1.1
    copy = LossHistory()
    copy.load_state_dict(history.state_dict())
    assert copy == history


def test_data_steps_are_those_that_are_left() -> None:
    jumped = [0, 3, 4, 9]
    assert [data_step(step, jumped) for step in range(7)] == [1, 2, 5, 6, 7, 8, 10]
    assert [data_step(step, []) for step in range(3)] == [0, 1, 2]
