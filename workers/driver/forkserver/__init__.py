"""A fork server a node, so that a replica's workers start with torch already loaded.

Ray starts a worker by running an interpreter on its own script. Here the "interpreter" is `launcher.py`, which asks the
node's fork server (`server.py`) to run the script in a child of its own, and lives exactly as long as that child.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

SETTING = "RUBATO_FORK_SERVER"
"""Set it to 0 where workers are to be started the ordinary way."""


def switched_on() -> bool:
    """Whether workers are to be forked: on Linux, unless the setting says otherwise."""
    return sys.platform == "linux" and os.environ.get(SETTING, "1") != "0"


def py_executable(key: str) -> str:
    """What Ray is to run in place of the interpreter, as a ``py_executable`` of a runtime environment.

    The nodes of a cluster must have Rubato installed at the same place; where they do not, switch the fork server off.

    Args:
        key: workers with the same key on the same node share a server; letters, digits and dashes.
    """
    python = shlex.quote(sys.executable)
    launcher = shlex.quote(str(Path(__file__).with_name("launcher.py")))
    # Ray hands this to a shell, after the word exec. Without site-packages the launcher starts in a few milliseconds.
    return f"{python} -I -S {launcher} {shlex.quote(key)}"
