"""The demo itself, as ``make demo`` runs it, with fewer and smaller steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_the_demo_keeps_its_promises() -> None:
    command = [sys.executable, DEMO, "--set", "train.steps=70", "--set", "data.sequence_length=64"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-3000:]}"
    result = json.loads(ran.stdout.splitlines()[-1])
    assert set(result) == {
        "job",
        "state",
        "steps",
        "first_loss",
        "last_loss",
        "generations",
        "layouts",
        "restarts",
        "max_curve_difference",
    }
    assert (result["state"], result["steps"]) == ("SUCCEEDED", 70)
    assert result["last_loss"] < 0.6 * result["first_loss"]
    assert result["max_curve_difference"] <= 1e-3
    assert result["restarts"]["hardware"] == 1
    assert [layout["workers"] for layout in result["layouts"]] == [4, 8, 4, 8]
    assert result["generations"] == len(result["layouts"])
