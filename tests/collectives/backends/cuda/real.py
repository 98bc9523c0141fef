"""A real GPU with the methods that the tests use of the stand-in: arrays, values, streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from collectives.backends.cuda import driver
from collectives.process.about import cuda_aware


class RealGpu:
    """CUDA, torch and cupy. rank: among those of this host, which take the GPUs in turn."""

    def __init__(self, rank: int) -> None:
        import cupy

        self._cupy = cupy
        self.index = rank % torch.cuda.device_count()
        torch.cuda.set_device(self.index)
        cupy.cuda.Device(self.index).use()
        self.aware = "yes" if cuda_aware() else "no"
        self.driver = driver.open_device(self.index)
        self.seed: int | None = None

    def current(self) -> AbstractContextManager[Any]:
        return self.driver.current()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.index)

    @property
    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.index)

    @contextlib.contextmanager
    def using(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Inside, it is the current stream of both libraries."""
        with torch.cuda.stream(stream), self._cupy.cuda.ExternalStream(stream.cuda_stream, self.index):
            yield

    def put(self, values: torch.Tensor, kind: str = "array") -> Any:
        made = torch.empty(values.shape, dtype=values.dtype, device=f"cuda:{self.index}")
        made.copy_(values)
        if kind == "tensor" or values.dtype == torch.bfloat16 or not values.numel():
            return made
        return self._cupy.asarray(made)  # the same memory

    def fill(self, array: Any, values: torch.Tensor) -> None:
        if values.numel():
            torch.as_tensor(array, device=f"cuda:{self.index}").copy_(values)

    def assign(self, target: Any, source: Any) -> None:
        """Queues target = source on the current stream."""
        place = f"cuda:{self.index}"
        torch.as_tensor(target, device=place).copy_(torch.as_tensor(source, device=place))

    def get(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=f"cuda:{self.index}").cpu()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)
