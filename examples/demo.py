"""The whole of Rubato in a few minutes: train on Ray, scale, lose a worker, go on, and end on the undisturbed curve.

Brings up a stack of its own, submits examples/demo.yaml twice and ends the stack whatever happens. The last line is
JSON; the exit code is 0 when the job succeeded and every promise held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from rubato.client import AsyncClient
from rubato.problems import RubatoError
from rubato.resources import Event, Job, Metric
from rubato.spec import JobSpec, load_spec

SMALL, LARGE = 4, 8
CLOSE = 1e-3  # fp32 sums in another order differ by far less; another curve differs by far more


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, default=Path(__file__).with_name("demo.yaml"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--scale-at", type=int, default=5, metavar="STEP", help="scale to 8 workers at this step")
    parser.add_argument("--kill-after", type=int, default=5, metavar="STEPS", help="kill one so long after they train")
    parser.add_argument("--loss-share", type=float, default=0.6, help="of the first loss that the last is under")
    parser.add_argument("--within", type=float, default=900.0, metavar="SECONDS", help="give up after so long")
    parser.add_argument("--keep", action="store_true", help="keep the folder with database, runs and logs")
    return parser.parse_args(arguments)


class BrokenPromiseError(Exception):
    """What the demo shows did not happen."""


_BEGAN = time.monotonic()


def say(text: str) -> None:
    minutes, seconds = divmod(int(time.monotonic() - _BEGAN), 60)
    print(f"[{minutes}:{seconds:02d}] {text}", flush=True)


# The stack, by the same command that a user types.


def rubato(*arguments: str, home: Path) -> dict[str, Any]:
    """Runs a ``rubato`` command with --json. Raises BrokenPromiseError with its error."""
    ran = subprocess.run(
        [sys.executable, "-m", "rubato", *arguments, "--home", str(home), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RUBATO_ELASTIC": "false"},  # the demo says itself when the job grows
        start_new_session=True,  # a Ctrl+C is for the demo, which then ends the stack in order
    )
    if ran.returncode:
        words = ran.stderr.strip().splitlines()
        raise BrokenPromiseError(
            f"rubato {arguments[0]} ended with {ran.returncode}: {words[-1] if words else 'no word'}"
        )
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


@dataclass
class Story:
    """A job as it goes, told line by line, and a way to wait for what happens to it."""

    client: AsyncClient
    job: Job
    metrics: dict[int, Metric] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    over: bool = False

    def __post_init__(self) -> None:
        self._news = asyncio.Condition()

    async def follow(self) -> None:
        """Tells everything until the job is over."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_metrics())
            tasks.create_task(self._follow_events())
        self.job = await self.client.job(self.job.id)
        self.over = True
        await self._tell()

    async def _follow_metrics(self) -> None:
        async for metric in self.client.follow_metrics(self.job.id):
            self.metrics[metric.step] = metric
            if metric.step == 1 or metric.step % 10 == 0:
                workers = metric.data * SMALL
                say(
                    f"  step {metric.step:3}/{self.job.progress.steps}  loss {metric.loss:.4f}  {workers} workers  "
                    f"{metric.tokens_per_s:6.0f} tokens/s  {bar(metric.step, self.job.progress.steps)}"
                )
            await self._tell()

    async def _follow_events(self) -> None:
        async for event in self.client.follow_events(self.job.id):
            self.events.append(event)
            say(f"  {event.kind:20} {event.message}")
            await self._tell()

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """What ``happened`` returns, as soon as that is true. Raises BrokenPromiseError when the job is over first."""
        async with self._news:
            while not (seen := happened()):
                if self.over:
                    reason = self.job.reason.message
                    raise BrokenPromiseError(f"the job was {self.job.state} ({reason}) before {what}")
                await self._news.wait()
        return seen

    def formed(self, workers: int, after: int = 0) -> Event | None:
        """The first generation of so many workers that formed after an event."""
        for event in self.events:
            if event.id > after and event.kind == "generation.formed" and event.data["workers"] == workers:
                return event
        return None

    def newest(self, kind: str, after: int) -> Event | None:
        return next((event for event in self.events if event.kind == kind and event.id > after), None)

    @property
    def generations(self) -> list[dict[str, Any]]:
        """The layouts the job ran at, in order."""
        layout = self.job.layout
        assert layout is not None
        return [
            {
                "generation": event.data["generation"],
                "workers": event.data["workers"],
                "data": event.data["data"],
                "pipeline": layout.pipeline,
                "tensor": layout.tensor,
                "from_step": event.data["step"] or 0,
            }
            for event in self.events
            if event.kind == "generation.formed"
        ]

    @property
    def losses(self) -> list[float]:
        """The loss of every step. Raises BrokenPromiseError when one was not told."""
        missing = [step for step in range(1, self.job.progress.steps + 1) if step not in self.metrics]
        if missing:
            raise BrokenPromiseError(f"steps {missing} of {self.job.name} were never reported")
        return [self.metrics[step].loss for step in range(1, self.job.progress.steps + 1)]


def bar(step: int, steps: int, width: int = 24) -> str:
    done = round(step / steps * width)
    return "#" * done + "." * (width - done)


async def disturbed(client: AsyncClient, spec: JobSpec, options: argparse.Namespace) -> Story:
    """The job that is scaled and loses a worker."""
    job = await client.submit(spec)
    say(f"submitted {job.name} ({job.id}); watch it at {client.url.join(job.links['page'])}")
    story = Story(client, job)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(story.follow())
        await disturb(client, story, options)
    return story


