"""Samples of a step depend on seed and step alone; an epoch visits all once; nothing held out is trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from rubato.corpus.open import Corpus, Stream, TokenSource
from rubato.layout import sample_range
from workers.engine.data import Sampler

LENGTH = 16


def corpus(windows: int, held_out_windows: int = 0) -> Corpus:
    """Streams in which every window is recognised by its first token's position, as tokens count up."""
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 256, windows * LENGTH + 1, dtype=np.uint8)
    held_out = rng.integers(0, 256, held_out_windows * LENGTH + 5, dtype=np.uint8)
    return Corpus((TokenSource(one_document(stream), one_document(held_out)),))


def one_document(tokens: np.ndarray) -> Stream:
    return Stream(tokens, np.array([len(tokens)], np.uint64))


def rows(tokens: torch.Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in tokens]


def windows_of(stream: np.ndarray) -> list[bytes]:
    return [bytes(stream[at : at + LENGTH]) for at in range(0, len(stream) - LENGTH, LENGTH)]


@pytest.mark.parametrize("data", [1, 2, 3, 4, 7])
def test_any_data_degree_reads_the_same_samples(make_spec, data: int) -> None:
    spec = make_spec(train={"global_batch": 12}, parallelism={"micro_batch": 1})
    sampler = Sampler(spec, corpus(50))
    for step in (0, 3, 4, 1000):
        whole = sampler.batch(step, range(12))
        parts = [sampler.batch(step, sample_range(spec.parallelism, 12, data, replica)) for replica in range(data)]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), whole[0])
        assert torch.equal(torch.cat([targets for _, targets in parts]), whole[1])


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(make_spec) -> None:
    text = corpus(windows=50)
    sampler = Sampler(make_spec(train={"global_batch": 4}), text)
    stream = [row for step in range(25) for row in rows(sampler.batch(step, range(4))[0])]  # two epochs; 50 % 4 != 0
    first, second = stream[:50], stream[50:]
    assert Counter(first) == Counter(second) == Counter(windows_of(text.sources[0].train.tokens))
    assert first != second
    assert first != windows_of(text.sources[0].train.tokens)


def test_targets_are_the_tokens_that_follow(make_spec) -> None:
    text = corpus(20)
    tokens, targets = Sampler(make_spec(), text).batch(3, range(4))
    assert tokens.shape == targets.shape == (4, LENGTH)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    followers = {
        window: text.sources[0].train.tokens[(at + 1) * LENGTH]
        for at, window in enumerate(windows_of(text.sources[0].train.tokens))
    }
    assert [followers[row] for row in rows(tokens)] == targets[:, -1].tolist()


def test_seed_and_step_name_the_samples(make_spec) -> None:
    text = corpus(400)
    first = Sampler(make_spec(train={"seed": 1}), text)
    again = Sampler(make_spec(train={"seed": 1}), text)
    other = Sampler(make_spec(train={"seed": 2}), text)
    again.batch(0, range(4))
    assert torch.equal(first.batch(7, range(4))[0], again.batch(7, range(4))[0])
    assert not torch.equal(first.batch(7, range(4))[0], first.batch(8, range(4))[0])
    assert not torch.equal(first.batch(7, range(4))[0], other.batch(7, range(4))[0])


def test_a_corpus_smaller_than_a_batch_is_read_again(make_spec) -> None:
    text = corpus(3)
    tokens, _ = Sampler(make_spec(train={"global_batch": 6}), text).batch(0, range(6))
    assert Counter(rows(tokens)) == Counter(windows_of(text.sources[0].train.tokens) * 2)


def test_evaluation_reads_each_held_out_window_once(make_spec) -> None:
    text = corpus(50, held_out_windows=10)
    spec = make_spec(data={"validation": {"every": 1, "batches": 100}}, train={"global_batch": 4})
    sampler = Sampler(spec, text)
    assert sampler.validation_batches == 3
    counted = []
    for index in range(3):
        tokens, targets = sampler.validation_batch(index, range(4))
        real = (targets != -100).all(dim=1)
        assert torch.equal(real, (targets != -100).any(dim=1))
        counted += rows(tokens[real])
    assert Counter(counted) == Counter(windows_of(text.sources[0].held_out.tokens)[:10])
    parts = [sampler.validation_batch(2, places)[1] for places in (range(3), range(3, 4))]
    assert torch.equal(torch.cat(parts), sampler.validation_batch(2, range(4))[1])


def test_evaluation_does_not_depend_on_the_seed(make_spec) -> None:
    text = corpus(50, held_out_windows=10)
    batches = [Sampler(make_spec(train={"seed": seed}), text).validation_batch(0, range(4))[0] for seed in (1, 2)]
    assert torch.equal(*batches)


def test_no_work_is_an_empty_batch(make_spec) -> None:
    tokens, targets = Sampler(make_spec(), corpus(50)).batch(0, range(2, 2))
    assert tokens.shape == targets.shape == (0, LENGTH)


def test_places_outside_the_global_batch_are_refused(make_spec) -> None:
    with pytest.raises(ValueError, match="global batch of 4"):
        Sampler(make_spec(), corpus(50)).batch(0, range(2, 5))


def test_samples_come_from_the_text_itself(tmp_path: Path, make_spec) -> None:
    from workers.engine.data import open_corpus

    spec = make_spec()
    opened = open_corpus(spec, tmp_path)
    tokens, _ = Sampler(spec, opened).batch(0, range(4))
    text = bytes(opened.sources[0].train.tokens)
    assert all(row in text for row in rows(tokens))
