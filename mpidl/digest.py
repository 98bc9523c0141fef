"""Digests of texts, 8 bytes each, by which ranks compare what is too long to send at every step.

For tensors use `replicas.checksums`, which runs at the speed of memory. Data that other programs check too has the
usual checksum: CRC-32 for the blocks of a checkpoint, SHA-256 for a downloaded text.
"""

from __future__ import annotations

import hashlib

DIGEST = 8  # bytes


def digest(text: str) -> bytes:
    """8 bytes of BLAKE2b."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()


def code(text: str, bits: int = 63) -> int:
    """A number of so many bits, at most 63, so that an int64 holds it and its negative."""
    return int.from_bytes(digest(text), "little") >> (64 - bits)
