"""Compressors of gradients, for every engine: `compress="int8"`.

compressor   the interface: values in, the mean and what was not sent out
casts, blockwise, sign ...   a method each
layout       which elements of a bucket a rank reduces with which others
pipeline     several buckets at once, phase by phase
remainders   what was not sent, kept for the next step
hook         runs all of it for an engine's buckets
settings     `compress=`: names and where to compress
"""

from .compressor import Compressor, Exchange, Matrix, OwnedCompressor, Section
from .settings import COMPRESSORS, Compression

__all__ = ["COMPRESSORS", "Compression", "Compressor", "Exchange", "Matrix", "OwnedCompressor", "Section"]
