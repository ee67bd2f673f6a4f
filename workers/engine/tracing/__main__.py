"""Traces a spec's layout: ``python -m workers.engine.tracing SPEC.json --data 8``, one JSON object on stdout.

Each stage in a process of its own: what torch remembers of one fake world would not fit the next.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rubato.layout import distinct_stages
from rubato.problems import RubatoError
from rubato.spec import JobSpec, load_spec
from workers.engine.tracing.trace import StageTrace, trace_stage


def main(arguments: list[str] | None = None) -> int:
    """Runs the command: 0 traced, 1 a trace failed, 2 the spec was refused."""
    parser = argparse.ArgumentParser("python -m workers.engine.tracing", description=__doc__)
    parser.add_argument("spec", type=Path, help="a resolved spec, JSON or YAML")
    parser.add_argument("--data", type=int, default=1, help="replicas")
    parser.add_argument("--stage", type=int, action="append", help="a pipeline rank; by default those that differ")
    options = parser.parse_args(arguments)
    try:
        spec = load_spec(options.spec)
    except RubatoError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    found = []
    for stage in options.stage or distinct_stages(spec.parallelism.pipeline):
        trace = _in_a_process(spec, stage, options.data)
        if trace is None:
            return 1
        found.append(asdict(trace))
    sys.stdout.write(json.dumps({"stages": found}) + "\n")
    return 0


def _in_a_process(spec: JobSpec, stage: int, data: int) -> StageTrace | None:
    """The trace of a stage; None when it failed, and then its process has said why."""
    context = get_context("fork")  # nothing was computed here that a fork could lose
    results = context.SimpleQueue()
    process = context.Process(target=_trace, args=(spec, stage, data, results))
    process.start()
    process.join()
    return results.get() if process.exitcode == 0 else None


def _trace(spec: JobSpec, stage: int, data: int, results: Any) -> None:
    results.put(trace_stage(spec, stage, data))


if __name__ == "__main__":
    sys.exit(main())
