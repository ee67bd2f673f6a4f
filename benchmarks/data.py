"""What data costs: tokenizing, opening a corpus, beginning at any step, reading, and memory. Prints one JSON line last.

Each figure stands beside a peer or a limit taken in the same run: tokenizing beside `tokenizers`' own batches on the
same text and cores, reading beside a plain pass over the same mapped file. ``--mb`` sets the size of the corpus that is
opened (1000 by default), ``--documents`` how many documents the one for memory has (ten million).
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from rubato.corpus import Place, find_sources
from rubato.corpus.open import Corpus, Stream, TokenSource, open_corpus
from rubato.corpus.train_tokenizer import train_tokenizer
from rubato.spec import CorpusSpec, JobSpec, parse_spec
from workers.engine.data import Ahead, Sampler

_VOCABULARY = 4096
_STEPS = 50
_MAPPED = (("tokens", "u1"), ("ends", "u8"))


def spec_of(**data: Any) -> JobSpec:
    return parse_spec(
        {
            "name": "bench-data",
            "model": {"preset": "tiny"},
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": 1024, **data},
            "train": {"steps": 10, "global_batch": 32},
            "workers": 1,
        }
    )


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tokenizing(folder: Path) -> dict[str, Any]:
    """The library of Python by a BPE tokenizer: from files to an entry of the cache, and by the library alone."""
    library = CorpusSpec(builtin="python-stdlib")
    train_tokenizer(library, _VOCABULARY, folder / "tokenizer", most_bytes=2_000_000)
    spec = spec_of(tokenizer=str(folder / "tokenizer"))
    texts = [Path(source.location).read_text(errors="replace") for source in find_sources(Place(library))]
    alone = tokenizers.Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    counts: list[int] = []

    def batch() -> None:
        counts.append(sum(len(each.ids) for each in alone.encode_batch_fast(texts, add_special_tokens=False)))

    ours, theirs = [], []
    for turn in range(3):
        ours.append(seconds(lambda turn=turn: open_corpus(spec, folder / f"turn-{turn}")))
        theirs.append(seconds(batch))
    tokens = counts[0]
    return {
        "tokens": tokens,
        "tokens_per_s": round(tokens / statistics.median(ours)),
        "tokenizers_tokens_per_s": round(tokens / statistics.median(theirs)),
        "ratio": round(statistics.median(theirs) / statistics.median(ours), 3),
    }


def opening(folder: Path, mb: int) -> tuple[dict[str, Any], Corpus, JobSpec]:
    """A corpus of so many MB, by a run that is the first to open it, and by ones that are not."""
    sources = find_sources(Place(CorpusSpec(builtin="python-stdlib")))
    library = b"\n".join(Path(source.location).read_bytes() for source in sources)
    text = folder / "text.txt"
    with text.open("wb") as file:
        number = 0
        while file.tell() < mb * 1_000_000:
            file.write(b"%d\n" % number + library)
            number += 1
        file.truncate(mb * 1_000_000)
    spec = spec_of(train={"path": str(text)}, cache=str(folder / "cache"))
    first = seconds(lambda: open_corpus(spec, folder / "one"))
    again = seconds(lambda: open_corpus(spec, folder / "one"))
    another = seconds(lambda: open_corpus(spec, folder / "two"))
    found = {"mb": mb, "first_s": round(first, 3), "again_s": round(again, 4), "another_run_s": round(another, 4)}
    return found, open_corpus(spec, folder / "one"), spec


def resuming(corpus: Corpus, spec: JobSpec) -> dict[str, Any]:
    """From a corpus that is open to the first batch, at an early step and at a late one; medians of several."""
    times: dict[int, list[float]] = {10: [], 1_000_000: []}
    for turn in range(2 * _STEPS):
        for step, found in times.items():
            found.append(seconds(lambda step=step, turn=turn: Sampler(spec, corpus).batch(step + turn, range(32))))
    at = {step: statistics.median(found) for step, found in times.items()}
    return {
        "step_10_ms": round(1000 * at[10], 3),
        "step_1000000_ms": round(1000 * at[1_000_000], 3),
        "ratio": round(at[1_000_000] / at[10], 3),
    }


def reading(corpus: Corpus, spec: JobSpec) -> dict[str, Any]:
    """Batches of 32 windows; the limit is to copy the same number of windows from the map, one after the other."""
    sampler, tokens = Sampler(spec, corpus), corpus.sources[0].train.tokens
    length, count = spec.data.sequence_length, 32
    read = [seconds(lambda step=step: sampler.batch(step, range(count))) for step in range(_STEPS)]
    plain = [  # one long copy instead of 32 short ones
        seconds(lambda step=step: tokens[step * count * length : (step + 1) * count * length].astype(np.int64).copy())
        for step in range(_STEPS)
    ]
    a_batch = count * length
    return {
        "tokens_per_s": round(a_batch / statistics.median(read)),
        "sequential_tokens_per_s": round(a_batch / statistics.median(plain)),
        "ratio": round(statistics.median(plain) / statistics.median(read), 3),
    }


def waiting(corpus: Corpus, spec: JobSpec) -> dict[str, Any]:
    """What a step waits for samples beside a step's work of some milliseconds: read when they are wanted, and ahead."""
    sampler = Sampler(spec, corpus)
    ahead, plain, waited = Ahead(sampler), [], []
    work = np.ones((512, 512), np.float32)
    for step in range(_STEPS):
        plain.append(seconds(lambda step=step: sampler.batch(step, range(32))))
        waited.append(seconds(lambda step=step: ahead.batch(step, range(32))))
        for _ in range(8):
            work @ work
    return {
        "read_when_wanted_ms": round(1000 * statistics.median(plain), 3),
        "read_ahead_ms": round(1000 * statistics.median(waited), 3),
    }


