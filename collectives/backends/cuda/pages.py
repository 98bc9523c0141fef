"""GPU memory that can be given back and taken again; `collectives.memory.pages` does this for the host.

torch's allocator gives no single pages back to the driver. So each region is a storage of torch's allocator, which is
resized to 0 and back. Tensors that view it, also those that autograd has saved, keep that storage, and are right again
when it has memory again and the same bytes have been written. Its address may then differ.
"""

from __future__ import annotations

from typing import Any

import torch


class DevicePages:
    """Regions of GPU memory, each from when `tensor` is first asked for it; this rank's own. See Pages.

    Memory is taken and given back in the order of the stream that is current in the thread that does it.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._regions: dict[int, torch.Tensor] = {}

    @property
    def shared(self) -> bool:
        """Returns whether other processes have the same memory."""
        return False

    def claim(self) -> bool:
        """Implements `Pages.claim`; memory of a GPU is this rank's own."""
        return True

    def address_of(self, start: int) -> int:
        """The address of a region now; 0 for one that is not there."""
        return self._regions[start].data_ptr() if start in self._regions else 0

    def tensor(self, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A whole region, of `size` elements; there, the first time."""
        if start not in self._regions:
            self._regions[start] = torch.empty(size, dtype=dtype, device=self._device)
        return self._regions[start]

    def reserve(self, start: int, nbytes: int) -> None:
        """Brings a region's memory. Raises torch.OutOfMemoryError."""
        if start in self._regions:
            self._regions[start].untyped_storage().resize_(nbytes)

    def discard(self, start: int, nbytes: int) -> None:
        """Frees the memory of a region."""
        if start in self._regions:
            self._regions[start].untyped_storage().resize_(0)
