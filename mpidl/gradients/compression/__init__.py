"""Compressors of gradients, for every engine: `compress="int8"`.

compressor   the interface: values in, the mean and what was not sent out
casts, blockwise, sign, powersgd, gradzip, topk, dgc, randomk, sketch   a method each
low_rank, matrices   what powersgd and gradzip share; fraction   what topk and randomk share
layout       which elements of a bucket a rank reduces with which others; ranks   which others these are
pipeline     several buckets at once, phase by phase; bucket_reduction   the phases of one
remainders   what was not sent, kept for the next step; sections   of which bucket; states   by names
undo         takes back what a skipped step has left
auto         measures the reductions, and chooses a method or none
hook         runs all of it for an engine's buckets
settings     `compress=`: names and where to compress; options   reads what follows a name
"""

from .compressor import Compressor, Exchange, Matrix, OwnedCompressor, Section
from .settings import COMPRESSORS, Compression

__all__ = ["COMPRESSORS", "Compression", "Compressor", "Exchange", "Matrix", "OwnedCompressor", "Section"]
