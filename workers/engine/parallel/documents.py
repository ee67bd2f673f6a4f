"""Which document each position of a window belongs to, for attention that stays within them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rubato.spec import DataSpec
from rubato.tokenizers import open_tokenizer

Documents = Callable[[Tensor], dict[str, Tensor]]
"""What parts of a model are told of token ids (B, S) beside their input, by name; every stage of a pipeline is told."""


def documents_of(data: DataSpec) -> Documents:
    """Numbers documents by the tokens that end them, where the spec wants attention to stay within; else nothing."""
    if not data.document_mask:
        return lambda tokens_BS: {}
    end = open_tokenizer(data.tokenizer, data.end_of_document, data.vocab_size).end

    def numbered(tokens_BS: Tensor) -> dict[str, Tensor]:
        ends_BS = (tokens_BS == end).long()
        return {"documents_BS": ends_BS.cumsum(1) - ends_BS}  # the token that ends a document belongs to it

    return numbered
