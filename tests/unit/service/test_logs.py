"""The end of a file, read without reading the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.jobs.logs import read_tail


@pytest.mark.parametrize("lines", [0, 1, 3, 500])
def test_the_last_lines(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%d" % number + b"x" * 997 + b"\n" for number in range(400)) + b"half")
    whole = path.read_bytes()
    expected = b"".join(whole.splitlines(keepends=True)[-lines:]) if lines else b""
    assert read_tail(path, lines, 2**30) == (expected, len(whole))


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"x" * 1_000_000)
    assert read_tail(path, 10, 100_000) == (b"x" * 100_000, 1_000_006)
