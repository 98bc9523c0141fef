"""Digests of texts, 8 bytes each, by which ranks compare what is too long to send at every step.

Of tensors there are `replicas.checksums`, which run at the speed of memory. What others compare, too,
has their checksum: the blocks of a checkpoint CRC-32, a downloaded text SHA-256.
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
