"""Specs for tests of what the engine reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rubato.spec import JobSpec, parse_spec

MakeSpec = Callable[..., JobSpec]


@pytest.fixture
def make_spec() -> MakeSpec:
    """A small spec, with sections given by keyword merged over it: ``make_spec(train={"seed": 1})``."""

    def make(**sections: dict[str, Any]) -> JobSpec:
        content: dict[str, Any] = {
            "name": "small",
            "model": {"preset": "tiny"},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 16},
            "train": {"steps": 10, "global_batch": 4},
            "workers": {"min": 1, "max": 8},
        }
        for name, section in sections.items():
            content[name] = {**content.get(name, {}), **section}
        return parse_spec(content)

    return make
