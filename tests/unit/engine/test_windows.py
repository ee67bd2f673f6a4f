"""For every way to cut a corpus: any data degree and any resume point read the same samples, each once an epoch."""

from __future__ import annotations

import tempfile
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rubato.corpus.open import Corpus, Stream, TokenSource
from rubato.layout import micro_batches, sample_range
from rubato.spec import JobSpec, parse_spec
from workers.engine.data import Ahead, Sampler
from workers.engine.data.blend import assign
from workers.engine.data.windows import NOT_COUNTED, windows_of

CUTS = [("windows", "stream"), ("documents", "stream"), ("windows", "padded")]


def spec_of(shuffle: str, packing: str, length: int = 8, **train: int) -> JobSpec:
    return parse_spec(
        {
            "name": "cut",
            "model": {"preset": "tiny"},
            "data": {
                "train": {"builtin": "python-stdlib"},
                "sequence_length": length,
                "shuffle": shuffle,
                "packing": packing,
                "vocab_size": 2**20,
                "tokenizer": "none",
            },
            "train": {"steps": 10, "global_batch": 4, **train},
            "workers": {"min": 1, "max": 64},
        }
    )


def stream(lengths: list[int], first: int = 0) -> Stream:
    """Documents of these lengths, of tokens that occur once."""
    ends = np.cumsum(lengths, dtype=np.uint64)
    return Stream(np.arange(first, first + sum(lengths), dtype=np.uint32), ends)


def corpus(*lengths: list[int], weights: list[str] | None = None, folder: Path | None = None) -> Corpus:
    sources = [
        TokenSource(stream(each, 10_000 * place), stream([9, 9]), Fraction(weight), key=f"source-{place}")
        for place, (each, weight) in enumerate(zip(lengths, weights or ["1"] * len(lengths), strict=True))
    ]
    return Corpus(tuple(sources), folder)


many_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=120).filter(lambda lengths: sum(lengths) > 9)


@settings(max_examples=25, deadline=None)
@given(
    lengths=many_lengths,
    cut=st.sampled_from(CUTS),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**6),
    degrees=st.tuples(st.integers(1, 12), st.integers(1, 12)),
)
def test_any_degree_reads_the_same_from_any_step(lengths, cut, seed, step, degrees) -> None:
    if cut[1] == "padded" and max(lengths) < 2:
        lengths = [*lengths, 5]
    spec, text = spec_of(*cut, seed=seed, global_batch=12), corpus(lengths)
    undisturbed, resumed = Sampler(spec, text), Sampler(spec, text)
    for number, data in enumerate(degrees):
        whole = undisturbed.batch(step + number, range(12))
        assert sum(micro_batches(spec.parallelism, 12, data)) == 12
        parts = [
            resumed.batch(step + number, sample_range(spec.parallelism, 12, data, replica)) for replica in range(data)
        ]
        for side in (0, 1):
            assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


