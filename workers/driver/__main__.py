"""`python -m workers.driver`: runs one attempt of a job on the Ray cluster it is started on."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import ray

from rubato.layout import layout_for, nearest_sizes
from rubato.problems import FieldProblem, RubatoError, SpecError
from rubato.resources import DriverState, SyncReply, SyncRequest
from rubato.spec import JobSpec
from workers.driver.driver import END_PATIENCE_S, Driver
from workers.driver.journal import Journal
from workers.driver.leftovers import NAMESPACE, sweep
from workers.driver.outcome import Outcome
from workers.driver.replicas import prepare_environment
from workers.driver.sync import ControlPlane
from workers.engine.run import RunDirectory

log = logging.getLogger("workers.driver")

TOKEN = "RUBATO_ATTEMPT_TOKEN"
FENCED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 succeeded or cancelled, 1 failed, 3 another attempt runs the job."""
    options = _options(arguments)
    run = RunDirectory(options.run_dir)
    try:
        _log_to(run.logs / f"attempt-{options.epoch}" / "driver.log")
        if not run.claim(options.epoch):
            log.error("epoch %d is older than %d, which has claimed %s", options.epoch, run.newest_epoch(), run.root)
            return FENCED
        spec = run.read_spec()
        _check_size(spec, options.workers)
        prepare_environment()
        _connect_to_ray(options.attempt)
        threading.Thread(target=sweep, name="sweep", daemon=True).start()
    except (RubatoError, OSError) as error:
        log.exception("this attempt cannot begin")
        return asyncio.run(_refuse(run, options, str(error)))
    outcome = asyncio.run(_drive(run, spec, options))
    if ray.is_initialized():  # a run could not be ended, and waits in a thread for what an exit would take away
        logging.shutdown()
        os._exit(outcome.exit_code)
    return outcome.exit_code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m workers.driver", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="holds spec.json; shared by all nodes")
    parser.add_argument("--attempt", required=True, help="name of this attempt")
    parser.add_argument("--epoch", type=int, required=True, help="number of this attempt; the newest one may write")
    parser.add_argument("--workers", type=int, required=True, help="workers to begin with")
    parser.add_argument(
        "--hardware-restarts", type=int, default=0, metavar="N", help="restarts that earlier attempts have spent"
    )
    parser.add_argument("--control", help=f"URL of the control plane, with the token in {TOKEN}; without: run alone")
    options = parser.parse_args(arguments)
    if options.control and TOKEN not in os.environ:
        parser.error(f"--control needs the attempt's token in {TOKEN}")
    return options


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path), logging.StreamHandler(sys.stderr)]
    line = "%(asctime)s driver %(levelname).1s %(name)s %(message)s"
    logging.basicConfig(level=logging.WARNING, handlers=handlers, format=line, force=True)
    logging.getLogger("workers").setLevel(logging.INFO)


def _check_size(spec: JobSpec, workers: int) -> None:
    if layout_for(spec.parallelism, workers) is not None and workers in spec.sizes:
        return
    near = nearest_sizes(spec.parallelism, spec.train.global_batch, workers, spec.workers.min, spec.workers.max)
    fix = f"start with {' or '.join(map(str, near))}"
    raise SpecError([FieldProblem("workers", f"the spec cannot run on {workers} workers", fix)])


def _connect_to_ray(attempt: str) -> None:
    try:
        ray.init(address="auto", namespace=NAMESPACE + attempt, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise RubatoError(
            f"there is no Ray cluster to connect to: {error}",
            fix="start one, or set RAY_ADDRESS to where it is",
            code="ray_unreachable",
        ) from error


async def _drive(run: RunDirectory, spec: JobSpec, options: argparse.Namespace) -> Outcome:
    driver = Driver(
        run,
        spec,
        attempt=options.attempt,
        epoch=options.epoch,
        workers=options.workers,
        hardware_restarts=options.hardware_restarts,
    )
    if options.control:
        driver.connect(options.control, os.environ[TOKEN])
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which would end this process at once
        loop.add_signal_handler(number, driver.drain, f"the driver was told to end ({number.name})")
    outcome = await driver.run()
    log.info("%s: %s", outcome.state or "FENCED", outcome.message)
    if await driver.end_runs():  # before patience with the control plane keeps them waiting
        ray.shutdown()
    await driver.tell_end()
    return outcome


async def _refuse(run: RunDirectory, options: argparse.Namespace, cause: str) -> int:
    """Tells the control plane of an attempt that could not begin."""
    journal = Journal(run, fence=lambda: run.holds(options.epoch))
    journal.event("attempt.failed", cause, {"cause": cause})
    if options.control:
        failed = SyncRequest(
            epoch=options.epoch,
            state=DriverState.FAILED,
            reason_code="cannot_start",
            reason_message=cause,
            generation=journal.last_generation,
            layout=None,
        )
        listener = _Nobody()
        control = ControlPlane(options.control, options.attempt, os.environ[TOKEN], journal, lambda: failed, listener)
        await control.tell_end(END_PATIENCE_S)
        await control.close()
    return 1


class _Nobody:
    """Does nothing with what the control plane wants, because there is nothing to do any more."""

    def wanted(self, reply: SyncReply) -> None:
        """Nothing runs."""

    def fenced(self, detail: str) -> None:
        """Nothing runs."""

    def control_unreachable(self, cause: str) -> None:
        """It is tried again anyway."""

    def control_reachable(self) -> None:
        """The end is told next."""


if __name__ == "__main__":
    sys.exit(main())
