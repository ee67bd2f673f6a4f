"""Which reader reads a file: by what the spec says, else by the ending of its name."""

from __future__ import annotations

from pathlib import PurePosixPath

from rubato.corpus.find import Source
from rubato.corpus.lines import Form, JsonReader, TextReader
from rubato.corpus.place import Place
from rubato.corpus.records import COMPRESSED, Reader
from rubato.corpus.token_files import FlatReader, MegatronReader, index_of
from rubato.tokenizers import Tokenizer

_BY_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "dataset",
    ".bin": "tokens",
}
_LINES = ("text", "jsonl")


def format_of(place: Place, source: Source) -> str:
    """The format of a file.

    Raises:
        RubatoError: it is compressed, and its format cannot be read like that.
    """
    name = source.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    found: str = place.spec.format
    if found == "auto":
        found = _BY_SUFFIX.get(PurePosixPath(name).suffix, "text") if place.spec.builtin is None else "text"
        if found == "tokens" and index_of(source).is_there():
            found = "megatron"
    if found not in _LINES and name != source.name:
        cause = f"{source.location} is compressed, and {found} is read here and there"
        raise place.problem("corpus_format", cause, "decompress it; Parquet compresses by itself", field="format")
    return found


def is_part_of_another(place: Place, source: Source) -> bool:
    """Whether a file only belongs to another one that is read: the index of tokens."""
    return source.name.endswith(".idx") and place.spec.format in ("auto", "megatron")


def reader_for(
    place: Place, source: Source, tokenizer: Tokenizer, vocab_size: int, largest: int, *, answers: bool = False
) -> Reader:
    """What reads a file.

    Args:
        largest: bytes of a document of plain text.
        answers: whether what is to be learned to say is told apart.

    Raises:
        RubatoError: the format has no answers in it, or cannot be read like that.
    """
    found = format_of(place, source)
    form = Form(tokenizer.template, answers)
    if answers and found in ("text", "megatron", "tokens"):
        cause = f"{source.location} is {found}, in which no answers can be told apart"
        raise place.problem("corpus_format", cause, "give JSON lines or tables with messages, or no answers_only")
    if found == "text":
        return TextReader(place, largest, utf8=tokenizer.is_text)
    if found == "jsonl":
        return JsonReader(place, form)
    if found == "megatron":
        return MegatronReader(place, vocab_size)
    if found == "tokens":
        return FlatReader(place, vocab_size)
    from rubato.corpus.columns import ArrowReader, ParquetReader  # loads pyarrow

    return (ParquetReader if found == "parquet" else ArrowReader)(place, form)
