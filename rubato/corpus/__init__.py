"""From files in many shapes to memory-mapped tokens: what is found, read, tokenized once, and held out."""

from rubato.corpus.find import Source, corpus_path, find_sources, fixed_part, sources
from rubato.corpus.place import Place, all_places, places
from rubato.corpus.remote import is_remote

__all__ = [
    "Place",
    "Source",
    "all_places",
    "corpus_path",
    "find_sources",
    "fixed_part",
    "is_remote",
    "places",
    "sources",
]
