"""Prints what an image of a role has to install, out of pyproject.toml: the one list there is."""

import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The control plane imports no torch, which the linter checks; its image is gigabytes smaller for it.
LEFT_OUT = {"control-plane": ("torch",), "worker": ()}
EXTRAS = {"control-plane": ("postgres",), "worker": ()}


def dependencies(role: str) -> list[str]:
    """The requirements of ``control-plane`` or ``worker``, as pip reads them."""
    listed = list(PROJECT["dependencies"])
    for extra in EXTRAS[role]:
        listed += PROJECT["optional-dependencies"][extra]
    return [line for line in listed if not line.startswith(LEFT_OUT[role])]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in LEFT_OUT:
        sys.exit(f"usage: dependencies.py {'|'.join(LEFT_OUT)}")
    sys.stdout.write("\n".join(dependencies(sys.argv[1])) + "\n")
