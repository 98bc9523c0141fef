"""Compressors of gradients, for every engine: `compress="int8"`.

compressor   the interface: values in, the mean and what was not sent out
casts, blockwise, sign, powersgd, gradzip, topk, dgc, randomk, sketch   a method each
low_rank, matrices   what powersgd and gradzip share
layout       which elements of a bucket a rank reduces with which others
pipeline     several buckets at once, phase by phase
remainders   what was not sent, kept for the next step; undo   takes back what a skipped step has left
auto         measures the reductions, and chooses a method or none
hook         runs all of it for an engine's buckets
settings     `compress=`: names and where to compress; options   reads what follows a name
"""

from .compressor import Compressor, Exchange, Matrix, OwnedCompressor, Section
from .settings import COMPRESSORS, Compression

__all__ = ["COMPRESSORS", "Compression", "Compressor", "Exchange", "Matrix", "OwnedCompressor", "Section"]
