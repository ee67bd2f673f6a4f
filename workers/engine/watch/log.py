"""Where the log of a worker goes: to stderr, so that stdout is the result alone."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(who: str, level: int = logging.INFO) -> None:
    """Sends the log of this process to stderr, each line with the time and with who wrote it, such as "rank 3"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {who} %(levelname).1s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("workers").setLevel(level)  # libraries say what is wrong, Rubato also what goes on
