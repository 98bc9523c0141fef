"""Whole parameters inside `with optimizer.gathered(...):`, and the check that all ranks have changed them equally.

    rank 0   p.mul_(2)     rank 1   p.mul_(2)      the same: each keeps its shard
    rank 0   p.mul_(2)     rank 1                  refused by name: the shards would be of two parameters
    rank 0   p.mul_(2)     rank 1                  from_rank=0: sent to all before each keeps its shard

At the end of a block without `from_rank` the ranks compare checksums: of the whole parameter if torch has counted a
write to it, else of a sample of its elements, as torch does not count writes through `p.data`.

A writable block inside another one begins with the outer block's values, which the ranks compare, or send, first.

Who runs what: the thread of the program. Every rank checks the arguments together, gathers, and at the end drains,
makes one all-reduce of flags, and broadcasts values or gathers checksums. A rank whose block ends by an exception makes
the same calls, so no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from collectives import Communicator

from ...errors import ConfigurationError, TrainingError
from ...job.agreement import check_everywhere
from ...replicas.broadcast import broadcast_states
from ...replicas.checksums import checksum, sample
from ..slices import Slice
from .strategy import ParameterStrategy


class GatheredBlocks:
    """The `gathered` blocks of one optimizer, nested or not.

    slices: as they are by then.
    refuse_moved: raises for a parameter of this rank that is no longer where the engine has laid it.
    """

    def __init__(
        self,
        comm: Communicator,
        model: torch.nn.Module,
        parameters: ParameterStrategy,
        slices: Mapping[torch.nn.Parameter, Slice],
        refuse_moved: Callable[[], None],
    ) -> None:
        self._comm, self._model, self._parameters, self._slices = comm, model, parameters, slices
        self._refuse_moved = refuse_moved
        self._open: list[_Changes] = []

    @property
    def is_open(self) -> bool:
        """True inside a writable block."""
        return bool(self._open)

    def block(
        self, module: torch.nn.Module | None, writable: bool, from_rank: int | None
    ) -> AbstractContextManager[None]:
        """Context in which the parameters of `module`, or all, are whole; then masters follow changes. Collective.

        Wrong arguments and moved parameters are refused at once; the block raises what `ZeroOptimizer.gathered` says.
        """

        def check() -> None:
            _check(self._model, module, writable, from_rank, self._comm.size)
            self._refuse_moved()

        check_everywhere(self._comm, check)
        chosen = None if module is None else list(module.parameters())
        return self._writable(chosen, from_rank) if writable else self._readable(chosen)

    @contextmanager
    def _readable(self, chosen: Sequence[torch.nn.Parameter] | None) -> Iterator[None]:
        with torch.no_grad(), self._parameters.gathered(chosen, writable=False):
            try:
                yield
            finally:  # others may be in it, also when an exception ends this rank's block
                self._parameters.drain()

    @contextmanager
    def _writable(self, chosen: Sequence[torch.nn.Parameter] | None, from_rank: int | None) -> Iterator[None]:
        problem = None
        with torch.no_grad():
            for outer in self._open:
                _refuse(self._agree(outer))
            try:
                with self._parameters.gathered(chosen):
                    of = list(self._model.parameters()) if chosen is None else chosen
                    changes = _Changes([_HeldParameter(p, p.data, p._version) for p in of], from_rank)
                    depth = len(self._open)
                    try:
                        self._open.append(changes)
                        yield
                    finally:
                        del self._open[depth:]
                        self._parameters.drain()
                        problem = self._agree(changes)
            finally:  # also when an exception ends it, as the parameters keep what was changed until then
                for part in self._slices.values():
                    part.update_master_from_param()
        _refuse(problem)

    def _agree(self, changes: _Changes) -> str | None:
        """Makes the parameters equal on all ranks, or compares them. Collective.

        Returns the problem, the same text on every rank, or None.
        """
        comm, held = self._comm, changes.held
        written = [h.parameter._version != h.version for h in held]
        flags = np.array([[not h.put_back() for h in held], written], np.uint8)
        comm.all_reduce(flags, "max")
        misfits, full = flags.astype(bool)
        if misfits.any():
            return f"{_names(self._model, held, misfits)}: replaced inside gathered by what has another shape or dtype"
        if changes.from_rank is not None:
            for h, here, anywhere in zip(held, written, full, strict=True):
                broadcast_states(comm, [h.memory], changes.from_rank)
                if anywhere and not here:  # backward through what was computed before is an error on this rank, too
                    with torch._C.DisableTorchFunctionSubclass():
                        torch.autograd.graph.increment_version(h.parameter)
            return None
        mine = np.array([h.checksum(whole) for h, whole in zip(held, full, strict=True)], np.int64)
        everyone = np.empty((comm.size, mine.size), np.int64)
        comm.all_gather(everyone, mine)
        differs = (everyone != everyone[0]).any(0)
        if not differs.any():
            return None
        return (
            f"{_names(self._model, held, differs)}: changed inside gathered, but not equally on all ranks, each of "
            "which has kept its shard; make the same change on every rank, or give from_rank=0 for that of rank 0; "
            "optimizer.load_model_state_dict(...) sets the weights right"
        )


def _check(
    model: torch.nn.Module, module: torch.nn.Module | None, writable: bool, from_rank: int | None, ranks: int
) -> None:
    if module is not None and not isinstance(module, torch.nn.Module):
        given = "a parameter" if torch.is_tensor(module) else type(module).__name__
        raise ConfigurationError(f"gathered: got {given}; needs a module of the model")
    if module is not None and not set(model.parameters()).issuperset(module.parameters()):
        raise ConfigurationError(f"gathered: the {type(module).__name__} has parameters that are not the model's")
    if from_rank is None:
        return
    if isinstance(from_rank, bool) or not isinstance(from_rank, int) or not 0 <= from_rank < ranks:
        raise ConfigurationError(f"from_rank: got {from_rank!r}; needs a rank below {ranks}, or None")
    if not writable:
        raise ConfigurationError("from_rank: is for changes, and writable=False allows none")


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise TrainingError(problem)


@dataclass(frozen=True, eq=False)
class _HeldParameter:
    """A parameter as the block began: its memory, and how often torch had counted a write."""

    parameter: torch.nn.Parameter
    memory: torch.Tensor
    version: int

    def put_back(self) -> bool:
        """Copies what was put in the place of the memory, as `p.data = x` does, into it; False if it does not fit."""
        given, memory = self.parameter.data, self.memory
        self.parameter.data = memory
        if given.shape != memory.shape or given.dtype != memory.dtype:
            return False
        if given.data_ptr() != memory.data_ptr() or given.stride() != memory.stride():
            memory.copy_(given.clone())
        return True

    def checksum(self, full: bool) -> int:
        """A checksum of all elements, or of some."""
        values = self.memory.reshape(-1)
        if not full:
            values = sample(values)
        return int.from_bytes(checksum(values), "little", signed=True)


@dataclass(frozen=True, eq=False)
class _Changes:
    """The parameters that a block may change. from_rank: whose changes count; None: all must make the same."""

    held: list[_HeldParameter]
    from_rank: int | None


def _names(model: torch.nn.Module, held: Sequence[_HeldParameter], chosen: np.ndarray) -> str:
    names = {p: name for name, p in model.named_parameters()}
    return ", ".join([names[h.parameter] for h, wrong in zip(held, chosen, strict=True) if wrong][:5])
