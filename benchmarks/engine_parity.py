"""Every technique against the plain single process: the largest difference of losses and gradient norms.

A table of cases: pipeline schedules x ZeRO stages x tensor x data, then recomputation, precision,
compression and model families.
Each case trains the same job in forked ranks, in fp32. Half of the targets do not count, in some samples more than in
others, so a wrong weight of a micro-batch or a replica shows. What a spec refuses is listed with its reason.

``python -m benchmarks.engine_parity [WORD ...]`` runs the cases whose names have all the words. Prints one JSON line
last; exit status 1 when a case is off by more than its bound.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import workers.engine.train
from rubato.layout import Layout
from rubato.pipelines import SCHEDULES
from rubato.problems import SpecError
from rubato.spec import JobSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.data import Sampler
from workers.engine.parallel.tensor import NOT_COUNTED

FP32_BOUND = 1e-4
MODEL = {"hidden_size": 16, "layers": 8, "heads": 4, "kv_heads": 2, "ffn_size": 24}
MOST_RANKS = 8
AT_ONCE = 8


@dataclass(frozen=True)
class Case:
    """What differs from the plain job. ``bound``: on differences; ``reference``: what of it the plain job has, too."""

    name: str
    layout: Layout
    sections: dict[str, Any]
    bound: float = FP32_BOUND
    reference: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "_")


def shape(layout: Layout, **parallelism: Any) -> dict[str, Any]:
    return {"tensor": layout.tensor, "pipeline": layout.pipeline, **parallelism}


def matrix() -> Iterator[Case]:
    """Schedules x ZeRO x tensor x data; without a pipeline there is one schedule, without replicas nothing to shard."""
    for data, pipeline, tensor in itertools.product((1, 2, 3), (1, 2), (1, 2)):
        layout = Layout(data, pipeline, tensor)
        if layout.world_size > MOST_RANKS:
            continue
        schedules = SCHEDULES if pipeline > 1 else ["1f1b"]
        for schedule, zero in itertools.product(schedules, range(4) if data > 1 else (0,)):
            name = f"{data}x{pipeline}x{tensor} {schedule} zero {zero}"
            yield Case(name, layout, {"memory": {"zero": zero}, "parallelism": shape(layout, schedule=schedule)})


def others() -> Iterator[Case]:
    """Sharding over some replicas; compiled layers; recomputation; precision; families."""
    four, mixed = Layout(4, 1, 1), Layout(2, 2, 2)
    for zero in (1, 2, 3):
        yield Case(f"4x1x1 zero {zero} over 2", four, {"memory": {"zero": zero, "shard_over": 2}})
    for zero in (0, 2, 3):
        compiled = {"train": {"compile": True}, "memory": {"zero": zero}}
        yield Case(f"2x1x1 compiled zero {zero}", Layout(2, 1, 1), compiled)
    for mode, zero in itertools.product(("full", "selective", {"every": 2}), (0, 3)):
        memory = {"recompute": mode, "zero": zero}
        yield Case(f"2x2x2 recompute {mode} zero {zero}", mixed, {"memory": memory, "parallelism": shape(mixed)})
    split = shape(mixed, schedule="zbv")
    yield Case("2x2x2 recompute selective zbv", mixed, {"memory": {"recompute": "selective"}, "parallelism": split})
    # A narrow format is held to the same format in one process: sums in another order differ in its last bits.
    for precision, bound in (("bf16", 5e-2), ("bf16_pure", 5e-2), ("fp16", 1e-2), ("float8", 5e-2)):
        train = {"train": {"precision": precision}}
        for zero in (0, 1, 3):
            sections = {**train, "memory": {"zero": zero}, "parallelism": shape(mixed)}
            yield Case(f"2x2x2 {precision} zero {zero}", mixed, sections, bound, train)
    # The largest values and factors of low rank leave out too much of a step to be compared over three; where state is
    # sharded they are refused. The first updates of AdamW are little more than signs, so at a high learning rate a last
    # digit would decide where the next step is.
    slow = {"optimizer": {"lr": 1e-4}}
    for name, bound in (("bf16", 1e-2), ("fp16", 1e-2), ("int8", 5e-2), ("topk", 0.0), ("powersgd", 0.0)):
        for zero in (0, 2) if bound else (2,):
            sections = {**slow, "communication": {"compression": name}, "memory": {"zero": zero}}
            sections["parallelism"] = shape(mixed)
            yield Case(f"2x2x2 compression {name} zero {zero}", mixed, sections, bound, slow)
    families: dict[str, dict[str, Any]] = {
        "gpt2 tied": {"family": "gpt2", "positions": 32, "kv_heads": 4},
        "qwen2": {"family": "qwen", "tie_embeddings": True},
        "qwen3": {"family": "qwen", "qk_norm": True, "head_size": 8},
    }
    for (family, model), zero in itertools.product(families.items(), (0, 3)):
        sections = {"model": model, "memory": {"zero": zero}, "parallelism": shape(mixed)}
        yield Case(f"2x2x2 {family} zero {zero}", mixed, sections, reference={"model": model})


class Patchy(Sampler):
    """Some targets do not count, more of them in some samples than in others."""

    def batch(self, step: int, samples: range) -> tuple[Tensor, Tensor]:
        tokens_BS, targets_BS = super().batch(step, samples)
        for row, sample in enumerate(samples):
            targets_BS[row, : sample + step] = NOT_COUNTED
        return tokens_BS, targets_BS


def spec_of(corpus: Path, layout: Layout, sections: dict[str, Any]) -> JobSpec:
    plain = {"train": {"steps": 3, "global_batch": 12}, "workers": layout.world_size}
    content: dict[str, Any] = {"model": MODEL, **plain, **sections}
    for name, section in plain.items():
        if isinstance(section, dict):
            content[name] = {**section, **content[name]}
    content["model"] = {**MODEL, **content["model"]}
    return tiny_spec(corpus, **content)


def curve(layout: Layout, spec: JobSpec, folder: Path, rank: int = 0, store: dist.Store | None = None) -> list[Any]:
    """Loss and gradient norm of each step, in fp32."""
    workers.engine.train.Sampler = Patchy  # type: ignore[misc]
    metrics = train_at(layout, spec, folder, rank, store, folder.name, dtype=torch.float32)
    return [(metric["loss"], metric["grad_norm"]) for metric in metrics]


def differences(found: list[Any], reference: list[Any]) -> tuple[float, float]:
    """The largest relative difference of losses, and of gradient norms."""
    if len(found) != len(reference):
        return float("inf"), float("inf")
    one, other = torch.tensor(found, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    loss, norm = ((one - other).abs() / other.abs()).max(dim=0).values.tolist()
    return loss, norm


def main() -> int:
    words = sys.argv[1:]
    cases = [case for case in [*matrix(), *others()] if all(word in case.name.split() for word in words)]
    results: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as name:
        folder = Path(name)
        corpus = write_corpus(folder)
        possible: list[tuple[Case, JobSpec]] = []
        for case in cases:
            try:
                possible.append((case, spec_of(corpus, case.layout, case.sections)))
            except SpecError as error:
                refused.append({"case": case.name, "reason": "; ".join(map(str, error.problems))})
        references = _references([case for case, _ in possible], corpus, folder)
        for size, here in _together(possible):

            def ranks(rank: int, store: dist.Store, here: list[tuple[Case, JobSpec]] = here) -> list[Any]:
                return [curve(each.layout, spec, folder / each.folder, rank, store) for each, spec in here]

            for (case, _), found in zip(here, run_ranks(size, ranks, seconds=1200)[0], strict=True):
                loss, norm = differences(found, references[json.dumps(case.reference)])
                result = {"case": case.name, "loss": loss, "grad_norm": norm, "bound": case.bound}
                results.append(result | {"passed": max(loss, norm) <= case.bound})
                print(results[-1], file=sys.stderr)
    for each in refused:
        print(each, file=sys.stderr)
    failed = [each["case"] for each in results if not each["passed"]]
    exact = [each for each in results if each["bound"] == FP32_BOUND]
    worst = {what: max((each[what] for each in exact), default=0.0) for what in ("loss", "grad_norm")}
    line = {"benchmark": "engine_parity", "worst_fp32": worst, "failed": failed, "cases": results, "refused": refused}
    print(json.dumps(line))
    return 1 if failed else 0


def _together(possible: list[tuple[Case, JobSpec]]) -> Iterator[tuple[int, list[tuple[Case, JobSpec]]]]:
    """Cases of one number of ranks, some at a time: what is found is told before all are done."""
    for size in sorted({case.layout.world_size for case, _ in possible}):
        here = [(case, spec) for case, spec in possible if case.layout.world_size == size]
        for start in range(0, len(here), AT_ONCE):
            yield size, here[start : start + AT_ONCE]


def _references(cases: list[Case], corpus: Path, folder: Path) -> dict[str, list[Any]]:
    """The curves of one process, by what they have in common with the cases."""
    alone = Layout(1, 1, 1)
    wanted = {json.dumps(case.reference): case.reference for case in cases}

    def train_all() -> dict[str, list[Any]]:
        return {
            key: curve(alone, spec_of(corpus, alone, sections), folder / f"alone-{number}")
            for number, (key, sections) in enumerate(wanted.items())
        }

    found: dict[str, list[Any]] = in_one_process(train_all, seconds=300)
    return found


if __name__ == "__main__":
    sys.exit(main())
