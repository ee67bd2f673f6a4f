"""How well the planner predicts published runs: ``python -m benchmarks.planner --runs FILE.csv``.

No figure is of a row that was fitted to: there is five-fold cross-validation by (model, source, GPU), and each source
left out in turn. ``--shipped`` scores the package's constants as they are instead, for runs they were not fitted to.
Errors are medians and 90th percentiles of absolute relative errors in percent. The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.published_runs import Run, read_runs
from benchmarks.scoring import Figures, Quantity, figures, ranking
from service.planning.constants import Constants, fitted

SIGNIFICANT = 3  # digits of a constant worth storing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="CSV of published runs")
    parser.add_argument("--seed", type=int, default=0, help="which groups share a fold")
    parser.add_argument("--shipped", action="store_true", help="score the package's constants, fit nothing")
    parser.add_argument("--write", type=Path, help="store the constants that all healthy rows together give")
    arguments = parser.parse_args()
    runs, kept_out = read_runs(arguments.runs)
    result: dict[str, Any] = {"runs": len(runs) + sum(kept_out.values()), "kept_out": kept_out, "constants": {}}
    for quantity in (Quantity.speed(runs), Quantity.memory(runs)):
        if quantity.runs:
            constants = fitted() if arguments.shipped else quantity.fit(quantity.runs)
            result[quantity.title] = assess(quantity, constants, arguments.seed, arguments.shipped)
            result["constants"] |= {name: rounded(getattr(constants, name)) for name in quantity.names}
    if arguments.write:
        stored = asdict(fitted()) | result["constants"]
        arguments.write.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    show(result)
    print(json.dumps(result))


def assess(quantity: Quantity, constants: Constants, seed: int, shipped: bool) -> dict[str, Any]:
    """All figures of one quantity; ``constants`` are those for rows that are scored apart."""
    if shipped:
        errors = quantity.errors(quantity.runs, constants)
        found: dict[str, Any] = {"shipped constants": broken_down(quantity, errors)}
    else:
        errors = quantity.cross_validated(seed)
        by_source = quantity.left_out(lambda run: run.source)
        found = {
            "cross-validated": broken_down(quantity, errors),
            "source left out": broken_down(quantity, by_source),
        }
    if quantity.title == "tokens/s/GPU":
        predicted = {line: quantity.measured[line] * (1 + error) for line, error in errors.items()}
        found["ranking"] = ranking(quantity.runs, predicted, quantity.measured)
    suspects = quantity.errors(quantity.suspects, constants)
    found["apart: the source contradicts itself"] = {
        f"line {run.line}, {run.name} on {run.gpu}": f"{100 * suspects[run.line]:+.1f} %" for run in quantity.suspects
    }
    return found


def broken_down(quantity: Quantity, errors: dict[int, float]) -> dict[str, Any]:
    """Figures in all, by software and by GPU, and of runs on a machine with a documented fault against the others."""

    def of(chosen: Callable[[Run], bool]) -> Figures:
        return figures(errors[run.line] for run in quantity.runs if chosen(run))

    def by(attribute: str) -> dict[str, Figures]:
        found: dict[str, list[float]] = defaultdict(list)
        for run in quantity.runs:
            found[getattr(run, attribute)].append(errors[run.line])
        return {name: figures(found[name]) for name in sorted(found)}

    return {
        "all": of(lambda run: True),
        "on healthy machines": of(lambda run: not run.faulty),
        "on a machine with a documented fault": of(lambda run: run.faulty),
        "software": by("software"),
        "gpu": by("gpu"),
    }


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT}g}")


def show(result: dict[str, Any], depth: int = 0) -> None:
    """The result as an indented list."""
    indent = "  " * depth
    for name, value in result.items():
        title = f"{indent}{name:<{44 - 2 * depth}}"
        if not isinstance(value, dict):
            print(title, value)
        elif "median" in value:
            print(title, f"{value['median']:6.2f} / {value['p90']:5.2f} %  of {value['n']}")
        elif value and value.get("n") != 0:
            print(title)
            show(value, depth + 1)


if __name__ == "__main__":
    main()
