"""The interface of a compressor: it reduces a section of gradients over some ranks, with fewer bytes than it has.

    values      one rank's section, fp32: its gradients, plus what earlier steps have not sent
    result      the mean of the section, the same bits on every rank that needs it
    remainder   values minus what the mean has of this rank; error feedback adds it to the next step's gradients

For every section, up to rounding in fp32:

    sum over the ranks of values  =  contributions * result  +  sum over the ranks of remainders

A compressor is one of two kinds. `OwnedCompressor` defines `compress` and `decompress` of flat values: each rank sends
every other rank the message of that one's piece, the owner adds up what it gets, and where all ranks need the mean it
sends the compressed mean back. `Compressor` alone is for methods whose messages add up, such as factors of matrices.

`reduce` is a generator that runs in the thread of the backward pass. It yields once for each phase of its `Exchange`:
the operations that it has started there, or none. `pipeline` continues it when they are complete. Each phase has a
Communicator of its own, on which operations are in the order of the buckets on every rank; so ranks may continue the
sections of several buckets at different moments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from collectives import Communicator, Work

from .pool import ArrayPool

Steps = Generator[list[Work], None, None]
WAITING = "waiting "  # before the name of a state that was loaded, and that no section has taken over


@dataclass(frozen=True)
class Exchange:
    """The ranks that reduce a section together. phases: a Communicator of them for each phase, in the order of use."""

    phases: Sequence[Communicator]

    @property
    def rank(self) -> int:
        """This rank's number among the ranks that exchange."""
        return self.phases[0].rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.phases[0].size


