"""A checkpoint goes on with a text: the likeliest one is what the model has learned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rubato.layout import Layout
from tests.engine.forked import in_one_process
from tests.engine.jobs import tiny_spec, train_at
from workers.engine.checkpoint.whole import chosen_checkpoint, load_whole
from workers.engine.run import RunDirectory
from workers.engine.sample import continued, main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned the alphabet by heart."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 400)
    spec = tiny_spec(
        folder / "text.txt",
        train={"steps": 60},
        optimizer={"lr": 2e-2},
    )
    RunDirectory.create(folder).adopt(spec)
    in_one_process(lambda: train_at(Layout(1, 1, 1), spec, folder, dtype=torch.float32))
    return folder


def text_of(run: Path, *options: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = in_one_process(lambda: main([str(run), *options]))
    found = capfd.readouterr()
    return code, found.out, found.err


def test_the_likeliest_text_is_what_was_learned(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = text_of(run, "--prompt", "abcdef", "--tokens", "30", "--temperature", "0", capfd=capfd)
    assert (code, out) == (0, "ghijklmnopqrstuvwxyzabcdefghij\n")


def test_the_seed_names_the_text(run: Path) -> None:
    def texts() -> list[list[int]]:
        directory = RunDirectory(run)
        model = load_whole(chosen_checkpoint(directory, None), directory.read_spec())
        return [[*continued(model, [97, 98], 20, 16, 3.0, top, seed)] for top, seed in ((0, 1), (0, 1), (0, 2), (1, 3))]

    first, again, other, likeliest = in_one_process(texts)
    assert first == again != other
    assert bytes(likeliest) == b"cdefghijklmnopqrstuv"


def test_what_cannot_be_sampled_is_refused(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = text_of(run, "--prompt", "a", "--step", "7", capfd=capfd)
    assert code == 2
    assert "no checkpoint of step 7" in err
    assert "use one of [60]" in err
    code, _, err = text_of(run, "--prompt", "", capfd=capfd)
    assert code == 2
    assert "prompt: is empty" in err
