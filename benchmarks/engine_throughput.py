"""What the engine costs over a plain PyTorch loop: tokens a second of both on the same model and batches, as a ratio.

The plain loop takes one step after each step of the engine, in the same process, so that whatever else the machine is
doing slows both alike; the ratio is of medians. Both start from the same weights: ``loss_difference`` shows that they
did the same work. Prints one JSON line last.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from rubato.layout import Layout
from rubato.spec import JobSpec, parse_spec
from workers.engine.data import Sampler, open_corpus
from workers.engine.device import Device
from workers.engine.membership import StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.models import whole_model
from workers.engine.optim import learning_rate
from workers.engine.parallel.compose import ModelShare
from workers.engine.run import RunDirectory
from workers.engine.train import train

WARM_UP = 3  # steps that are not counted
CASES = {  # where matrices dominate, and where nothing hides what the engine adds
    "1m": {"sequence_length": 256, "global_batch": 8, "micro_batch": 4, "steps": 24},
    "tiny": {"sequence_length": 32, "global_batch": 2, "micro_batch": 1, "steps": 150},
}


def spec_of(preset: str) -> JobSpec:
    case = CASES[preset]
    return parse_spec(
        {
            "name": f"bench-{preset}",
            "model": {"preset": preset},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": case["sequence_length"]},
            "train": {"steps": case["steps"], "global_batch": case["global_batch"]},
            "parallelism": {"micro_batch": case["micro_batch"]},
            "workers": 1,
            "checkpoint": {"every": case["steps"]},
        }
    )


def plain_loop(spec: JobSpec, sampler: Sampler, mesh: ReplicaMesh) -> Callable[[int], float]:
    """A step as one writes it by hand, by its number; the loss of that step."""
    model = whole_model(spec)
    share = ModelShare(spec, mesh)
    share.initialise(share.parameters)
    model.load_state_dict(dict(share.parameters))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    wanted = spec.optimizer
    groups = [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=wanted.lr, betas=wanted.betas, eps=wanted.eps, fused=True)
    batch, micro_batch = spec.train.global_batch, spec.parallelism.micro_batch

    def step(number: int) -> float:
        tokens_BS, targets_BS = sampler.batch(number, range(batch))
        loss_sum = 0.0
        for tokens, targets in zip(tokens_BS.split(micro_batch), targets_BS.split(micro_batch), strict=True):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / targets_BS.numel()
            loss.backward()
            loss_sum += loss.item()
        if spec.train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), spec.train.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(wanted, number, spec.train.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss_sum

    return step


@dataclass
class Race:
    """Lets the plain loop follow the engine step by step and keeps the seconds of both."""

    plain: Callable[[int], float]
    engine_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    loss_difference: float = 0.0

    def __call__(self, kind: str, record: dict[str, Any]) -> None:
        if kind != "metric":
            return
        began = time.perf_counter()
        loss = self.plain(record["step"] - 1)
        self.plain_s.append(time.perf_counter() - began)
        self.engine_s.append(record["step_s"])
        self.loss_difference = max(self.loss_difference, abs(loss - record["loss"]))


def measure(preset: str) -> dict[str, Any]:
    """Trains one case to its end."""
    spec = spec_of(preset)
    mesh = ReplicaMesh.of_world(Layout(1, 1, 1), 0, Device.of_rank(0, gpu=False))
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as folder:
        run = RunDirectory.create(folder)
        race = Race(plain_loop(spec, Sampler(spec, open_corpus(spec, run.corpus)), mesh))
        train(spec, membership=StaticMembership(on_report=race), mesh=mesh, run=run, warm_up_steps=0)
    engine_s, plain_s = (statistics.median(seconds[WARM_UP:]) for seconds in (race.engine_s, race.plain_s))
    tokens = spec.train.global_batch * spec.data.sequence_length
    return {
        "model": preset,
        "tokens_a_step": tokens,
        "engine_tokens_per_s": round(tokens / engine_s),
        "plain_tokens_per_s": round(tokens / plain_s),
        "ratio": round(plain_s / engine_s, 3),
        "overhead_ms_a_step": round(1000 * (engine_s - plain_s), 3),
        "loss_difference": race.loss_difference,
    }


def main() -> None:
    torch.set_num_threads(1)
    cases = []
    for preset in CASES:
        cases.append(measure(preset))
        print(cases[-1], file=sys.stderr)
    print(json.dumps({"benchmark": "engine_throughput", "threads": torch.get_num_threads(), "cases": cases}))


if __name__ == "__main__":
    main()
