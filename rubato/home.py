"""Where Rubato lives on this machine, and where its control plane answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

HOME_VARIABLE = "RUBATO_HOME"
URL_VARIABLE = "RUBATO_URL"
DEFAULT_URL = "http://127.0.0.1:8700"


def default_home() -> Path:
    """The folder of the local stack: ``RUBATO_HOME``, else ``~/.rubato``."""
    return Path(os.environ.get(HOME_VARIABLE) or "~/.rubato").expanduser().absolute()


def record_path(home: Path) -> Path:
    """The file in which a running stack writes down what it consists of."""
    return home / "stack.json"


def default_url() -> str:
    """The control plane to talk to: ``RUBATO_URL``, else the stack under ``RUBATO_HOME``, else the default port."""
    return os.environ.get(URL_VARIABLE) or _stack_url() or DEFAULT_URL


def _stack_url() -> str | None:
    try:
        content = json.loads(record_path(default_home()).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no stack, or one that `rubato status` has more to say about
    urls = content.get("urls") if isinstance(content, dict) else None
    url = urls.get("api") if isinstance(urls, dict) else None
    return url if isinstance(url, str) else None
