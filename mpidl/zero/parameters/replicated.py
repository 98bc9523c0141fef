"""Stages 1 and 2: every rank holds all parameters; each updates its shard, and an all-gather sends it to all.

    step         | update own shards |
    gathers                          | bucket 0 | bucket 1 | bucket 2 |      in the order of the next forward pass
    next forward                     |          | block 0  | block 1  | ...

The step does not wait for the gathers. An operator that reads a parameter waits for the parameter's bucket first
(`read_hook`), so no module needs a hook, and no use comes too early. Compiled code calls nothing back: models with
compiled modules wait in the step.

The gathers run on a Communicator that serves nothing else, one after the other, in the order in which every rank starts
them in its step. A wait needs nothing of the other ranks but that they have made the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from collectives import Communicator, Work
from collectives.devices import Place

from ...compiling import uncompiled
from ...gradients.buckets import assign, layout_of
from ...job import communicator_pool
from ..parameter_shard import ParameterShard
from ..traffic import ZeroTraffic
from .read_hook import Watched, unwatch, watch
from .strategy import NamesOf, ParameterStrategy


class ReplicatedParameters(ParameterStrategy):
    """Moves buckets of parameters into one flat buffer each, of which a shard is this rank's to update.

    model: its parameters that train are moved.
    comm: the ranks that have shards.
    place: where the parameters lie.
    bucket_bytes: size of a bucket; gradients have the same buckets, so that a shard of one is the shard of the other.
    block: elements that no shard's edge may separate.
    """

    write_effect: ClassVar = "the next step makes the parameter anew of its master, which was not changed"
    keeps_equal_writes: ClassVar = True

    def __init__(
        self, model: torch.nn.Module, comm: Communicator, place: Place, bucket_bytes: float, block: int = 1
    ) -> None:
        pooled = communicator_pool.take(comm)  # as the next forward pass may communicate meanwhile
        weakref.finalize(self, pooled.give_back).atexit = False
        self._model, self._comm, self._place = model, pooled.comm, place
        self._in_flight: list[_GatherInFlight] = []
        self._handle = model.register_forward_pre_hook(_before_forward, prepend=True)
        self._traffic = ZeroTraffic()
        self._bucket_bytes, self._block = bucket_bytes, block
        self._whole: list[torch.Tensor] = []
        self.shards: list[ParameterShard] = []
        self._move([p for p in model.parameters() if p.requires_grad])

    @property
    def traffic(self) -> ZeroTraffic:
        """Counts of the gathers so far."""
        return self._traffic

    def unfreeze(self, parameters: Sequence[torch.nn.Parameter], names_of: NamesOf) -> list[ParameterShard]:
        """Moves parameters that were frozen into buckets of their own; returns their shards."""
        added = set(parameters)
        return self._move([p for p in self._model.parameters() if p in added])

    def _move(self, parameters: Sequence[torch.nn.Parameter]) -> list[ParameterShard]:
        first = len(self.shards)
        for group in assign(reversed(parameters), self._bucket_bytes):
            layout = layout_of(group, self._comm.size, self._block)
            flat = self._comm.empty(layout.padded, group[0].dtype, device=self._place.device)
            flat.index_fill_(0, layout.padding.to(flat.device), 0)
            for p, view in zip(group, layout.views(flat, [p.shape for p in group]), strict=True):
                view.copy_(p.detach())
                p.data = view
            self._whole.append(flat)
            self.shards.append(ParameterShard(list(group), layout, layout.shard(flat, self._comm.rank)))
        return self.shards[first:]

    def start(self) -> None:
        """Returns when the parameters have their first values."""
        self.wait_for_gathers()

    def release(self, *, inside_gathered: bool = False) -> None:
        """Returns when all parameters have arrived."""
        self.wait_for_gathers()

    def wait_for_gathers(self) -> None:
        """Returns when all parameters have arrived. Local."""
        for gather in self._in_flight:
            gather.wait()
        self._in_flight.clear()

    def publish(self) -> None:
        """Starts an all-gather of each bucket, in place, in the order of the next forward pass. Collective."""
        for flat, shard in zip(reversed(self._whole), reversed(self.shards), strict=True):
            work = self._comm.all_gather(flat, shard.values, async_op=True)
            assert work is not None
            self._in_flight.append(_GatherInFlight(work, shard.parameters, self._place))
            self._traffic.gathers += 1
            self._traffic.gathered_bytes += flat.nbytes
        if any(_is_compiled(module) for module in self._model.modules()):
            self.wait_for_gathers()

    @contextmanager
    def gathered(self, parameters: Iterable[torch.nn.Parameter] | None = None, writable: bool = True) -> Iterator[None]:
        """Waits for the all-gathers in flight; the parameters are whole at any time."""
        self.wait_for_gathers()
        yield

    def remove(self) -> None:
        """Takes the hook off the model."""
        self._handle.remove()

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The flat parameters."""
        return {"parameters": list(self._whole)}


class _GatherInFlight:
    """The all-gather of a bucket. Its parameters keep it until it is complete, also without the engine."""

    def __init__(self, work: Work, parameters: Sequence[torch.nn.Parameter], place: Place) -> None:
        self._work, self._parameters = work, parameters
        self._place, self._stream = place, place.stream()  # on which the step was, and most uses will be
        for p in parameters:
            watch(p, lambda: self._before_read)

    def wait(self) -> None:
        """Returns when the bucket has arrived, and no operator need wait for it any more."""
        self._work.wait()
        self._place.make_wait(self._stream)
        for p in self._parameters:
            unwatch(p)

    def _before_read(self, *_: Any) -> None:
        self.wait()


def _before_forward(model: torch.nn.Module, _: Any) -> None:
    """Waits for all where code is compiled, and in evaluation, where some modules choose kernels by their weights."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        _wait_for_parameters(model)


@uncompiled
def _wait_for_parameters(model: torch.nn.Module) -> None:
    for p in model.parameters():
        if isinstance(p, Watched):
            p.detach()


def _is_compiled(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
