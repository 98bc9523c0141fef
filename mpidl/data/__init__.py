"""Data of a rank: texts and images, tokens, its part of a dataset or a batch, and loading.

corpora            texts to train on
tokenizers         bytes, and GPT-2's byte-pair encoding; wordpiece: BERT's
masking            masked tokens for BERT
batches            the sequences of a text that a rank trains on
images             small digits, and folders of images
sampler            the samples of any dataset that a rank trains on, and where an epoch goes on
loader             batches loaded during the training step; workers: the processes that do it
"""

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
