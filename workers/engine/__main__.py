"""Trains without Ray: ``python -m workers.engine SPEC.yaml``, as one process or as each rank of a torchrun.

The log goes to stderr. The last line of stdout is the result, an object in JSON:
``{"loss", "steps", "tokens", "tokens_per_s", "layout", "run_dir"}``.
SIGUSR1 makes a process record its next 3 steps with the profiler, into ``profile/`` of the run directory.
Exit status: 0 all steps are done, 1 training failed, 2 the spec, the corpus or the run directory was refused.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rubato.checkpoints import list_checkpoints
from rubato.layout import Layout, layout_for, nearest_sizes
from rubato.problems import FieldProblem, RubatoError, SpecError
from rubato.resources import LayoutView
from rubato.spec import JobSpec, load_spec
from workers.engine.device import Device
from workers.engine.membership import StaticMembership
from workers.engine.mesh import ReplicaMesh, World
from workers.engine.run import RunDirectory
from workers.engine.train import TrainResult, train
from workers.engine.watch import log_to_stderr
from workers.engine.watch.board import Board

log = logging.getLogger("workers.engine")

PROFILED_STEPS = 3
_RUN_KEY = "run"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit status."""
    options = _parse(arguments)
    with _stdout_to_stderr() as stdout:
        log_to_stderr(f"rank {os.environ.get('RANK', '0')}")
        try:
            result = _run(options)
        except RubatoError as error:
            sys.stderr.write(f"{_readable(error)}\n")
            return 1 if error.status >= 500 else 2
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; start again with --run-dir to go on from the newest checkpoint\n")
            return 130
        if result is not None:
            stdout.write(json.dumps(result) + "\n")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workers.engine",
        description="Train a spec without Ray, in one process or under torchrun.",
    )
    parser.add_argument("spec", metavar="SPEC", help="a YAML file")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        nargs="+",
        action="extend",
        default=[],
        help="changes to the spec, such as train.steps=100 parallelism.tensor=2",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="where checkpoints and records go; with checkpoints in it, the run goes on (default: a new one in ./runs)",
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> dict[str, Any] | None:
    """Trains to the end; the result on the first rank, None on the others."""
    spec = load_spec(options.spec, options.overrides)
    layout = _layout(spec)
    gpu = spec.workers.gpus > 0
    if not gpu:
        torch.set_num_threads(max(1, round(spec.workers.cpus)))
    world = World.from_environment(gpu=gpu)
    record = None
    try:
        run, epoch = _open_run(spec, options.run_dir, world)
        mesh = ReplicaMesh.of_world(layout, world.rank, Device.of_rank(world.local_rank, gpu=gpu))
        record = _Record(spec, run)
        at = layout.coordinates(world.rank)
        nodes = [world.nodes[layout.rank(at._replace(data=replica))] for replica in range(layout.data)]
        hear = record if world.rank == 0 else _nothing
        membership = StaticMembership(layout.data, at.data, world.store, hear, nodes)
        signal.signal(signal.SIGUSR1, lambda *_: membership.request_profile(PROFILED_STEPS))
        # Nobody waits for a newcomer here, so the first steps need not be rehearsed.
        result = train(spec, membership=membership, mesh=mesh, run=run, fence=lambda: run.holds(epoch), warm_up_steps=0)
    finally:
        if record is not None:
            record.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return _summary(spec, layout, run, result, record) if world.rank == 0 else None


def _layout(spec: JobSpec) -> Layout:
    """The layout of as many workers as were started. Raises SpecError when the spec cannot run on so many."""
    size = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    layout = layout_for(spec.parallelism, size)
    if layout is None or size not in spec.sizes:
        shape, limits = spec.parallelism, spec.workers
        near = " or ".join(map(str, nearest_sizes(shape, spec.train.global_batch, size, limits.min, limits.max)))
        cause = (
            f"{size} worker{'s were' if size > 1 else ' was'} started; tensor {shape.tensor} x pipeline "
            f"{shape.pipeline}, a global batch of {spec.train.global_batch} in micro-batches of {shape.micro_batch} "
            f"and workers from {limits.min} to {limits.max} do not allow that"
        )
        fix = f"start {near} with torchrun --nproc_per_node, or change parallelism or workers"
        raise SpecError([FieldProblem("workers", cause, fix)])
    return layout


