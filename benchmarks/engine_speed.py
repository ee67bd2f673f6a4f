"""How fast the engine trains beside others: the same 8M-parameter Llama on the same batches, at one rank and at two.

Contenders (`speed_contenders.py`) take turns, each with one thread a rank and alone while its turn lasts; a turn is a
few steps, and figures are medians of rounds. A ratio is of the engine's rate to that of another contender in the same
run; ``gemm_share`` is the share of a matrix product's FLOP/s, measured between the turns. All start from the same
weights and see the same batches: ``loss_difference_fp32`` shows that they compute the same. Prints one JSON line last.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed_contenders import BATCH, CONTENDERS, LENGTH, Needs, Turn, take_part
from workers.engine.device import Device
from workers.engine.watch import measured_peak

WARM_UP = 3  # steps; the first compile
OURS = {"fp32": "rubato", "fastest": "rubato_fastest"}
CPU = Device.of_rank(0, gpu=False).torch_device


class Party:
    """The processes of one contender, which wait until it is their turn."""

    def __init__(self, name: str, size: int, folder: Path) -> None:
        self.name, self.size = name, size
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (name, rank, size, port, str(folder), there)
            process = context.Process(target=take_part, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def turn(self, steps: int) -> Turn:
        """Takes some steps; the seconds of the slowest rank, and the mean of the ranks' losses."""
        for end in self._ends:
            end.send(steps)
        turns: list[Turn] = [end.recv() for end in self._ends]
        losses = [statistics.fmean(step) for step in zip(*(turn.losses for turn in turns), strict=True)]
        return Turn(max(turn.seconds for turn in turns), losses, turns[0].parameters)

    def leave(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def race(size: int, names: list[str], rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Rates, losses and shares of the peak of all contenders at one number of ranks."""
    parties = [Party(name, size, folder) for name in names]
    tokens = steps * size * BATCH * LENGTH
    rates: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {"fp32": [], "bf16": []}
    losses: dict[str, list[float]] = {}
    parameters: dict[str, int] = {}
    try:
        for party in parties:
            first = party.turn(WARM_UP)
            losses[party.name], parameters[party.name] = first.losses, first.parameters
            print(f"{size} ranks, {party.name}: warm after {first.seconds:.1f} s", file=sys.stderr)
        for number in range(rounds):
            # Who begins changes, so that nobody always follows the same one.
            for party in parties[number % len(parties) :] + parties[: number % len(parties)]:
                turn = party.turn(steps)
                rates[party.name].append(tokens / turn.seconds)
                losses[party.name] += turn.losses
                print(f"{size} ranks, {party.name}: {tokens / turn.seconds:.0f} tokens/s", file=sys.stderr)
            for precision, seen in peaks.items():
                seen.append(measured_peak(CPU, precision, size=1024, seconds=0.5))
    finally:
        for party in parties:
            party.leave()
    medians = {name: statistics.median(of_rounds) for name, of_rounds in rates.items()}
    return summary(size, medians, {name: max(seen) for name, seen in peaks.items()}, losses, parameters)


def summary(
    size: int,
    rates: dict[str, float],
    peaks: dict[str, float],
    losses: dict[str, list[float]],
    parameters: dict[str, int],
) -> dict[str, Any]:
    """What is printed of one number of ranks."""
    others = [name for name in rates if not name.startswith("rubato")]
    flops = CONTENDERS["rubato"].flops_per_token()
    same = [name for name in losses if CONTENDERS[name].precision == "fp32"]
    reference = losses["bare"]
    return {
        "ranks": size,
        "tokens_per_s": {name: round(rate) for name, rate in rates.items()},
        "ratio_fp32": {name: round(rates[OURS["fp32"]] / rates[name], 3) for name in others},
        "ratio_fp32_to_best": round(rates[OURS["fp32"]] / max(rates[name] for name in others), 3),
        "ratio_eager_to_best": round(rates["rubato_eager"] / max(rates[name] for name in others), 3),
        "ratio_fastest_to_bare_fp32": round(rates[OURS["fastest"]] / rates["bare"], 3),
        "gemm_share": {
            name: round(rate * flops / size / peaks[CONTENDERS[name].peak], 3) for name, rate in rates.items()
        },
        "gemm_gflops": {name: round(peak / 1e9, 1) for name, peak in peaks.items()},
        "parameters": sorted(set(parameters.values())),
        "first_loss": round(reference[0], 4),
        "last_loss": {name: round(each[-1], 4) for name, each in losses.items()},
        "loss_difference_fp32": max(
            abs(one - other) for name in same for one, other in zip(losses[name], reference, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="these, beside rubato and bare")
    parser.add_argument("--cache", type=Path, help="keeps compiled programs here from run to run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    asked = ["bare", *(name for name in CONTENDERS if name.startswith("rubato")), *(options.only or CONTENDERS)]
    names, missing = [], {}
    for name in dict.fromkeys(asked):
        lacks = [package for package in CONTENDERS[name].packages if find_spec(package) is None]
        if lacks:
            missing[name] = Needs(lacks).sentence()
            print(f"{name} takes no part: {missing[name]}", file=sys.stderr)
        else:
            names.append(name)
    with tempfile.TemporaryDirectory(prefix="rubato-speed-") as scratch:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.cache or Path(scratch, "compiled"))
        races = [race(size, names, options.rounds, options.steps, Path(scratch)) for size in options.ranks]
    print(json.dumps({"benchmark": "engine_speed", "threads_a_rank": 1, "races": races, "missing": missing}))


if __name__ == "__main__":
    main()
