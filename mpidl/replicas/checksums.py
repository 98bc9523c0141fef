"""Checksums of tensors, 8 bytes each, and where they differ over the ranks.

The checksum takes in rows of 64 KiB one after another, having multiplied and shifted what came before, so that it runs
about as fast as memory is read. A single element that differs always changes the folded row. Different tensors have the
same checksum with a probability of about 2^-64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from collectives import Communicator
from collectives.diagnostics import listing

from ..digest import code
from ..job.objects import all_gather_object

_SAMPLES = 64
_COLUMNS = 1 << 13  # of 8 bytes: what is worked on stays in the caches
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two values become one
_HALF = np.uint64(32)


def checksum(tensor: torch.Tensor) -> bytes:
    """8 bytes that tell the tensor's shape, type and bits."""
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=8)
    flat = tensor.detach()
    flat = (flat if flat.is_contiguous() else flat.contiguous()).reshape(-1)
    data: Any = flat.view(torch.uint8).cpu().numpy()
    whole = data.size // (8 * _COLUMNS) * (8 * _COLUMNS)
    if whole:
        digest.update(_fold_rows(data[:whole].view(np.uint64).reshape(-1, _COLUMNS)))
    digest.update(data[whole:])
    return digest.digest()


def sample(flat: torch.Tensor) -> torch.Tensor:
    """Returns a view of at least 64 elements of a flat tensor, or of all that it has.

    Their distance is odd, so that they are not all of one column of a matrix.
    """
    return flat[:: max(1, flat.numel() // _SAMPLES - 1) | 1]


def _fold_rows(rows: Any) -> Any:
    """Folds all rows into one that depends on each and on their order.

    Each step maps the values so far one to one, and adds the next row.
    """
    sums, high = rows[0].copy(), np.empty(_COLUMNS, np.uint64)
    for row in rows[1:]:
        np.multiply(sums, _FACTOR, out=sums)
        np.right_shift(sums, _HALF, out=high)
        np.bitwise_xor(sums, high, out=sums)
        np.add(sums, row, out=sums)
    return sums


def difference(comm: Communicator, sums: Mapping[str, bytes], partly: bool = False) -> str | None:
    """Describes what differs first, and on which ranks; None if nothing does. Collective.

    sums: by name.
    partly: ranks without a name do not differ in it.
    """
    mine = np.array([code(repr(dict(sums)))])
    everyone = np.empty(comm.size, np.int64)
    comm.all_gather(everyone, mine)
    if (everyone == mine).all():  # on all ranks or on none
        return None
    differing = list(_differing(all_gather_object(comm, dict(sums)), partly))
    if not differing:
        return None
    name, few, rest = differing[0]
    more = f"; so do {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{name} on {listing(few)} from {listing(rest)}{more}"


def _differing(everyone: list[dict[str, bytes]], partly: bool) -> Iterator[tuple[str, list[int], list[int]]]:
    """(name, the ranks that are fewer, the others) of all that differs, in order."""
    for name in {name: None for sums in everyone for name in sums}:
        groups: dict[bytes | None, list[int]] = {}
        for rank, sums in enumerate(everyone):
            if name in sums or not partly:
                groups.setdefault(sums.get(name), []).append(rank)
        if len(groups) > 1:
            most = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            yield name, sorted(rank for ranks in groups.values() if ranks is not most for rank in ranks), most