def _open_run(spec: JobSpec, given: Path | None, world: World) -> tuple[RunDirectory, int]:
    """The run directory and this start's epoch. The first rank makes it; the others hear where it is, or why not."""
    if world.rank > 0:
        assert world.store is not None
        told = json.loads(world.store.get(_RUN_KEY))
        if "refusal" in told:
            raise RubatoError(**told["refusal"])
        return RunDirectory(told["root"]), told["epoch"]
    try:
        run = RunDirectory.create(given or _new_folder(spec.name))
        run.adopt(spec)
        epoch = run.newest_epoch() + 1  # an earlier start that is still alive somewhere may not write any more
        run.claim(epoch)
    except RubatoError as error:
        if world.store is not None:
            refusal = {"detail": error.detail, "fix": error.fix, "code": error.code, "status": error.status}
            world.store.set(_RUN_KEY, json.dumps({"refusal": refusal}))
        raise
    if world.store is not None:
        world.store.set(_RUN_KEY, json.dumps({"root": str(run.root), "epoch": epoch}))
    log.info("run directory %s", run.root)
    return run, epoch


def _new_folder(name: str) -> Path:
    began = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = (Path("runs", began if number == 1 else f"{began}-{number}") for number in range(1, 1000))
    return next(path for path in candidates if not path.exists())


class _Record:
    """Keeps what the run reports: as lines in the run directory, and on its board."""

    def __init__(self, spec: JobSpec, run: RunDirectory) -> None:
        self._run = run
        self._board = Board(run.tensorboard) if spec.monitor.tensorboard else None
        self.tokens_per_s: float | None = None

    def __call__(self, kind: str, record: dict[str, Any]) -> None:
        line = {"at": datetime.now(UTC).isoformat(), **record}
        if kind == "event":
            log.info("%s", record["message"])
            self._keep(self._run.events, line)
        elif kind == "metric":
            self.tokens_per_s = record["tokens_per_s"]
            del line["again"]  # there is one generation, so nothing is told again
            self._keep(self._run.metrics, line)
        if self._board is not None:
            self._board.take(kind, record)

    def close(self) -> None:
        """Writes what is left."""
        if self._board is not None:
            self._board.close()

    def _keep(self, path: Path, line: dict[str, Any]) -> None:
        try:
            self._run.append(path, line)
        except OSError:  # training is worth more than its record
            log.exception("%s lacks a line", path)


def _nothing(kind: str, record: dict[str, Any]) -> None:
    """The first rank reports."""


def _summary(spec: JobSpec, layout: Layout, run: RunDirectory, result: TrainResult, record: _Record) -> dict[str, Any]:
    loss = result.loss
    if loss is None:  # no step was left to do
        loss = next((stored.manifest.loss for stored in reversed(list_checkpoints(run.checkpoints))), None)
    return {
        "loss": loss,
        "steps": result.step,
        "tokens": result.tokens,
        "tokens_per_s": record.tokens_per_s,
        "layout": LayoutView.of(layout, spec).model_dump(),
        "run_dir": str(run.root),
    }


def _readable(error: RubatoError) -> str:
    if isinstance(error, SpecError):
        return "the spec was refused:\n" + "\n".join(f"  {problem}" for problem in error.problems)
    return f"error: {error.detail}\n  fix: {error.fix}"


class _stdout_to_stderr:  # noqa: N801 (a context manager)
    """Sends what libraries print to stderr, and gives the real stdout for the one line that belongs there."""

    def __enter__(self) -> Any:
        sys.stdout.flush()
        self._real = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return self._real

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        self._real.flush()
        os.dup2(self._real.fileno(), 1)
        self._real.close()


if __name__ == "__main__":
    sys.exit(main())