async def disturb(client: AsyncClient, story: Story, options: argparse.Namespace) -> None:
    job = story.job.id
    await story.until(f"step {options.scale_at}", lambda: options.scale_at in story.metrics)
    say(f"scaling to {LARGE} workers; the {SMALL} go on training while the others start")
    operation = await client.scale(job, LARGE)
    grown = await story.until(f"{LARGE} workers trained", lambda: story.formed(LARGE))
    kill_at = (grown.data["step"] or 0) + options.kill_after
    await story.until(f"step {kill_at} at {LARGE} workers", lambda: kill_at in story.metrics)
    operation = await client.operation(operation.id)
    phases = ", ".join(f"{phase.name} {phase.seconds or 0:.1f} s" for phase in operation.phases)
    say(f"the scaling is {operation.state}: {phases}")

    members = (await client.job(job)).workers.members
    victim = max((member for member in members if member.pid and member.rank is not None), key=lambda m: m.rank or 0)
    assert victim.pid is not None
    say(f"killing the worker of rank {victim.rank}: SIGKILL to process {victim.pid}; what is left goes on training")
    before = story.events[-1].id
    os.kill(victim.pid, signal.SIGKILL)
    lost = await story.until("its loss was seen", lambda: story.newest("worker.lost", before))
    await story.until("the others went on", lambda: story.formed(SMALL, lost.id))
    back = await story.until(f"{LARGE} workers were back", lambda: story.formed(LARGE, lost.id))
    say(f"all {LARGE} workers are back, at step {back.data['step']}; now to the end")


async def undisturbed(client: AsyncClient, spec: JobSpec) -> Story:
    """The same spec, left alone."""
    job = await client.submit(spec)
    say(f"submitted {job.name} ({job.id}): the same spec, left alone at {SMALL} workers, for comparison")
    story = Story(client, job)
    await story.follow()
    return story


async def play(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both jobs, and what the comparison says."""
    spec = load_spec(options.spec, options.overrides)
    async with AsyncClient(url) as client, asyncio.timeout(options.within):
        first = await disturbed(client, spec.model_copy(update={"name": f"{spec.name}-scaled"}), options)
        say(f"{first.job.name} is {first.job.state}: {first.job.reason.message}")
        second = await undisturbed(client, spec.model_copy(update={"name": f"{spec.name}-left-alone"}))
        say(f"{second.job.name} is {second.job.state}: {second.job.reason.message}")
        difference = max(abs(one - other) for one, other in zip(first.losses, second.losses, strict=True))
        result = {
            "job": first.job.id,
            "state": first.job.state,
            "steps": first.job.progress.step,
            "first_loss": first.losses[0],
            "last_loss": first.losses[-1],
            "generations": len(first.generations),
            "layouts": first.generations,
            "restarts": first.job.restarts.model_dump(),
            "max_curve_difference": difference,
        }
    promises = {
        "the job succeeded": first.job.state == "SUCCEEDED",
        "the job left alone succeeded, and was left alone": second.job.state == "SUCCEEDED"
        and {layout["workers"] for layout in second.generations} == {SMALL},
        f"the last loss is under {options.loss_share:.0%} of the first": first.losses[-1]
        < options.loss_share * first.losses[0],
        "it ran at both sizes": {layout["workers"] for layout in first.generations} == {SMALL, LARGE},
        "one worker was lost and came back": first.job.restarts.hardware == 1,
        f"both curves are one, within {CLOSE}": difference <= CLOSE,
    }
    for promise, held in promises.items():
        say(f"{'kept  ' if held else 'BROKEN'}  {promise}")
    broken = [promise for promise, held in promises.items() if not held]
    return {**result, "broken": broken} if broken else result


async def interruptible(play: Any) -> dict[str, Any]:
    """Runs the play so that Ctrl+C and SIGTERM end it like any other failure."""
    task = asyncio.ensure_future(play)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    result: dict[str, Any] = await task
    return result


def failure(error: BaseException) -> str:
    """What a failed play says; of several failures at once the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "it took too long"
    return "interrupted" if isinstance(error, asyncio.CancelledError) else str(error)


def last_words(home: Path) -> None:
    """The ends of the logs that tell most, after a failure."""
    logs = [*home.glob("logs/*.log"), *home.glob("runs/*/logs/*/driver.log")]
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()[-12:]
        print(f"-- {log}", *lines, sep="\n   ", file=sys.stderr)


def act(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything between the first process and the last. Never leaves a stack behind."""
    result: dict[str, Any] = {}
    try:
        say(f"starting a Ray cluster of {LARGE} logical CPUs and a control plane, state in {home}")
        stack = rubato("up", "--cpus", str(LARGE), "--port", "0", home=home)
        say(f"up: web page {stack['urls']['api']}, Ray dashboard {stack['urls']['dashboard']}")
        result = asyncio.run(interruptible(play(stack["urls"]["api"], options)))
    except* (BrokenPromiseError, RubatoError, TimeoutError, KeyboardInterrupt, asyncio.CancelledError) as error:
        result = {"error": failure(error)}
        say(f"FAILED: {result['error']}")
        last_words(home)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # ending the stack is not interrupted
        rubato("down", home=home)
        say("the stack is down, no process and no port of it is left")
    return result


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, interrupt)
    home = Path(tempfile.mkdtemp(prefix="rubato-demo-"))
    result = act(home, options)
    good = not ({"error", "broken"} & result.keys())
    if good and not options.keep:
        shutil.rmtree(home)
    else:
        say(f"database, runs and logs are kept in {home}")
    print(json.dumps(result), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