@dataclass(frozen=True)
class Matrix:
    """A whole parameter in a section.

    start: of its first element.
    parameter: the key of states that belong to it.
    name: the same on every rank.
    """

    parameter: torch.nn.Parameter
    start: int
    name: str = ""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.parameter.shape

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in a section's values, of its shape."""
        return values[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class Section:
    """Part of a bucket: the elements that all ranks of an exchange reduce together.

    key: tells the section from those of other buckets; the same object in every step.
    values: fp32, 1-D, n elements; the compressor may overwrite them.
    result: fp32, 1-D; n elements, or those of the own piece where `needs_all` is False. May be the memory of `values`
        where `keeps_remainder` is False.
    pieces: (start, stop) of each rank's piece of the n elements.
    parameters: the whole parameters in the section; empty for compressors that do not ask for them (`needs_whole`).
    contributions: gradients that the mean is of; more than the exchange has ranks if values are sums of a node.
    needs_all: every rank needs the whole mean; else each that of its piece.
    keeps_remainder: `values` hold the remainder when the section is reduced.
    step: number of reduced passes before this one.
    repeats: how often a pass has reduced the section again, as gradients came after that.
    needed: (start, stop) of the elements whose mean this rank needs, of the result's n; None: all of them. The others
        need not be written.
    arrays: fp32, n elements each, of the compressor's `arrays`, as they stay from step to step; it overwrites them.
    """

    key: Any
    values: torch.Tensor
    result: torch.Tensor
    pieces: Sequence[tuple[int, int]]
    parameters: Sequence[Matrix]
    contributions: int
    needs_all: bool
    keeps_remainder: bool
    step: int
    needed: tuple[int, int] | None = None
    arrays: Sequence[torch.Tensor] = ()
    repeats: int = 0

    @property
    def needed_elements(self) -> tuple[int, int]:
        """(start, stop) of the elements of the result that must be written."""
        return self.needed or (0, self.result.numel())


class Compressor(ABC):
    """Reduces sections of gradients over an exchange.

    phases: how many it has.
    needs_whole: its sections consist of whole parameters; else they may be cut anywhere.
    feeds_back: its remainders are fed back by default.
    elementwise: each value is rounded by itself, so that equal gradients have equal means, whatever else is there.
    start_step: reduced passes in full precision that come first, by default.
    bucket_cap_mb: size of DistributedDataParallel's buckets by default, in MiB. Where backward is over, the last bucket
        goes through all phases alone, so small ones take less time.
    arrays: names of what it keeps of a section in addition to the remainder: fp32, an element for each of the
        section's, in the gradients' unit, so that it adds up over the ranks as remainders do. It begins at zero, and
        moves, is saved and undone with the remainder. It needs error feedback, and compression in every step, on one
        rank too.
    momentum: of gradients, which it applies in place of the optimizer.
    homogeneous: of gradients times a loss scale it makes what it makes of the gradients, times the scale.
    """

    phases = 1
    start_step = 0
    bucket_cap_mb = 4.0
    needs_whole = False
    feeds_back = True
    elementwise = False
    arrays: tuple[str, ...] = ()
    momentum = 0.0
    homogeneous = True

    @property
    @abstractmethod
    def name(self) -> str:
        """The name by which `compress=` makes one like it, with its settings: "int8", "powersgd:4"."""

    def absorb(
        self, summed: torch.Tensor, arrays: Sequence[torch.Tensor], begins_step: bool, contributions: int, ranks: int
    ) -> torch.Tensor:
        """Makes of a pass's gradients what is added to the remainder: the gradients themselves for most methods.

        summed: 1-D, a section's gradients of this rank, or summed over its node; not changed.
        arrays: fp32, one for each of `arrays`, which it updates; it may return one.
        begins_step: the pass is the first one since the optimizer stepped; those that follow it add up with it.
        contributions, ranks: as of the section, and of its exchange.
        """
        return summed

    @cached_property
    def pool(self) -> ArrayPool:
        """Memory for what its sections send and receive."""
        return ArrayPool()

    @abstractmethod
    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Reduces a section: `result` becomes the mean, `values` the remainder. Yields once for each phase."""

    @abstractmethod
    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """Bytes that a rank sends to reduce a section, without headers of messages.

        elements: of the section.
        ranks: of the exchange.
        shapes: of the whole parameters in it.
        """

    def state(self) -> Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]]:
        """Its states by parameter, equal on all ranks that have them; for checkpoints, and to undo a skipped step.

        Not collective: of a parameter in another local rank's section a rank may have none.
        """
        return {}

    def load(self, state: Mapping[torch.nn.Parameter, Mapping[str, torch.Tensor]]) -> None:
        """Takes over states, which `state` gave, in place of all it has; those of other parameters begin anew."""
        assert not state

    def wait_for_sections(self) -> None:
        """Keeps states that were loaded until sections take them over, or until `end_waiting`."""
        return

    def end_waiting(self) -> None:
        """Drops the states that wait."""
        return

    def lost_states(self, sections: Iterable[tuple[torch.nn.Parameter, int]]) -> tuple[int, int]:
        """Returns for how many parameters states were loaded, and for how many of these no section fits.

        sections: the first parameter of each and its elements, also those of other ranks that share buckets.
        """
        return 0, 0

    def forget(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Drops the states of parameters that another rank reduces, but for those that wait."""
        return

    def rescale(self, factor: float) -> None:
        """Multiplies states that are in the gradients' unit, as the loss scale has changed by this factor."""
        return  # most have none

    def __repr__(self) -> str:
        return self.name

    def state_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """Bytes of its states for these parameters on a rank, without remainders."""
        return 0


class OwnedCompressor(Compressor):
    """A compressor of flat values, whose messages only their owner can add up.

    block: of methods for parameters (`settings.OF_PARAMETERS`): values, counted from the first of a message, that are
        rounded by each other alone.
    may_overflow: its messages have a smaller range than fp32. A node then sends the mean of its ranks, not their sum.
    """

    phases = 2
    block = 1
    may_overflow = False

    @abstractmethod
    def message_bytes(self, elements: int) -> int:
        """Bytes of the message of that many values, a multiple of 8."""

    @abstractmethod
    def compress(
        self, values: torch.Tensor, message: torch.Tensor, remainder: torch.Tensor | None, divisor: float = 1
    ) -> None:
        """Writes the message of values / divisor. values: fp32, 1-D.

        message: uint8, `message_bytes` elements, begins at a multiple of 8 bytes.
        remainder: becomes values - divisor * decompressed message; may be `values` itself. Zero where that is not
            finite.
        """

    @abstractmethod
    def decompress(self, message: torch.Tensor, out: torch.Tensor, add: bool = False) -> None:
        """Writes the values of a message to `out` (fp32, 1-D), or adds them."""

    def sent_bytes(self, elements: int, ranks: int, needs_all: bool, shapes: Sequence[torch.Size] = ()) -> float:
        """Counts what a rank sends: the others' pieces; with needs_all also the mean of its own to each of them."""
        once = (ranks - 1) * self.message_bytes(-(-elements // ranks))
        return once * 2 if needs_all else once

    def reduce(self, section: Section, exchange: Exchange) -> Steps:
        """Sends each owner its piece's message; with `needs_all` sends the compressed mean back."""
        me, values, keeps = exchange.rank, section.values, section.keeps_remainder
        divisor = section.contributions / exchange.size if self.may_overflow else 1
        sizes = [self.message_bytes(stop - start) for start, stop in section.pieces]
        start, stop = section.pieces[me]
        own = values[start:stop]
        leaving = [0 if rank == me else size for rank, size in enumerate(sizes)]
        arriving = [0 if rank == me else sizes[me] for rank in range(exchange.size)]
        sent, received = (self.pool.take(sum(each), torch.uint8, values.device) for each in (leaving, arriving))
        for (first, last), message in zip(section.pieces, sent.split(leaving), strict=True):
            if message.numel():
                self.compress(values[first:last], message, values[first:last] if keeps else None, divisor)
        yield started(exchange.phases[0].all_to_all(received, sent, arriving, leaving, async_op=True))
        if divisor != 1:
            own.div_(divisor)
        for message in received.split(sizes[me]) if received.numel() else ():
            self.decompress(message, own, add=True)
        if divisor != 1:
            own.mul_(divisor)
        self.pool.give_back(sent, received)
        if not section.needs_all:
            torch.div(own, section.contributions, out=section.result)
            if keeps:
                own.zero_()
            yield []
            return
        messages = self.pool.take(sum(sizes), torch.uint8, values.device)
        each = messages.split(sizes)
        # Every rank computes with the decompressed mean, the owner too, so that all have the same bits.
        self.compress(own, each[me], own if keeps else None, section.contributions)
        yield started(exchange.phases[1].all_gather(messages, each[me], counts=sizes, async_op=True))
        for (first, last), message in zip(section.pieces, each, strict=True):
            self.decompress(message, section.result[first:last])
        self.pool.give_back(messages)


def started(work: Work | None) -> list[Work]:
    """Returns an operation, called with async_op, as `reduce` yields it."""
    assert work is not None
    return [work]


def rounded_up(size: int, multiple: int = 8) -> int:
    """The least multiple that is not smaller."""
    return -(-size // multiple) * multiple