def memory(folder: Path, documents: int) -> dict[str, Any]:
    """What a process grows by when it opens and reads a corpus of so many documents in shuffled order."""
    with (folder / "ends").open("wb") as ends, (folder / "tokens").open("wb") as tokens:
        rng, before, block = np.random.default_rng(0), 0, 1 << 20
        for first in range(0, documents, block):
            lengths = rng.integers(1, 64, min(block, documents - first), dtype=np.uint64)
            ends.write((np.cumsum(lengths, dtype=np.uint64) + np.uint64(before)).tobytes())
            before += int(lengths.sum())
        tokens.truncate(before)
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_grow, args=(folder, writer))
    process.start()
    found: dict[str, Any] = reader.recv()
    process.join()
    return {"documents": documents, "tokens": before, **found}


def _grow(folder: Path, writer: Any) -> None:
    before, own = _resident(), _resident("RssAnon")
    began = time.perf_counter()
    tokens, ends = (
        np.asarray(np.memmap(folder / name, kind, "r")) for name, kind in (("tokens", "u1"), ("ends", "u8"))
    )
    stream = Stream(tokens, ends)
    corpus = Corpus((TokenSource(stream, Stream(stream.tokens[:0], stream.ends[:0]), Fraction(1), "large"),), folder)
    sampler = Sampler(spec_of(shuffle="documents"), corpus)
    first = time.perf_counter() - began
    for step in range(_STEPS):
        sampler.batch(step, range(32))
    peak = _resident("VmHWM")
    again = seconds(lambda: Sampler(spec_of(shuffle="documents"), corpus))
    writer.send(
        {
            "grown_mb": round((peak - before) / 1e6, 1),
            "grown_unmapped_mb": round((_resident("RssAnon") - own) / 1e6, 1),  # what the system cannot take back
            "order_first_s": round(first, 3),
            "order_again_s": round(again, 4),
        }
    )


def _resident(what: str = "VmRSS") -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data")
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=10_000_000)
    options = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "data", "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="rubato-bench-") as name:
        folder = Path(name)
        found["tokenizing"] = tokenizing(folder)
        print(found["tokenizing"], file=sys.stderr)
        found["opening"], corpus, spec = opening(folder, options.mb)
        print(found["opening"], file=sys.stderr)
        found["resuming"] = resuming(corpus, spec)
        found["reading"] = reading(corpus, spec)
        found["waiting"] = waiting(corpus, spec)
        del corpus
        print(found["resuming"], found["reading"], found["waiting"], file=sys.stderr)
        found["memory"] = memory(folder, options.documents)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
