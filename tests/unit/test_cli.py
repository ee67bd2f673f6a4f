"""The command line: what it prints, where it prints it, and with which exit code it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_plane import (
    SPEC,
    ControlPlane,
    a_plan,
    event,
    event_stream,
    job,
    metric,
    metric_stream,
    operation,
    problem,
    project,
    stream,
)

from rubato.cli import app, calibrate, follow, jobs, plan, projects, watch
from rubato.client import AsyncClient, Client
from rubato.problems import RubatoError

Run = Callable[..., int]

_ALONE = dict.fromkeys(("single_flops", "half_flops", "attention_flops", "copy_bytes"), 1e9)
_SIZES = {"layer_hidden": 256, "layer_tokens": 1024, "layer_length": 256, "layer_s": 0.1, "gap_s": 1e-3, "ends_s": 0.0}
FOUND = {"alone": {"device": "cpu", **_ALONE, **_SIZES}, "together": None, "cores": 2}
MEASURED = {**FOUND, "measured_at": "2026-01-02T03:04:05Z", "host": "here"}


@pytest.fixture
def plane() -> ControlPlane:
    over = job(state="SUCCEEDED", finished_at="2026-01-02T03:06:05Z", progress={"step": 10, "steps": 10, "loss": 2.5})
    checkpoint = {"step": 5, "at": job()["created_at"], "bytes": 12_345, "layout": job()["layout"], "loss": 3.25}
    page = {"items": [job()], "next": None}
    return ControlPlane(
        {
            "POST /v1/jobs": [httpx.Response(201, json=job(state="QUEUED"))],
            "PUT /v1/calibrations": [httpx.Response(200, json=MEASURED)],
            "POST /v1/plans": [httpx.Response(200, json=a_plan())],
            "GET /v1/jobs": [httpx.Response(200, json=page)],
            "GET /v1/jobs/demo": [httpx.Response(200, json=job())],
            "GET /v1/jobs/j1": [httpx.Response(200, json=job()), httpx.Response(200, json=over)],
            "POST /v1/jobs/demo/scale": [httpx.Response(202, json=operation())],
            "POST /v1/jobs/demo/cancel": [httpx.Response(202, json=operation(kind="cancel"))],
            "GET /v1/projects": [httpx.Response(200, json={"items": [project()], "next": None})],
            "GET /v1/projects/research": [httpx.Response(200, json=project())],
            "PUT /v1/projects/research": [httpx.Response(200, json=project(workers=None, running_jobs=2))],
            "GET /v1/operations/o1": [httpx.Response(200, json=operation(state="DONE"))],
            "GET /v1/jobs/demo/events": [httpx.Response(200, json={"items": [event(1), event(2)], "next": None})],
            "GET /v1/jobs/demo/metrics": [httpx.Response(200, json={"items": [metric(1)], "next": None})],
            "GET /v1/jobs/demo/events SSE": [event_stream(1, 2)],
            "GET /v1/jobs/demo/metrics SSE": [metric_stream(1, 2)],
            "GET /v1/jobs/j1/events SSE": [event_stream(1, 2)],
            "GET /v1/jobs/j1/metrics SSE": [metric_stream(1, 10)],
            "GET /v1/jobs/demo/logs": [httpx.Response(200, text="first\nsecond\n")],
            "GET /v1/jobs/demo/logs SSE": [stream("line", [(6, "first"), (13, "second")])],
            "GET /v1/jobs/demo/checkpoints": [
                httpx.Response(200, json={"items": [{**checkpoint, "verified": True, "path": "/c/5"}], "next": None})
            ],
        }
    )


@pytest.fixture
def run(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line against the scripted control plane and returns its exit code."""

    def client(url: str | None = None) -> Client:
        return plane.client()

    def async_client(url: str | None = None) -> AsyncClient:
        return plane.async_client()

    for module in (jobs, follow, plan, calibrate, projects):
        monkeypatch.setattr(module, "Client", client)
    monkeypatch.setattr(watch, "AsyncClient", async_client)
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: app.run([str(argument) for argument in arguments])


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    file = tmp_path / "demo.yaml"
    file.write_text(json.dumps(SPEC))
    return file


