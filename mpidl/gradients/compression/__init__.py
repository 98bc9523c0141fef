"""Compressors of gradients, for every engine: `compress="int8"`.

    compressor          the interface: values in, the mean and what was not sent out
    casts, blockwise, sign, powersgd, gradzip, topk, dgc, randomk, sketch   a method each
    low_rank, matrices  what powersgd and gradzip share
    fraction            what topk, dgc and randomk share
    settings, options   `compress=`: the registry of names; the settings that follow a name
    refusals            models, meshes and optimizers that a compressor does not fit

    hook                the communication hook: runs the rest for an engine's buckets
    bucket_reduction    the phases of one bucket; pipeline: several buckets at once, phase by phase
    section_layout      which elements of a bucket this rank reduces; ranks: with which other ranks
    pool                arrays that are used again from step to step
    auto                measures the reductions, and chooses a method or none

    sections            a remainder for each bucket's section, and where it goes when buckets change; read it first
    bucket_section      one section: its remainder, what was not sent, added to the next step's gradients
    remainders          the mean of all ranks' remainders, which moves into other buckets, and to other ranks
    states              remainders and compressor states by parameter, as checkpoints have them
    undo                takes back what a skipped step has left

A new method is a file with a subclass of `Compressor`, its line in `settings.COMPRESSORS`, its file in this map, and
its name in tests/mpidl/gradients/compression/methods.py, by which all tests of methods run with it. `auto` and the
memory estimate ask the class: `sent_bytes`, `feeds_back`, `arrays`, `state_bytes`. CONTRIBUTING.md has the steps.
"""

from .compressor import Compressor, Exchange, Matrix, OwnedCompressor, Section
from .settings import COMPRESSORS, Compression

__all__ = ["COMPRESSORS", "Compression", "Compressor", "Exchange", "Matrix", "OwnedCompressor", "Section"]
