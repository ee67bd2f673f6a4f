"""Whose fault it is, from what a worker itself can tell."""

from __future__ import annotations

import pytest

from workers.driver.rendezvous.client import RendezvousLostError
from workers.driver.worker import blame


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
