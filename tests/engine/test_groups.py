"""Groups that let go: whatever happens to a member, nobody waits for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.forked import end_all, fork_ranks, run_ranks, wait
from workers.engine.comm.buckets import split_into_buckets
from workers.engine.device import GlooGroup, _InterruptibleStore

LONG = timedelta(minutes=5)  # far beyond the time these tests may take


def formed(rank: int, size: int, store: dist.Store) -> GlooGroup:
    group = GlooGroup()
    group.form(dist.PrefixStore("group", store), rank, size, LONG)
    return group


def error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


def arrive(store: dist.Store, name: str, count: int) -> None:
    """Waits for all ranks to come here."""
    if store.add(name, 1) == count:
        store.set(f"{name}-all", "1")
    store.wait([f"{name}-all"])


def test_reduces_and_broadcasts() -> None:
    def body(rank: int, store: dist.Store) -> list[list[float]]:
        group = formed(rank, 3, store)
        summed, largest, told = torch.tensor([rank, 1.0]), torch.tensor([float(rank)]), torch.tensor([10.0 * rank])
        group.all_reduce([summed], dist.ReduceOp.SUM)
        group.all_reduce([largest], dist.ReduceOp.MAX)
        group.broadcast([told], 1)
        arrive(store, "end", 3)
        group.close()
        return [summed.tolist(), largest.tolist(), told.tolist()]

    assert run_ranks(3, body) == [[[3.0, 3.0], [2.0], [10.0]]] * 3


def soon(call: Callable[[], None]) -> None:
    """Calls from another thread, after the caller has most likely begun to wait. Sooner would do no harm."""
    threading.Timer(0.2, call).start()


@pytest.mark.parametrize("aborter", [0, 1])
def test_abort_wakes_who_waits(aborter: int) -> None:
    def body(rank: int, store: dist.Store) -> list[str | None]:
        group = formed(rank, 2, store)
        if rank == aborter:
            soon(group.abort)
        # Rank 1 takes no part, so rank 0 would wait for it.
        calls = 2 if rank == 0 else 0
        errors = [error_of(lambda: group.all_reduce([torch.zeros(9)], dist.ReduceOp.SUM)) for _ in range(calls)]
        arrive(store, "end", 2)
        group.abort()
        group.close()
        return errors

    errors, _ = run_ranks(2, body)
    assert all(error == "the group was aborted" if aborter == 0 else "onnection" in error for error in errors), errors


def test_abort_ends_forming_when_a_peer_never_comes() -> None:
    def body(rank: int, store: dist.Store) -> str | None:
        group = GlooGroup()
        soon(group.abort)
        return error_of(lambda: group.form(store, 0, 2, LONG))

    assert run_ranks(1, body) == ["the group was aborted"]


def test_abort_ends_forming_when_a_peer_died_after_it_gave_its_address() -> None:
    def body(rank: int, store: dist.Store) -> str | None:
        if rank == 1:
            tell = _InterruptibleStore.set

            def tell_and_die(self: _InterruptibleStore, key: str, value: Any) -> None:
                tell(self, key, value)
                os._exit(0)

            _InterruptibleStore.set = tell_and_die  # type: ignore[method-assign]
        group = GlooGroup()
        if rank == 0:
            soon(group.abort)
        return error_of(lambda: group.form(store, rank, 2, LONG))

    survivor, dying = ranks = fork_ranks(2, body)
    try:
        wait(ranks, lambda: all(rank.ended for rank in ranks), 60)
        assert survivor.result().startswith("the group was aborted")
        assert "exited with 0" in str(dying.outcome)
    finally:
        end_all(ranks)


def test_abort_leaves_the_other_connections_of_the_process_alone() -> None:
    def body(rank: int, store: dist.Store) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        opened: list[socket.socket] = []
        connect = dist.ProcessGroupGloo

        def connect_beside_another(*arguments: Any) -> Any:
            opened.append(socket.create_connection(listener.getsockname()))
            return connect(*arguments)

        dist.ProcessGroupGloo = connect_beside_another
        group = formed(rank, 2, store)
        group.abort()
        opened[0].sendall(b"still here")
        with listener.accept()[0] as accepted:
            return accepted.recv(100)

    assert run_ranks(2, body) == [b"still here"] * 2


def test_a_call_that_hangs_is_left_behind_until_it_ends() -> None:
    def body(rank: int, store: dist.Store) -> list[int]:
        group = formed(rank, 2, store)
        if rank == 1:
            store.wait(["left"])
            group.abort()  # ends the call of the other
            group.close()
            arrive(store, "end", 2)
            return []
        group._disconnect = lambda: None  # type: ignore[method-assign]
        soon(group.abort)
        error = error_of(lambda: group.all_reduce([torch.zeros(10)], dist.ReduceOp.SUM))
        assert error == "the group was aborted"
        group.close()
        left = [len(GlooGroup._left_behind)]
        (work,) = GlooGroup._left_behind[0][1]
        store.set("left", "1")
        error_of(work.wait)
        GlooGroup().close()
        arrive(store, "end", 2)
        return [*left, len(GlooGroup._left_behind)]

    assert run_ranks(2, body)[0] == [1, 0]


def test_buckets_keep_order_and_size() -> None:
    tensors = [torch.empty(size, device="meta") for size in (100, 100, 300, 10, 10)]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in split_into_buckets(tensors, 0.0008)]
    assert sizes == [[100, 100], [300], [10, 10]]
    mixed = [torch.empty(1, device="meta"), torch.empty(1, dtype=torch.float64, device="meta")]
    assert [len(bucket) for bucket in split_into_buckets(mixed, 1)] == [1, 1]


def test_abort_of_a_group_not_yet_formed_spares_other_connections() -> None:
    def body(rank: int, store: dist.Store) -> tuple[str | None, bytes]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        group = GlooGroup()
        group.abort()
        error = error_of(lambda: group.form(dist.PrefixStore("group", store), rank, 2, LONG))
        ours.sendall(b"alive")
        said = theirs.recv(5)
        ours.close()
        theirs.close()
        return error, said

    assert run_ranks(1, body) == [("the group was aborted", b"alive")]