@settings(max_examples=25, deadline=None)
@given(lengths=many_lengths, cut=st.sampled_from(CUTS), seed=st.integers(0, 1000), batch=st.integers(1, 9))
def test_an_epoch_has_every_window_once(lengths, cut, seed, batch) -> None:
    if cut[1] == "padded" and max(lengths) < 2:
        lengths = [*lengths, 5]
    sampler = Sampler(spec_of(*cut, seed=seed, global_batch=batch), corpus(lengths))
    (windows,) = sampler.windows
    steps = -(-2 * windows // batch)
    rows = torch.cat([sampler.batch(step, range(batch))[1] for step in range(steps)])[: 2 * windows]
    seen = [tuple(row.tolist()) for row in rows]
    first, second = Counter(seen[:windows]), Counter(seen[windows:])
    assert first == second
    assert set(first.values()) == {1}
    if cut[1] == "stream":
        # Every token but those that fill no window is a target once, the first of the order never.
        counted = Counter(token for row in seen[:windows] for token in row)
        assert set(counted.values()) == {1}
        assert len(counted) == windows * 8
    else:
        targets = {token for row in seen[:windows] for token in row if token != NOT_COUNTED}
        begins = np.cumsum([0, *lengths[:-1]])
        assert targets == set(range(sum(lengths))) - {int(begin) for begin in begins}


@pytest.mark.parametrize("kept", [False, True])
def test_shuffled_documents_are_whole_and_in_another_order(kept: bool, tmp_path: Path) -> None:
    lengths = [3, 5, 2, 7, 4] * 60
    data, text = spec_of("documents", "stream", length=5).data, stream(lengths)
    orders = []
    for seed in (1, 2):
        for _ in range(2):  # the second time from what was kept
            windows = windows_of(data, text, seed, tmp_path if kept else None)
            tokens, targets = windows.read(np.arange(windows.count, dtype=np.uint64))
        flat = tokens.reshape(-1)
        assert np.array_equal(flat[1:], targets.reshape(-1)[:-1])
        begins = set(np.cumsum([0, *lengths[:-1]]).tolist())
        # A token is followed by the next of its document, or it is the last one and another document begins.
        ends = set((np.cumsum(lengths) - 1).tolist())
        for one, other in zip(flat[:-1].tolist(), flat[1:].tolist(), strict=True):
            assert other == one + 1 or (one in ends and other in begins)
        orders.append(flat.tolist())
    assert orders[0] != orders[1]
    assert orders[0] != list(range(len(orders[0])))
    assert bool(list(tmp_path.iterdir())) == kept


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.sampled_from(["0.7", "0.3", "1", "2.5", "0.001", "0.333333"]), min_size=1, max_size=5),
    begin=st.integers(0, 10**12),
)
def test_a_blend_keeps_its_proportions_at_every_moment(weights, begin) -> None:
    exact = [Fraction(weight) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    counts = [0] * len(weights)
    for number, (source, own) in enumerate(assign(range(400), exact), 1):
        assert own == counts[source]  # its own samples are numbered without gaps
        counts[source] += 1
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - number * share) <= len(weights)
    # And far from the beginning, without going there.
    far = assign(range(begin, begin + 200), exact)
    for source, share in enumerate(shares):
        numbers = [own for which, own in far if which == source]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        if numbers:
            assert abs(numbers[0] - begin * share) <= len(weights) + 200 * share


def test_sources_of_a_blend_have_epochs_of_their_own() -> None:
    text = corpus([8] * 41, [8] * 21, weights=["3", "1"])
    sampler = Sampler(spec_of("windows", "stream", global_batch=4), text)
    assert sampler.windows == [40, 20]
    rows = torch.cat([sampler.batch(step, range(4))[0] for step in range(40)])
    first = [int(row[0]) for row in rows if int(row[0]) < 10_000]
    second = [int(row[0]) for row in rows if int(row[0]) >= 10_000]
    assert (len(first), len(second)) == (120, 40)
    assert Counter(first) == {8 * window: 3 for window in range(40)}
    assert Counter(second) == {10_000 + 8 * window: 2 for window in range(20)}
    assert first[:20] != [token - 10_000 for token in second[:20]]


@pytest.mark.parametrize("cut", CUTS)
def test_evaluation_reads_the_held_out_windows_of_all_sources_once(cut) -> None:
    sources = [
        TokenSource(stream([50]), stream([9, 17], 1000)),
        TokenSource(stream([50]), stream([25], 2000)),
    ]
    spec = spec_of(*cut, global_batch=4)
    validation = spec.data.validation.model_copy(update={"batches": 9})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"validation": validation})})
    sampler = Sampler(spec, Corpus(tuple(sources)))
    rows = [row for index in range(sampler.validation_batches) for row in sampler.validation_batch(index, range(4))[1]]
    counted = Counter(int(token) for row in rows for token in row if token != NOT_COUNTED)
    assert set(counted.values()) == {1}
    assert len([token for token in counted if token < 2000]) == 24
    assert len([token for token in counted if token >= 2000]) == 24


def test_reading_ahead_gives_what_was_asked_for() -> None:
    spec, text = spec_of("windows", "stream", global_batch=6), corpus([30] * 30)
    plain, ahead = Sampler(spec, text), Ahead(Sampler(spec, text))
    asked = [(0, range(3)), (1, range(3)), (2, range(3)), (2, range(3)), (3, range(6)), (9, range(6)), (10, range(2))]
    for step, samples in asked:
        for one, other in zip(plain.batch(step, samples), ahead.batch(step, samples), strict=True):
            assert torch.equal(one, other)


def test_ten_million_documents_take_no_memory() -> None:
    """Sums are kept on disk, a 64th of the documents long."""
    data = spec_of("documents", "stream").data
    with tempfile.TemporaryDirectory() as folder:
        text = stream([4] * 100_000)
        windows_of(data, text, 3, Path(folder))
        (kept,) = Path(folder).iterdir()
        assert kept.stat().st_size <= 8 * (100_000 // 64 + 2)
