"""What is in a corpus: documents, tokens, lengths, a few samples, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from rubato.corpus.open import Corpus, Stream
from rubato.corpus.place import places
from rubato.spec import JobSpec
from rubato.tokenizers import Tokenizer

_SAMPLES, _SAMPLE_TOKENS = 3, 60
_AT_ONCE = 1 << 20


class LengthBin(BaseModel):
    """Documents of ``low`` to less than ``high`` tokens."""

    low: int
    high: int
    documents: int


class SourceView(BaseModel):
    """What one source holds. ``share``: of the samples; ``epochs``: how often the run reads it."""

    source: str
    documents: int
    held_out_documents: int
    tokens: int
    held_out_tokens: int
    share: float
    epochs: float
    lengths: list[LengthBin]
    samples: list[str]
    skipped_records: int
    problems: list[str]


class CorpusView(BaseModel):
    """What ``rubato data inspect`` shows."""

    documents: int
    tokens: int
    held_out_tokens: int
    vocab_size: int
    digest: str
    sources: list[SourceView]


def inspect(spec: JobSpec, corpus: Corpus, tokenizer: Tokenizer) -> CorpusView:
    """Looks through a corpus that was opened."""
    whole = sum(source.weight for source in corpus.sources)
    samples = spec.train.steps * spec.train.global_batch
    views = []
    for place, source in zip(places(spec.data.train), corpus.sources, strict=True):
        share = float(source.weight / whole)
        windows = max(1, (len(source.train.tokens) - 1) // spec.data.sequence_length)
        views.append(
            SourceView(
                source=place.spec.path or str(place.spec.builtin),
                documents=source.documents,
                held_out_documents=len(source.held_out.ends),
                tokens=len(source.train.tokens),
                held_out_tokens=len(source.held_out.tokens),
                share=share,
                epochs=samples * share / windows,
                lengths=_histogram(source.train),
                samples=[*_samples(source.train, tokenizer)],
                skipped_records=source.bad,
                problems=[*source.examples, *_doubts(spec, source.train)],
            )
        )
    return CorpusView(
        documents=corpus.documents,
        tokens=sum(view.tokens for view in views),
        held_out_tokens=sum(len(source.held_out.tokens) for source in corpus.evaluated),
        vocab_size=spec.data.vocab_size,
        digest=corpus.digest,
        sources=views,
    )


def _histogram(stream: Stream) -> list[LengthBin]:
    """Documents by length, in bins that double."""
    counts = np.zeros(65, np.int64)
    before = 0
    for first in range(0, len(stream.ends), _AT_ONCE):
        ends = stream.ends[first : first + _AT_ONCE].astype(np.int64)
        lengths = np.diff(ends, prepend=before)
        before = int(ends[-1])
        counts += np.bincount(np.frexp(np.maximum(lengths, 1))[1], minlength=65)
    return [
        LengthBin(low=2 ** (power - 1), high=2**power, documents=int(count))
        for power, count in enumerate(counts)
        if count
    ]


def _samples(stream: Stream, tokenizer: Tokenizer) -> Sequence[str]:
    """The beginnings of documents from all over the stream."""
    count = len(stream.ends)
    found = []
    for number in sorted({count * part // _SAMPLES for part in range(min(count, _SAMPLES))}):
        begin = int(stream.ends[number - 1]) if number else 0
        taken: Any = stream.tokens[begin : min(int(stream.ends[number]), begin + _SAMPLE_TOKENS)]
        found.append(tokenizer.decode(taken.tolist()))
    return found


def _doubts(spec: JobSpec, stream: Stream) -> list[str]:
    """What may be wrong, though a run can begin."""
    doubts = []
    if len(stream.ends) == 1 and len(stream.tokens) > 100 * spec.data.sequence_length:
        doubts.append("all of it is one document, so nothing of it can be held out and documents cannot be shuffled")
    used = np.unique(stream.tokens[: 1 << 22])
    if len(stream.tokens) >= 1 << 16 and len(used) < spec.data.vocab_size // 20:
        doubts.append(f"{len(used)} of {spec.data.vocab_size} tokens occur; is this the right tokenizer?")
    return doubts
