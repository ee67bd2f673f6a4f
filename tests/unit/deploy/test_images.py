"""The image recipes: they copy what exists, run as an ordinary user, say if they are well, hold only their side."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str, str]]:
    """Each instruction as (stage, keyword, arguments), continued lines joined."""
    found, stage = [], ""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        keyword, _, arguments = line.strip().partition(" ")
        if keyword == "FROM":
            stage = arguments.split(" AS ")[1]
        if keyword:
            found.append((stage, keyword, arguments))
    return found


def lineage(stage: str) -> list[str]:
    """A stage and those it is built from."""
    bases = {name: arguments.split(" AS ")[0] for name, keyword, arguments in instructions() if keyword == "FROM"}
    chain = [stage]
    while chain[-1] in bases:
        chain.append(bases[chain[-1]])
    return chain


def test_everything_copied_from_the_repository_exists_and_passes_the_ignore_file() -> None:
    copied = [
        source
        for _, keyword, arguments in instructions()
        if keyword == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    ignore = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in ignore if line.startswith("!")}
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert set(copied) <= let_through


def test_stages_that_are_copied_from_are_defined() -> None:
    stages = {stage for stage, keyword, _ in instructions() if keyword == "FROM"}
    used = {match[1] for _, _, arguments in instructions() if (match := re.match(r"--from=(\S+)", arguments))}
    assert used == {"build-control-plane", "build-worker"}
    assert used <= stages


def test_the_base_image_is_pinned_to_a_patch_release() -> None:
    base = next(arguments for _, keyword, arguments in instructions() if keyword == "ARG" and "BASE=" in arguments)
    assert re.search(r"python:3\.11\.\d+-", base)


@pytest.mark.parametrize("stage", ["control-plane", "worker"])
def test_an_image_runs_as_an_ordinary_user_and_has_a_health_check(stage: str) -> None:
    family = lineage(stage)
    mine = {keyword: arguments for name, keyword, arguments in instructions() if name in family}
    assert mine["USER"] == "rubato"
    assert "HEALTHCHECK" in mine
    assert "healthz" in mine["HEALTHCHECK"]


@pytest.mark.parametrize(("role", "has_torch"), [("control-plane", False), ("worker", True)])
def test_an_image_installs_from_the_lock_what_its_side_imports(role: str, has_torch: bool) -> None:
    commands = [args for stage, keyword, args in instructions() if stage == f"build-{role}" and keyword == "RUN"]
    installs = [command for command in commands if "pip install" in command]
    assert all("-c requirements.lock" in command or "--no-deps" in command for command in installs)
    names = {
        re.split(r"[\[<>=]", line)[0]
        for line in runpy.run_path(str(ROOT / "deploy" / "dependencies.py"))["dependencies"](role)
    }
    assert ("torch" in names) is has_torch
    assert {"pydantic", "httpx", "ray"} <= names
