"""Text to token ids and back: by bytes, a tokenizer.json, a Hugging Face folder or a tiktoken-style file.

The libraries behind it are imported when they are needed: most of what reads a spec never tokenizes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rubato.problems import FieldProblem, RubatoError, nearest

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

BYTES, NONE = "bytes", "none"
FIELD = "data.tokenizer"
Ids = NDArray[np.uint8] | NDArray[np.uint32]

_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# GPT-4's way to split text before merging (cl100k_base), which Llama 3 and Qwen have taken over.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


class Tokenizer(Protocol):
    """Turns documents into token ids.

    Attributes:
        size: one more than the largest id.
        end: the id that ends a document.
        digest: SHA-256 of everything that ids depend on.
        is_text: whether documents must be UTF-8.
        template: the chat template it came with, a Jinja text.
    """

    size: int
    end: int
    digest: str
    is_text: bool
    template: str | None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """The ids of each document, without an end. Uses all cores where the library can.

        Raises:
            UnicodeDecodeError: a document is not UTF-8 and has to be.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; what is no text is replaced."""
        ...


class ByteTokenizer:
    """Each byte is a token; a zero byte, which no text holds, ends a document."""

    size = 256
    end = 0
    digest = BYTES
    is_text = False
    template: str | None = None

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document, np.uint8) for document in documents]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, alone or in a Hugging Face folder."""

    is_text = True

    def __init__(self, path: Path, end: str | None) -> None:
        import tokenizers

        text = _read(path)
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(text.decode())
        except Exception as error:
            raise tokenizer_problem(f"{path} is no tokenizer: {error}", "give a tokenizer.json") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        settings = _settings(path.parent)
        self.template = settings.get("chat_template") if isinstance(settings.get("chat_template"), str) else None
        beside = path.parent / "chat_template.jinja"
        if beside.is_file():
            self.template = beside.read_text(encoding="utf-8")
        self.end = vocabulary[_end(vocabulary, end, settings, path)]
        self.digest = _digest(text, self.end)

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        texts = [document.decode() for document in documents]
        found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(each.ids, np.uint32) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


class RankedTokenizer:
    """A tiktoken-style file: a line a token, its bytes in base64 and its rank. Special tokens follow the ranks."""

    is_text = True
    template: str | None = None

    def __init__(self, path: Path, end: str | None) -> None:
        import tiktoken

        text = _read(path)
        ranks: dict[bytes, int] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                cause = f"line {number} of {path} is not a token in base64 and a rank"
                raise tokenizer_problem(cause, "give a .tiktoken file") from error
        if not ranks:
            raise tokenizer_problem(f"{path} holds no tokens", "give a .tiktoken file")
        name = end or _KNOWN_ENDS[0]
        self.end = max(ranks.values()) + 1
        self.size = self.end + 1
        self._encoding: tiktoken.Encoding = tiktoken.Encoding(
            path.stem, pat_str=_SPLIT, mergeable_ranks=ranks, special_tokens={name: self.end}
        )
        self.digest = _digest(text, self.end)

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        texts = [document.decode() for document in documents]
        found = self._encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        return [np.asarray(each, np.uint32) for each in found]

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))


class NoTokenizer:
    """Ids that others have made: what they mean is not known, and nothing can be added to them."""

    end = -1
    digest = "none"
    is_text = False
    template: str | None = None

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        raise tokenizer_problem("'none' turns no text into tokens", "name a tokenizer, or a corpus of tokens")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def open_tokenizer(name: str, end: str | None = None, size: int = 0) -> Tokenizer:
    """The tokenizer of that name.

    Args:
        name: ``bytes``, ``none``, or the path of a tokenizer.json, a folder with one, or a ``.tiktoken`` file.
        end: the token that ends a document; None: what the tokenizer says itself.
        size: of the vocabulary, for ``none``.

    Raises:
        RubatoError: it is not there, or is none, or does not know how a document ends.
    """
    if name == BYTES:
        if end is not None:
            raise tokenizer_problem(
                "bytes end a document with a zero byte", "leave it out", field="data.end_of_document"
            )
        return ByteTokenizer()
    if name == NONE:
        return NoTokenizer(size)
    path = Path(name).expanduser()
    if path.is_dir():
        inside = path / "tokenizer.json"
        if not inside.is_file():
            raise tokenizer_problem(f"{path} holds no tokenizer.json", "save the tokenizer in its fast form there")
        return FileTokenizer(inside, end)
    if not path.is_file():
        cause = f"{path.absolute()} does not exist" if os.sep in name or "." in name else f"'{name}' is not known"
        raise tokenizer_problem(cause, "use bytes, a tokenizer.json, a folder with one, or a .tiktoken file")
    if path.suffix in (".tiktoken", ".bpe"):
        return RankedTokenizer(path, end)
    return FileTokenizer(path, end)


def tokenizer_problem(cause: str, fix: str, field: str = FIELD) -> RubatoError:
    """The refusal of a tokenizer, naming its field."""
    return RubatoError(
        f"{field}: {cause}", fix=fix, code="tokenizer", status=422, problems=[FieldProblem(field, cause, fix)]
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise tokenizer_problem(f"{path} cannot be read: {error.strerror}", "make it readable") from error


def _settings(folder: Path) -> dict[str, Any]:
    """What stands beside a tokenizer.json about its special tokens and its chats; empty when nothing does."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise tokenizer_problem(f"{path} is not JSON: {error}", "correct it, or leave it away") from error
    return found if isinstance(found, dict) else {}


def _end(vocabulary: dict[str, int], given: str | None, settings: dict[str, Any], path: Path) -> str:
    said = settings.get("eos_token")
    said = said.get("content") if isinstance(said, dict) else said
    wanted = given or said
    if wanted is not None:
        if wanted in vocabulary:
            return str(wanted)
        close = nearest(str(wanted), vocabulary)
        fix = f"did you mean '{close}'?" if close else "name a token of the vocabulary"
        raise tokenizer_problem(f"{path} has no token '{wanted}'", fix, field="data.end_of_document")
    known = next((name for name in _KNOWN_ENDS if name in vocabulary), None)
    if known is None:
        raise tokenizer_problem(
            f"{path} does not say which token ends a document", "name it", field="data.end_of_document"
        )
    return known


def _digest(content: bytes, end: int) -> str:
    return hashlib.sha256(content + f"/{end}".encode()).hexdigest()