def documents(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_submit(run: Run, plane: ControlPlane, spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("submit", "-f", spec_file, "--set", "train.steps=20", "--set", "workers=4", "--json") == 0
    sent = json.loads(plane.requests[0].content)
    assert (sent["train"]["steps"], sent["workers"]["max"]) == (20, 4)
    (printed,) = documents(capsys.readouterr().out)
    assert (printed["id"], printed["state"]) == ("j1", "QUEUED")


def test_submit_resolves_a_relative_corpus_from_here(
    run: Run, plane: ControlPlane, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec_file.write_text(json.dumps({**SPEC, "data": {"train": {"path": "texts/*.txt"}, "sequence_length": 64}}))
    assert run("submit", "-f", spec_file) == 0
    assert json.loads(plane.requests[0].content)["data"]["train"]["path"] == f"{tmp_path}/texts/*.txt"


def test_a_refused_spec_ends_2_and_says_field_cause_and_fix(
    run: Run, plane: ControlPlane, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("submit", "-f", spec_file, "--set", "workers=5") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "error: the spec was refused",
        "  workers: 5 workers cannot be laid out at tensor 2 x pipeline 2; use 4 or 8 workers",
        "  fix: correct the fields listed and submit again",
    ]
    assert run("submit", "-f", spec_file, "--set", "workers=5", "--json") == 2
    printed = capsys.readouterr()
    (found,) = documents(printed.err)
    assert found["code"] == "spec_refused"
    assert found["errors"][0]["field"] == "workers"
    assert not plane.requests


def test_wrong_usage_ends_2(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("scale", "demo") == 2
    assert "rubato scale --help" in capsys.readouterr().err
    assert run("submit", "--json") == 2
    (found,) = documents(capsys.readouterr().err)
    assert found["code"] == "wrong_usage"
    assert run("logs", "demo", "--rank", "1", "--driver") == 2
    assert run("sing") == 2
    assert run("scale", "demo", "8", "--max", "9") == 2
    assert run("projects", "--workers", "4") == 2

    capsys.readouterr()
    assert run("list", "--state", "sleepy") == 2
    assert "error: Invalid value for '--state': 'sleepy' is not one of 'queued', " in capsys.readouterr().err


def test_quotas_that_are_not_given_stay(run: Run, plane: ControlPlane) -> None:
    assert run("projects", "research", "--running-jobs", "2") == 0
    assert json.loads(plane.requests[-1].content) == {"weight": 1.0, "workers": 16, "gpus": None, "running_jobs": 2}
    assert run("projects", "research", "--workers", "-1") == 0
    assert json.loads(plane.requests[-1].content)["workers"] is None


def test_nothing_is_answered_with_the_help(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    printed = capsys.readouterr()
    assert "submit" in printed.out
    assert printed.err == ""


def test_nobody_to_reach_ends_3(run: Run, plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    plane.answers["GET /v1/jobs"] = [httpx.ConnectError("refused")]
    assert run("list") == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "fix: start one with `rubato up`" in printed.err
    assert run("list", "--json") == 3
    (found,) = documents(capsys.readouterr().err)
    assert found["code"] == "unreachable"


def test_a_submission_of_unknown_fate_tells_the_key_that_makes_another_try_safe(
    run: Run, plane: ControlPlane, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.answers["POST /v1/jobs"] = [httpx.ConnectError("refused")]
    assert run("submit", "-f", spec_file) == 3
    assert plane.requests[0].headers["idempotency-key"] in capsys.readouterr().err


def test_a_refusal_of_the_control_plane_ends_2(
    run: Run, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [{"field": "workers", "cause": "5 cannot be laid out", "fix": "use 4 or 8"}]
    plane.answers["POST /v1/jobs/demo/scale"] = [problem(422, "impossible_size", errors=errors)]
    assert run("scale", "demo", 5) == 2
    assert "  workers: 5 cannot be laid out; use 4 or 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], ["demo", "RUNNING", "3/10", "5.1000", "900", "1×2×2", "j1"]),
        (["show", "demo"], ["RUNNING: training at 4 workers", "3 of 10", "4 (min 4, max 8)", "1×2×2"]),
        (["scale", "demo", "8"], ["demo goes to 8 workers", "o1"]),
        (["scale", "demo", "8", "--wait"], ["scale DONE", "accepted"]),
        (["scale", "demo", "--min", "4", "--max", "8"], ["the queue chooses the size of demo"]),
        (["projects"], ["research", "4 of 16", "3.2"]),
        (["projects", "research", "--workers", "-1", "--running-jobs", "2"], ["1 of 2"]),
        (["cancel", "demo", "--force"], ["being cancelled"]),
        (["checkpoints", "demo"], ["5", "12.3kB", "3.2500", "yes", "/c/5"]),
        (["events", "demo"], ["generation.formed: two replicas"]),
        (["metrics", "demo"], ["step 1/10: loss 5.9000"]),
        (["logs", "demo"], ["first", "second"]),
        (["logs", "demo", "-f", "--rank", "0"], ["first", "second"]),
    ],
)
def test_what_a_person_reads(
    run: Run, arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert [text for text in expected if text not in printed] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["show", "demo"],
        ["scale", "demo", "8"],
        ["scale", "demo", "8", "--wait"],
        ["cancel", "demo"],
        ["projects"],
        ["projects", "research"],
        ["checkpoints", "demo"],
        ["events", "demo"],
        ["metrics", "demo"],
        ["logs", "demo"],
    ],
)
def test_json_is_one_document(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, "--json") == 0
    (document,) = documents(capsys.readouterr().out)
    assert isinstance(document, dict)


@pytest.mark.parametrize(
    ("command", "field", "values"),
    [("events", "id", [1, 2]), ("metrics", "step", [1, 2]), ("logs", "line", ["first", "second"])],
)
def test_json_is_lines_when_following(
    run: Run, command: str, field: str, values: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "demo", "-f", "--json") == 0
    assert [document[field] for document in documents(capsys.readouterr().out)] == values


def test_cancel_sends_force_only_when_asked(run: Run, plane: ControlPlane) -> None:
    run("cancel", "demo")
    run("cancel", "demo", "--force")
    assert [json.loads(request.content) for request in plane.requests] == [{"force": False}, {"force": True}]


def test_a_failed_operation_ends_1(run: Run, plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> None:
    failed = operation(state="FAILED", message="no room for 8 workers")
    plane.answers["GET /v1/operations/o1"] = [httpx.Response(200, json=failed)]
    assert run("scale", "demo", 8, "--wait") == 1
    assert "scale FAILED: no room for 8 workers" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 1)])
def test_watch_follows_to_the_end_and_ends_as_the_job_did(
    run: Run, plane: ControlPlane, state: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.answers["GET /v1/jobs/j1"] = [httpx.Response(200, json=job(state=state))]
    assert run("watch", "demo") == code
    printed = capsys.readouterr().out
    assert "generation.formed: two replicas" in printed
    assert "step 10/10: loss 5.0000" in printed
    assert f"demo {state}" in printed


def test_submit_and_watch_in_json_lines(run: Run, spec_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("submit", "-f", spec_file, "--watch", "--json") == 0
    first, *lines = documents(capsys.readouterr().out)
    assert first["state"] == "QUEUED"
    assert [line["event"]["id"] for line in lines if "event" in line] == [1, 2]
    assert [line["metric"]["step"] for line in lines if "metric" in line] == [1, 10]
    assert lines[-1]["job"]["state"] == "SUCCEEDED"


def test_ctrl_c_leaves_the_job_running_and_says_so(
    run: Run, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    plane.answers["GET /v1/jobs/demo/events SSE"] = [interrupt]
    assert run("events", "demo", "-f") == 130
    plane.answers["GET /v1/jobs/demo"] = [interrupt]
    assert run("watch", "demo") == 130
    assert capsys.readouterr().err.count("demo goes on") == 2
    assert not any("cancel" in request.url.path for request in plane.requests)


def test_watch_gives_up_with_3_when_the_control_plane_stays_away(
    run: Run, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    for path in ("GET /v1/jobs/j1", "GET /v1/jobs/j1/events SSE", "GET /v1/jobs/j1/metrics SSE"):
        plane.answers[path] = [httpx.ConnectError("refused")]
    assert run("watch", "demo") == 3
    assert "cannot reach" in capsys.readouterr().err


def test_an_error_that_is_none_of_ours_is_not_hidden(run: Run, plane: ControlPlane) -> None:
    plane.answers["GET /v1/jobs"] = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError):
        run("list")


def test_errors_without_fields_have_cause_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    app.print_error(RubatoError("port 1 is in use", fix="give another", code="port_in_use", status=409), False)
    assert capsys.readouterr().err == "error: port 1 is in use\n  fix: give another\n"


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import rubato, rubato.client, rubato.cli, rubato.stack", ["torch", "ray", "service", "workers"]),
        ("import sys; from rubato.cli import app; app.run(['--help'])", ["torch", "ray", "service", "workers"]),
        ("import service.app", ["torch", "workers"]),
    ],
)
def test_what_is_loaded(code: str, forbidden: list[str]) -> None:
    script = f"{code}\nimport sys\nprint([name for name in {forbidden} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_plan_prints_a_row_a_size_and_says_why_there_is_none(
    run: Run, plane: ControlPlane, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "-f", spec_file, "--cluster", "h100:16", "--size", 8, "--price", 2) == 0
    sent = json.loads(plane.requests[0].content)
    assert (sent["cluster"], sent["sizes"], sent["price"]) == ("h100:16", [8], 2.0)
    assert sent["spec"]["parallelism"]["tensor"] == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["WORKERS", "LAYOUT", "MICRO", "RECOMPUTE"]
    assert lines[1].split()[0] == "8"
    for said in ("2×2×2", "1×16", "full", "40 of 71.2 GiB", "900–1.1k", "41.0%", "2h46m", "44.44"):
        assert said in lines[1]
    assert lines[2].split() == ["16", "-"]
    assert "16 workers: stage 0 needs too much" in lines
    assert "for 16 x h100-80gb" in "".join(lines)


def test_plan_sends_no_layout_that_the_spec_leaves_out(
    run: Run, plane: ControlPlane, spec_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec_file.write_text(json.dumps({key: value for key, value in SPEC.items() if key != "parallelism"}))
    assert run("plan", "-f", spec_file, "--json") == 0
    assert "parallelism" not in json.loads(plane.requests[0].content)["spec"]
    (printed,) = documents(capsys.readouterr().out)
    assert [size["workers"] for size in printed["sizes"]] == [8, 16]
    assert run("submit", "-f", spec_file) == 0
    assert "parallelism" not in json.loads(plane.requests[1].content)


def program(folder: Path, name: str, text: str) -> str:
    """An interpreter that prints what a measurement would."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_calibrate_keeps_what_was_measured_and_tells_the_control_plane(
    run: Run, plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = program(tmp_path, "python", f"echo \"$@\" > {tmp_path}/asked; echo noise; echo '{json.dumps(FOUND)}'")
    monkeypatch.setattr(sys, "executable", python)
    assert run("calibrate", "--workers", 2, "--home", tmp_path / "home", "--json") == 0
    assert (tmp_path / "asked").read_text().split() == ["-m", "workers.engine.calibration", "--workers", "2"]
    (printed,) = documents(capsys.readouterr().out)
    assert printed["alone"] == FOUND["alone"]
    (sent,) = plane.requests
    assert json.loads(sent.content)["cores"] == 2
    kept = json.loads((tmp_path / "home" / "calibration.json").read_text())
    assert kept == {"cpu": printed}


def test_a_measurement_that_fails_says_why(
    run: Run, plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path, "python", "echo 'No module named torch' >&2; exit 1"))
    assert run("calibrate", "--home", tmp_path / "home") == 3
    assert "No module named torch" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()
    assert plane.requests == []


def test_a_trace_stands_beside_its_prediction(
    run: Run, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = {"kind": "all_reduce", "calls": 3, "bytes": 3000}
    stage = {"stage": 0, "peak_bytes": 40 * 2**30, "resident_bytes": 20 * 2**30, "micro_batches": 4}
    said = json.dumps({"stages": [{**stage, "collectives": [sent]}, {**stage, "stage": 1, "collectives": []}]})
    monkeypatch.setattr(sys, "executable", program(tmp_path, "python", f"echo \"$4 $5\" >&2; echo '{said}'"))
    assert run("plan", "-f", spec_file, "--trace") == 0
    printed = capsys.readouterr().out
    assert "traced at 8 workers" in printed
    assert "3 all_reduce (3kB)" in printed
    assert "holds 40 GiB, 38 GiB were predicted (-5.0%)" in printed
    monkeypatch.setattr(sys, "executable", program(tmp_path, "python", "echo 'no torch here' >&2; exit 1"))
    assert run("plan", "-f", spec_file, "--trace", "--json") == 3
    assert "no torch here" in capsys.readouterr().err
