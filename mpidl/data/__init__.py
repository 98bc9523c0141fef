"""Texts, how they become tokens, images; which part of a dataset or a batch a rank gets, and loading it."""

from .batches import TokenBatches, shares
from .corpora import read_corpus
from .loader import DataLoader
from .masking import Masking
from .sampler import DistributedSampler
from .tokenizers import ByteTokenizer, MarkedTokenizer, make_tokenizer
from .wordpiece import make_marked_tokenizer

__all__ = [
    "ByteTokenizer",
    "DataLoader",
    "DistributedSampler",
    "MarkedTokenizer",
    "Masking",
    "TokenBatches",
    "make_marked_tokenizer",
    "make_tokenizer",
    "read_corpus",
    "shares",
]
