"""TensorBoard files: what is on the board, and that going on from an earlier step leaves no step twice."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from workers.engine.watch import board as board_module
from workers.engine.watch.board import Board


def events(folder: Path) -> list[Event]:
    """The events of all files, in the order of their names: how TensorBoard reads them."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):  # records of TFRecord: length, its checksum, the event, its checksum
            (length,) = struct.unpack_from("<Q", content, place)
            found.append(Event.FromString(content[place + 12 : place + 12 + length]))
            place += length + 16
    return found


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars that TensorBoard shows: a session that starts hides what is at its step or later."""
    tags: dict[str, list[tuple[int, float]]] = {}
    for event in events(folder):
        if event.session_log.status == SessionLog.START and event.HasField("session_log"):
            tags = {tag: [point for point in points if point[0] < event.step] for tag, points in tags.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                tags.setdefault(value.tag, []).append((event.step, value.simple_value))
    return tags


def metric(step: int, loss: float) -> dict[str, object]:
    return {
        "step": step, "loss": loss, "grad_norm": 0.5, "validation_loss": None, "gradient_norms": {"head": 2.0},
        "workers": {"step_s": {"min": 1.0, "max": 3.0}},
    }  # fmt: skip


def test_the_numbers_of_a_metric_are_on_the_board(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.take("metric", metric(1, 4.0))
    sample = {"step": 1, "prompt": "line", "text": " 1"}
    board.take("event", {"kind": "sample", "data": sample})
    board.take("event", {"kind": "worker.lost", "data": {}})
    board.close()
    assert shown(tmp_path) == {
        "train/loss": [(1, 4.0)],
        "train/gradient norm": [(1, 0.5)],
        "gradients/head": [(1, 2.0)],
        "workers/step_s min": [(1, 1.0)],
        "workers/step_s max": [(1, 3.0)],
    }
    texts = [value.tensor.string_val for event in events(tmp_path) for value in event.summary.value]
    assert [b"line 1"] in [list(text) for text in texts]


def test_a_run_that_goes_on_earlier_shows_no_step_twice(tmp_path: Path) -> None:
    first = Board(tmp_path)
    for step in range(1, 8):
        first.take("metric", metric(step, float(step)))
    first.close()  # killed after step 7, with a checkpoint of step 4
    second = Board(tmp_path)
    for step in (5, 6, 7, 8, 6, 7):  # after step 8 it goes back to step 5
        second.take("metric", metric(step, 10.0 + step))
    second.close()
    losses = shown(tmp_path)["train/loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7]
    assert [loss for _, loss in losses] == [1, 2, 3, 4, 15, 16, 17]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_disk_that_is_full_for_a_while_costs_those_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(tmp_path)
    board.take("metric", metric(1, 1.0))

    def full(handle: int, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(board_module, "append_whole", full)
        for step in (2, 3):
            board.take("metric", metric(step, float(step)))
    for step in (4, 5):
        board.take("metric", metric(step, float(step)))
    board.close()
    assert shown(tmp_path)["train/loss"] == [(1, 1.0), (4, 4.0), (5, 5.0)]
