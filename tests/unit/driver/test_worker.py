"""Whose fault it is, from what a worker itself can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from rubato.problems import RubatoError
from workers.driver.rendezvous.client import RendezvousLostError
from workers.driver.worker import blame
from workers.engine.checkpoint import FencedError


def raised(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3000"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        RendezvousLostError("the rendezvous is gone: the connection was closed"),
    ],
)
def test_a_lost_connection_is_not_the_programs_fault(error: Exception) -> None:
    fault, cause = blame(raised(error))
    assert fault == "replica"
    assert str(error) in cause


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shape '[2, 3]' is invalid for input of size 5")])
def test_another_error_is_named_with_its_place(error: Exception) -> None:
    fault, cause = blame(raised(error))
    assert fault == "program"
    assert type(error).__name__ in cause
    assert "test_worker.py" in cause
    assert "in raised" in cause


def test_only_what_the_user_can_put_right_is_the_users_fault(tmp_path: Path) -> None:
    unsaved = RubatoError("no space left", fix="give it room", code="checkpoint_unsaved", status=500)
    assert blame(raised(RubatoError("data.train.path is empty", fix="fill it", code="corpus_empty")))[0] == "user"
    assert blame(raised(unsaved)) == ("program", "no space left (give it room)")
    assert blame(raised(FencedError(tmp_path)))[0] == "replica"
