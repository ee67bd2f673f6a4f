"""Learns a byte-level BPE tokenizer from a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rubato.corpus.find import find_sources
from rubato.corpus.formats import is_part_of_another, reader_for
from rubato.corpus.place import places
from rubato.corpus.records import BadRecords
from rubato.durable import write_durably
from rubato.spec import CorpusSpec
from rubato.tokenizers import ByteTokenizer, tokenizer_problem

END = "<|endoftext|>"
_STRETCH = 64 << 20
_DOCUMENT = 64 * 1024


def train_tokenizer(corpus: CorpusSpec, vocab_size: int, into: Path, most_bytes: int | None = None) -> int:
    """Learns merges of bytes until there are ``vocab_size`` tokens, and writes a Hugging Face folder.

    GPT-2's kind (Radford et al. 2019): any text can be written with it, none is unknown.

    Args:
        most_bytes: of text to learn from; None: all.

    Returns:
        How many tokens it has; fewer than asked for when the text has no more pairs.

    Raises:
        RubatoError: the corpus cannot be read, or is one of tokens.
    """
    import tokenizers

    if vocab_size < 257:
        cause = f"{vocab_size} tokens are fewer than the 256 bytes and the end of a document"
        raise tokenizer_problem(cause, "ask for at least 257", field="vocab_size")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(corpus, most_bytes), trainer)
    into.mkdir(parents=True, exist_ok=True)
    write_durably(into / "tokenizer.json", tokenizer.to_str(pretty=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END, "unk_token": END}
    write_durably(into / "tokenizer_config.json", json.dumps(settings, indent=2))
    size: int = tokenizer.get_vocab_size(with_added_tokens=True)
    return size


def _texts(corpus: CorpusSpec, most_bytes: int | None) -> Iterator[str]:
    left = most_bytes if most_bytes is not None else 1 << 62
    for place in places(corpus):
        bad = BadRecords(place)
        for source in find_sources(place):
            if is_part_of_another(place, source):
                continue
            reader = reader_for(place, source, ByteTokenizer(), 2**32 - 1, _DOCUMENT)
            for stretch in reader.stretches(source, _STRETCH):
                for document in reader.documents(source, stretch, bad):
                    if not isinstance(document, bytes):
                        cause = f"{source.location} holds tokens, of which no tokenizer can be learned"
                        raise place.problem("corpus_format", cause, "give text")
                    if left <= 0:
                        return
                    left -= len(document)
                    yield document.decode(errors="replace")
