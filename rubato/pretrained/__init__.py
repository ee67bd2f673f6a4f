"""Models that others have trained, as Hugging Face folders: what they are, and whether all of them is there."""

from rubato.pretrained.config import Pretrained, read_pretrained
from rubato.pretrained.weights import TensorPlace, find_tensors

__all__ = ["Pretrained", "TensorPlace", "find_tensors", "read_pretrained"]
