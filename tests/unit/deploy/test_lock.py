"""The lock: it pins everything that the project brings in, to versions that any index has."""

import re
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
PINS = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}


def brought_in(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """The names of all distributions that one needs on this machine, following their own needs."""
    if (name, extras) in seen:
        return set()
    seen.add((name, extras))
    found = set()
    for line in distribution(name).requires or []:
        requirement = Requirement(line)
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        needed = canonicalize_name(requirement.name)
        found |= {needed} | brought_in(needed, frozenset(requirement.extras), seen)
    return found


def is_installed(name: str) -> bool:
    """Whether a distribution is installed."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def test_every_line_is_one_exact_version() -> None:
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line)] == []


def test_everything_that_is_brought_in_is_pinned() -> None:
    needed = brought_in("rubato", frozenset({"", "dev", "postgres"}), set())
    only_in_the_cuda_build = {name for name in needed if name.startswith(("nvidia-", "cuda-", "triton"))}
    only_in_new_environments = {"setuptools"}  # pip freeze leaves it out, as it does pip
    assert needed - PINS.keys() <= only_in_the_cuda_build | only_in_new_environments


def test_what_is_installed_is_what_is_pinned() -> None:
    installed = {each: version(each).partition("+")[0] for each in PINS if is_installed(each)}
    assert installed == {name: PINS[name] for name in installed}
    # What only a comparison needs may be missing.
    assert brought_in("rubato", frozenset({"", "dev", "postgres"}), set()) & PINS.keys() <= installed.keys()


def test_torch_and_ray_are_the_versions_the_project_was_made_for() -> None:
    assert PINS["torch"] == "2.13.0"
    assert PINS["ray"] == "2.60.0"
