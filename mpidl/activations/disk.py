"""Checkpoints in a file: written behind the forward pass, read ahead of the backward pass.

    forward     checkpoint -> one of two buffers -> a thread writes it          waits only if both are being written
    backward    a thread reads the one before  <-  this one is used

One thread (`mpidl-activations`) does all in the order of the calls, so that a slot may be written anew as soon as it
was given back. It runs no collective, and ends with the file.
"""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from ..errors import ConfigurationError, TrainingError
from ..scratch_file import ScratchFile
from .first_fit import Space

_BUFFERS = 2


class ActivationFile:
    """A file in a folder. buffer_bytes: of each of the two buffers, whatever the size of a checkpoint.

    Raises ConfigurationError if a file cannot be made there.
    """

    def __init__(self, folder: Path, buffer_bytes: int) -> None:
        try:
            self._file = ScratchFile(folder, "mpidl-activations-")
        except OSError as error:
            raise ConfigurationError(
                f"offload: got {str(folder)!r}, where no file can be made: {error.strerror}; needs a directory"
            ) from None
        self.folder, self._buffer_bytes = folder, buffer_bytes
        self._space = Space()
        self._given_back: deque[int] = deque()  # by finalizers, which may run at any time
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(None)  # allocated when first needed
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="mpidl-activations")
        self._failure: OSError | None = None

    def put(self, part: torch.Tensor) -> DiskSlot:
        """Writes a contiguous tensor of one dimension, which may change as soon as this returns."""
        self.check()
        data = part.view(torch.uint8)
        while self._given_back:
            self._space.give_back(self._given_back.popleft())
        start = self._space.take(data.numel())
        assert start is not None
        slot = DiskSlot(self, start, part.numel(), part.dtype)  # gives the space back, also after an exception
        for at in range(0, data.numel(), self._buffer_bytes):
            piece = data[at : at + self._buffer_bytes]
            buffer = self._free.get()
            try:
                if buffer is None:
                    buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8)
                buffer[: piece.numel()].copy_(piece)
                self._worker.submit(self._write, buffer, piece.numel(), start + at)
            except BaseException:  # `_write` will not give it back
                self._free.put(buffer)
                raise
        return slot

    def _write(self, buffer: torch.Tensor, nbytes: int, at: int) -> None:
        try:
            self._file.write(buffer[:nbytes], at)
        except OSError as error:
            self._failure = error
        finally:
            self._free.put(buffer)

    def read(self, target: torch.Tensor, at: int) -> Future[None]:
        """Fills a contiguous tensor from a slot of the file, once all that was put before is written."""
        return self._worker.submit(self._file.read, target, at)

    def give_back(self, start: int) -> None:
        """Frees a slot. Reading and writing that are under way come before what is put there next."""
        self._given_back.append(start)

    def check(self) -> None:
        """Raises TrainingError if something could not be written."""
        if self._failure is not None:
            raise self.error(self._failure)

    def error(self, failure: OSError) -> TrainingError:
        """The error for a failure to write or to read."""
        return TrainingError(f"checkpoints of activations in {self.folder}: {failure.strerror or failure}")

    @property
    def used(self) -> int:
        """Bytes of the checkpoints that are held now, in whole cache lines."""
        while self._given_back:
            self._space.give_back(self._given_back.popleft())
        return self._space.used

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._file.nbytes


class DiskSlot:
    """A checkpoint's slot in the file, held as long as this object lives."""

    def __init__(self, file: ActivationFile, start: int, size: int, dtype: torch.dtype) -> None:
        self._file, self._start, self._size, self._dtype = file, start, size, dtype
        self._coming: tuple[torch.Tensor, Future[None]] | None = None

    def load_ahead(self) -> None:
        """Begins to read it, unless that has begun."""
        if self._coming is None:
            target = torch.empty(self._size, dtype=self._dtype)
            self._coming = (target, self._file.read(target, self._start))

    def fetch(self) -> torch.Tensor:
        """A copy of its own, [elements]. Raises TrainingError if it could not be written or read."""
        self.load_ahead()
        assert self._coming is not None
        (target, reading), self._coming = self._coming, None
        try:
            reading.result()
        except OSError as failure:
            self._file.check()
            raise self._file.error(failure) from None
        self._file.check()
        return target

    fetches_copies = True

    def __del__(self) -> None:
        self._file.give_back(self._start)
