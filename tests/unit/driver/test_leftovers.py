"""What Ray Train leaves behind is ended even where it is yet to start."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from workers.driver import leftovers


def actor(kind: str, state: str, pid: int, job: str = "ours", namespace: str = "rubato-a") -> SimpleNamespace:
    return SimpleNamespace(
        class_name=kind, state=state, pid=pid, job_id=job, ray_namespace=namespace, node_id="here" if pid else None
    )


def test_a_helper_that_starts_after_its_controller_was_ended_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Iterator[list[SimpleNamespace]]] = {
        leftovers.CONTROLLER: iter([[actor(leftovers.CONTROLLER, "ALIVE", 1)]]),
        leftovers.HELPER: iter(
            [
                [actor(leftovers.HELPER, "PENDING_CREATION", 0), actor(leftovers.HELPER, "ALIVE", 2)],
                [actor(leftovers.HELPER, "DEPENDENCIES_UNREADY", 0)],
                [
                    actor(leftovers.HELPER, "ALIVE", 3),
                    actor(leftovers.HELPER, "ALIVE", 4, job="another"),
                    actor(leftovers.HELPER, "ALIVE", 5, namespace="somebody"),
                ],
            ]
        ),
    }
    ended: list[int] = []

    def list_actors(filters: list[tuple[str, str, str]], **_: Any) -> list[SimpleNamespace]:
        assert ("state", "!=", "DEAD") in filters
        return next(seen[filters[0][2]])

    monkeypatch.setattr(leftovers, "list_actors", list_actors)
    monkeypatch.setattr(
        leftovers, "Executioner", lambda: SimpleNamespace(kill=lambda node, pid, cause: ended.append(pid))
    )
    context = SimpleNamespace(get_job_id=lambda: "ours")
    monkeypatch.setattr(leftovers, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    leftovers.end_own_runs()
    assert ended == [1, 2, 3]
