"""How the queue's policy does against FIFO and against gang scheduling without elasticity, on the same jobs.

``python -m benchmarks.scheduler [--trace FILE.csv[.gz]] [--gpus N | --load L]``

The policy is the one the control plane runs (``service.queue.policy``), on a simulated cluster. Each job may run at a
quarter to four times the size it was submitted with; its speed grows as size ** 0.9; each resize takes 30 s of training
from it. ``gang`` starts all workers of a job or none, first come first served, and fills gaps with jobs that are
predicted to be over in time (EASY backfill); it is told the length of every job, ``elastic`` only what a control plane
knows: declared steps and the speed that was measured once a job has trained for a minute. ``elastic-foretold`` knows
lengths from the submission on, ``elastic-blind`` never knows any. Load is all GPU time of the jobs over what the
cluster has while they arrive. Long jobs use much of theirs later, so the cluster is emptier than that, in short
stretches of a trace by far; with ``--crowded`` only the GPU time counts that they would use while they arrive, if none
had to wait.
The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scheduler.crowd import decision_ms
from benchmarks.scheduler.figures import Figures, figures
from benchmarks.scheduler.simulation import Knowledge, Setup, Simulation
from benchmarks.scheduler.traces import TracedJob, generated, offered, read_trace, window
from service.queue.terms import Rules

LOADS = (0.7, 0.9, 1.1)
GPUS = 1024
GENERATED_JOBS = 5000
WINDOW_JOBS = 3000

_GANG = Rules(elastic=False, fair=False)
POLICIES = {
    "fifo": Setup("fifo", Rules(elastic=False, fair=False, backfill=False), False, Knowledge.NOTHING),
    "gang": Setup("gang", _GANG, False, Knowledge.DECLARED),
    "elastic": Setup("elastic", Rules(), True, Knowledge.MEASURED),
    "elastic-foretold": Setup("elastic-foretold", Rules(), True, Knowledge.DECLARED),
    "elastic-blind": Setup("elastic-blind", Rules(), True, Knowledge.NOTHING),
}
PEER = "gang"


@dataclass(frozen=True)
class Case:
    """A stretch of jobs and the cluster they are given."""

    name: str
    jobs: Sequence[TracedJob]
    gpus: int
    load: float


def main() -> None:
    arguments = _arguments()
    policies = [POLICIES[name] for name in arguments.policies]
    records = []
    for case in _cases(arguments):
        records.append(compare(case, policies))
        _show(records[-1])
    result: dict[str, Any] = {"cases": records, "decision_ms": decision_ms()}
    print(f"\na decision about 1,000 jobs on 10,000 GPUs, ms: {result['decision_ms']}")
    print(json.dumps(result))


def compare(case: Case, policies: Sequence[Setup]) -> dict[str, Any]:
    """Figures of each policy on the same jobs, and ratios of each to gang scheduling."""
    found: dict[str, Figures] = {}
    for setup in policies:
        found[setup.name] = figures(Simulation(case.jobs, case.gpus, setup).run(), case.gpus, setup.rules.overdue)
    peer = found.get(PEER)
    record: dict[str, Any] = {"case": case.name, "jobs": len(case.jobs), "gpus": case.gpus, "load": round(case.load, 3)}
    record["policies"] = {name: each.rounded() for name, each in found.items()}
    if peer is not None:
        for name, each in found.items():
            record["policies"][name]["mean_ratio"] = round(each.mean_h / peer.mean_h, 3)
            record["policies"][name]["p99_ratio"] = round(each.p99_h / peer.p99_h, 3)
    return record


def _cases(arguments: argparse.Namespace) -> Iterator[Case]:
    loads = LOADS if arguments.load is None else (arguments.load,)
    if arguments.trace is None:
        gpus = arguments.gpus or GPUS
        for load in loads:
            jobs = generated(arguments.jobs or GENERATED_JOBS, gpus, load, arguments.seed, arguments.crowded)
            yield Case(f"generated, seed {arguments.seed}", jobs, gpus, load)
        return
    trace = read_trace(arguments.trace)
    count = min(arguments.jobs or WINDOW_JOBS, len(trace))
    apart = (len(trace) - count) // max(1, arguments.windows)
    for index in range(arguments.windows):
        first = index * apart + apart // 2
        jobs = window(trace, first, count)
        work = offered(jobs, arguments.crowded)
        for gpus in [arguments.gpus] if arguments.gpus else [math.ceil(work / load) for load in loads]:
            gpus = max(gpus, *(job.gpus for job in jobs))
            yield Case(f"{arguments.trace.name} from job {first}", jobs, gpus, work / gpus)


def _show(record: dict[str, Any]) -> None:
    print(f"\n{record['case']}: {record['jobs']} jobs, {record['gpus']} GPUs, load {record['load']:.2f}")
    print(f"{'':18}{'mean h':>9}{'p99 h':>9}{'mean/gang':>11}{'p99/gang':>10}{'in use':>8}{'resizes':>9}{'starved':>9}")
    for name, each in record["policies"].items():
        ratios = f"{each.get('mean_ratio', math.nan):11.2f}{each.get('p99_ratio', math.nan):10.2f}"
        print(
            f"  {name:<16}{each['mean_h']:9.2f}{each['p99_h']:9.1f}{ratios}{each['utilisation']:8.2f}"
            f"{each['resizes_a_job']:9.2f}{each['starved']:9d}",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="CSV, plain or gzipped: timestamp, duration, num_gpus, cluster")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--gpus", type=_positive, help=f"GPUs of the cluster ({GPUS} for generated jobs)")
    size.add_argument("--load", type=float, help=f"instead of {', '.join(map(str, LOADS))}")
    parser.add_argument("--jobs", type=_positive, help=f"{WINDOW_JOBS} of a trace, {GENERATED_JOBS} generated")
    parser.add_argument("--windows", type=_positive, default=3, help="stretches of the trace, evenly apart")
    parser.add_argument("--crowded", action="store_true", help="a load of GPU time that is used while jobs arrive")
    parser.add_argument("--seed", type=int, default=0, help="of generated jobs")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="NAME")
    return parser.parse_args()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    main()
