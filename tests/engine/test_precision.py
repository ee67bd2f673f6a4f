"""Number formats, and steps whose gradients are not finite: nobody takes them, everybody goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rubato.layout import Layout
from rubato.problems import RubatoError
from rubato.spec import JobSpec, LossScaleSpec, OptimizerSpec, TrainSpec
from tests.engine.forked import RankError, in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine import train as loop
from workers.engine.comm.overlap import Start
from workers.engine.device import Device
from workers.engine.membership import Generation, Standing, StaticMembership
from workers.engine.memory.float8 import convert_linears
from workers.engine.memory.precision import PRECISIONS, apply_precision
from workers.engine.mesh import ReplicaMesh
from workers.engine.models.llama import Llama, LlamaConfig
from workers.engine.optim import LossScale
from workers.engine.parallel.data import DataAxisError, DataGroup
from workers.engine.run import RunDirectory
from workers.engine.state import TrainingState

CPU = Device.of_rank(0, gpu=False)
START = 2**16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def fp16_spec(corpus: Path, **train: Any) -> JobSpec:
    constant = {"schedule": {"name": "constant"}}
    return tiny_spec(
        corpus, train={"steps": 6, "precision": "fp16", **train}, optimizer=constant, checkpoint={"every": 3}
    )


class Watched(loop.Worker):
    """Spoils a gradient of each bucket in the backward passes of some steps, and writes down what updates did."""

    spoiled: Callable[[loop.Worker], float | None] = lambda worker: None
    log: list[tuple[int, int, bool]] = []  # noqa: RUF012 (one worker a process): step, scale after it, weights changed

    def backward(self, runner: Any, tokens_BS: Tensor, targets_BS: Tensor, start: Start) -> Tensor:
        value = type(self).spoiled(self)

        def spoil(bucket: Tensor) -> None:
            if value is not None:
                bucket[0] = value
            start(bucket)

        return super().backward(runner, tokens_BS, targets_BS, spoil)

    def update(self, commit: dict[str, float]) -> None:
        before = [leaf.clone() for leaf in self.state.leaves]
        super().update(commit)
        changed = not all(map(torch.equal, before, self.state.leaves))
        self.log.append((self.state.done, self.state.scale.value, changed))


def watched(spoiled: Callable[[loop.Worker], float | None]) -> None:
    """Makes the loop of this process use a Watched worker."""
    Watched.spoiled = spoiled  # type: ignore[assignment]
    loop.Worker = Watched  # type: ignore[misc]


@pytest.mark.parametrize("layout", [Layout(2, 1, 2), Layout(1, 2, 1)], ids=str)
def test_an_inf_on_one_rank_halves_the_scale_on_all_and_changes_no_weight(
    layout: Layout, corpus: Path, tmp_path: Path
) -> None:
    shape = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    spec = fp16_spec(corpus, loss_scale={"growth_interval": 2})
    spec = spec.model_validate({**spec.model_dump(), "parallelism": shape, "workers": layout.world_size})

    def work(rank: int, store: Any) -> tuple[list[Any], list[Any], list[Any]]:
        watched(lambda worker: torch.inf if rank == 1 and worker.state.done == 1 else None)
        events: list[dict[str, Any]] = []
        metrics = train_at(layout, spec, tmp_path, rank, store, dtype=torch.float32, events=events)
        return Watched.log, [metric["step"] for metric in metrics], events

    by_rank = run_ranks(layout.world_size, work)
    expected = [(1, START, True), (2, START // 2, False), (3, START // 2, True), (4, START, True)]
    expected += [(5, START, True), (6, 2 * START, True)]
    assert [log for log, _, _ in by_rank] == [expected] * layout.world_size
    _, steps, events = by_rank[0]
    assert steps == [1, 3, 4, 5, 6]
    skipped = [event for event in events if event["kind"] == "step.skipped"]
    assert [(event["data"]["step"], event["data"]["loss_scale"]) for event in skipped] == [(2, START // 2)]
    assert not any(events for _, _, events in by_rank[1:])


@pytest.mark.parametrize("value", [torch.nan, -torch.inf], ids=str)
def test_not_finite_in_fp32_is_skipped_and_a_row_of_it_ends_the_job(value: float, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_spec(corpus, train={"steps": 9}, faults={"nonfinite_steps": 3})

    def work(bad: set[int], folder: str) -> list[Any]:
        watched(lambda worker: value if worker.state.done + 1 in bad else None)
        train_at(Layout(1, 1, 1), spec, tmp_path / folder)
        return Watched.log

    log = in_one_process(lambda: work({2, 3, 5, 6}, "goes on"))
    assert [(step, changed) for step, _, changed in log] == [(step, step not in {2, 3, 5, 6}) for step in range(1, 10)]
    with pytest.raises(RankError, match="gradients of 3 steps in a row, up to step 6, were NaN or Inf"):
        in_one_process(lambda: work({4, 5, 6}, "ends"))


class Interrupted(StaticMembership):
    """Its second generation begins where a break between the commit of a step and its update has left this worker."""

    def join(self, standing: Standing) -> Generation | None:
        if not self._joined:
            return super().join(standing)
        assert standing.prepared
        first, step = self._generation, (standing.step or 0) + 1
        return Generation(2, 1, 0, step, roll_forward=True, source=None, commit=None, store=first.store)


def test_a_skipped_step_is_rolled_forward_and_restored_like_any_other(corpus: Path, tmp_path: Path) -> None:
    spec = fp16_spec(corpus)

    def work(folder: str, steps: int, broken_at: int | None) -> tuple[list[Any], list[Tensor]]:
        watched(lambda worker: torch.inf if worker.state.done == 1 else None)
        original, workers = DataGroup.max, []

        def break_once(group: DataGroup, value: float) -> float:
            if workers[0].state.done == broken_at and not group._generation.roll_forward:
                raise DataAxisError("broken on purpose")
            return original(group, value)

        DataGroup.max = break_once  # type: ignore[method-assign]
        run = RunDirectory.create(tmp_path / folder)
        here = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps})})
        membership = Interrupted()
        worker = loop.Worker(here, membership, ReplicaMesh.of_world(Layout(1, 1, 1), 0, CPU), run, lambda: True)
        workers.append(worker)
        while not worker.live(membership.join(worker.standing())):  # type: ignore[arg-type]
            pass
        state = worker.state
        return [state.step, state.updates, state.scale.state_dict()], [*state.leaves, *state._tensors()]

    whole = in_one_process(lambda: work("whole", 6, None))
    broken = in_one_process(lambda: work("broken", 6, 1))
    in_one_process(lambda: work("halves", 3, None))
    resumed = in_one_process(lambda: work("halves", 6, None))
    assert whole[0] == [6, 5, {"value": START // 2, "steady": 4, "failing": 0}]
    for other in (broken, resumed):
        assert other[0] == whole[0]
        assert all(map(torch.equal, other[1], whole[1]))


def test_a_newcomer_receives_all_that_goes_with_the_weights() -> None:
    def work() -> list[Any]:
        sent: list[Tensor] = []

        class Wire:
            def broadcast(self, tensors: list[Tensor], source: int, bucket_mb: float) -> None:
                sent.extend(tensor.clone() for tensor in tensors)

        class OtherEnd:
            def broadcast(self, tensors: list[Tensor], source: int, bucket_mb: float) -> None:
                for tensor in tensors:
                    tensor.copy_(sent.pop(0))

        def state() -> TrainingState:
            spec = TrainSpec(steps=9, global_batch=1, precision="fp16")
            weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
            return TrainingState({"w": weight}, OptimizerSpec(), LossScale(spec))

        giver, taker = state(), state()
        giver.begin()
        for leaf in giver.leaves:
            leaf.grad = torch.ones_like(leaf)
        giver.update(lr=0.1, tokens=5)
        giver.skip(tokens=5)
        giver.jumped = [3, 4, 2**40]
        giver.losses.add(1.5)
        taker.jumped = [7]
        giver.receive(Wire(), 0, 2, 25.0)  # type: ignore[arg-type]
        taker.receive(OtherEnd(), 0, 2, 25.0)  # type: ignore[arg-type]
        held = taker.optimizer.state[taker.leaves[0]]
        assert giver.jumped == taker.jumped == [3, 4, 2**40]
        assert giver.losses == taker.losses
        assert giver.losses.mean == 1.5
        return [taker.step, taker.updates, taker.tokens, taker.scale.state_dict(), float(held["step"]), taker.leaves[0]]

    step, updates, tokens, scale, adam, weight = in_one_process(work)
    assert (step, updates, tokens, adam) == (2, 1, 10, 1)
    assert scale == {"value": START // 2, "steady": 0, "failing": 0}
    assert weight.dtype is torch.float32
    assert weight.tolist() == pytest.approx([-0.1] * 3)


def test_the_loss_scale_doubles_after_an_interval_and_never_leaves_its_range() -> None:
    spec = TrainSpec(steps=1, global_batch=1, precision="fp16", loss_scale=LossScaleSpec(start=2, growth_interval=2))
    scale = LossScale(spec)
    seen = []
    for finite in (True, True, True, False, True, False, False, False, True):
        scale.stepped() if finite else scale.overflowed()
        seen.append((scale.value, scale.failing))
    assert seen == [(2, 0), (4, 0), (4, 0), (2, 0), (2, 0), (1, 0), (1, 1), (1, 2), (1, 0)]
    fixed = LossScale(spec.model_copy(update={"precision": "bf16"}))
    fixed.stepped()
    fixed.stepped()
    assert fixed.value == 1


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-3), ("bf16_pure", 1e-2), ("fp16", 1e-3)])
def test_a_narrow_format_follows_the_curve_of_fp32(
    precision: str, tolerance: float, corpus: Path, tmp_path: Path
) -> None:
    def losses(kind: str, layout: Layout, rank: int = 0, store: Any = None) -> list[float]:
        shape = {"tensor": layout.tensor, "pipeline": layout.pipeline}
        spec = tiny_spec(corpus, train={"precision": kind}, parallelism=shape, workers=layout.world_size)
        folder = tmp_path / f"{kind}{layout.world_size}"
        metrics = train_at(layout, spec, folder, rank, store, f"{kind}{layout}", dtype=torch.float32)
        return [metric["loss"] for metric in metrics]

    reference = in_one_process(lambda: losses("fp32", Layout(1, 1, 1)))
    found = run_ranks(4, lambda rank, store: losses(precision, Layout(1, 2, 2), rank, store))[0]
    assert len(reference) == 3
    assert found == pytest.approx(reference, rel=tolerance)
    assert found != reference


CONFIG = LlamaConfig(
    hidden_size=16, layers=2, heads=4, kv_heads=4, head_size=4, ffn_size=24, vocab_size=32, sequence_length=8,
    rope_theta=1e4, rope_scaling=None, norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_and_the_residual_stream_stay_in_fp32(precision: str) -> None:
    def work() -> dict[str, set[torch.dtype]]:
        model = Llama(CONFIG)
        apply_precision(model, PRECISIONS[precision], CPU)
        seen: dict[str, set[torch.dtype]] = {}
        for module in model.modules():
            module.register_forward_hook(
                lambda module, inputs, output: seen.setdefault(type(module).__name__, set()).add(output.dtype)
            )
        model(torch.zeros(1, 8, dtype=torch.int64)).float().sum().backward()
        seen["gradients"] = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
        return seen

    seen = in_one_process(work)
    narrow = PRECISIONS[precision].autocast
    assert seen["RMSNorm"] == seen["Block"] == seen["gradients"] == {torch.float32}
    assert seen["Linear"] == {narrow}


def test_float8_multiplies_both_ways_and_says_where_it_cannot_run() -> None:
    def work() -> tuple[list[float], str, set[str]]:
        torch.manual_seed(0)
        linear = nn.Linear(32, 48, bias=False)
        hidden_BSD, gradient_BSF = torch.randn(2, 16, 32, requires_grad=True), torch.randn(2, 16, 48)
        exact = linear(hidden_BSD)
        expected = [exact, *torch.autograd.grad(exact, [hidden_BSD, linear.weight], gradient_BSF)]
        convert_linears(nn.ModuleList([linear]))
        product = linear(hidden_BSD)
        found = [product, *torch.autograd.grad(product, [hidden_BSD, linear.weight], gradient_BSF.bfloat16())]
        errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, expected, strict=True)]
        model = Llama(CONFIG)
        with pytest.raises(RubatoError) as refused:
            apply_precision(model, PRECISIONS["float8"], CPU)
        convert_linears(model.layers)
        narrow = {name for name, module in model.named_modules() if "forward" in vars(module)}
        return errors, str(refused.value), narrow

    errors, refusal, narrow = in_one_process(work)
    # Rounding to 3 or 2 bits after the point: up to 1/16 and 1/8 of a value, less in the sum of many.
    assert errors[0] == pytest.approx(0.04, abs=0.01)
    assert errors[1:] == pytest.approx([0.06, 0.06], abs=0.015)
    assert "float8 cannot run on the CPU" in refusal
    # 24, the feed-forward's width, is no multiple of 16.
    assert narrow == {f"layers.{layer}.attention.{name}" for layer in (0, 1) for name in ("wq", "wk", "wv", "wo")}
