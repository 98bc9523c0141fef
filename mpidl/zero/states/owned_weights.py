"""This rank's slices of the trained weights, for EMA, which keeps averages of them.

    averages   [ rank 0's slices ] [ rank 1's slices ]      of the shapes of `values`, in memory of their own
    values     [ rank 0's slices ] [ rank 1's slices ]      fp32 masters where there are any
    replaced   values kept aside, averages written over them and shown to every rank; at the end put back

`replaced` waits for all ranks when its block begins and when it ends, as weights may lie in memory that a node shares.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from collectives import Communicator

from ...errors import TrainingError
from ...job.agreement import check_everywhere, refuse_everywhere
from ...job.objects import all_gather_object, broadcast_object
from ..parameters.strategy import ParameterStrategy
from ..parameters.weight_guard import WeightGuard
from ..shard_group import ShardGroup
from ..slices import Slice
from .owned_state import OwnedState

Tensors = dict[str, torch.Tensor]


class OwnedWeights:
    """Weights by the plain model's names.

    owned: the same rank's state.
    names: of the parameters in `slices`.
    with_tp: as in Parts.
    """

    def __init__(
        self,
        over: ShardGroup,
        parameters: ParameterStrategy,
        slices: Mapping[torch.nn.Parameter, Slice],
        names: Mapping[torch.nn.Parameter, str],
        owned: OwnedState,
        guard: WeightGuard,
        with_tp: Communicator,
    ) -> None:
        self._over, self._parameters, self._owned, self._guard = over, parameters, owned, guard
        self._with_tp = with_tp
        self._by_name = {names[p]: (p, part) for p, part in slices.items()}

    @property
    def comm(self) -> Communicator:
        """All ranks."""
        return self._over.world

    @property
    def is_root(self) -> bool:
        """True on the rank that gives whole tensors, and gets them."""
        return self._over.is_root

    @property
    def delays(self) -> bool:
        """True if a thread may be writing them."""
        return self._owned.delays

    def values(self) -> Tensors:
        """This rank's slices, to read, as the last step has left them. Not collective.

        Raises TrainingError where each rank has weights of its own (`optim.ZeroOneAdam`).
        """
        self._owned.refuse_local_weights()
        # A library's all-gather may use the shard's memory as scratch space while it runs.
        self._parameters.wait_for_gathers()
        return {name: part.values.detach() for name, (_, part) in self._by_name.items()}

    def forget(self) -> None:
        """Drops from this process's memory the pages of what was read or written of the storage, which keeps it."""
        self._owned.forget()

    @contextmanager
    def replaced(self, averages: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Replaces the weights of all ranks inside the block; each rank gives its slices. Collective.

        Raises TrainingError on every rank inside a writable `gathered`, and for weights that were changed otherwise
        than by a step, `gathered` or loading, before the block or in it; they are as they were then.
        """
        refuse_everywhere(self._with_tp, self._guard.block_problem("averaged") or self._guard.weight_problem())
        kept = check_everywhere(self._with_tp, lambda: self._copies(averages))
        try:
            with self._owned.written(), torch.no_grad():
                for name, values in self.values().items():
                    if name in kept:
                        values.copy_(averages[name])
                        self.forget()
            self._guard.replaced = True
            yield
        finally:
            self._guard.replaced = False
            self._parameters.drain()
            problems = all_gather_object(self._with_tp, self._guard.weight_problem())
            with self._owned.written(), torch.no_grad():
                now = self.values()
                for name, before in kept.items():
                    now[name].copy_(before)
                    self.forget()
        rank, problem = next(((rank, text) for rank, text in enumerate(problems) if text is not None), (0, None))
        if problem is not None:
            raise TrainingError(f"inside `with ema.averaged():` on rank {rank}, a change that was undone: {problem}")

    def _copies(self, names: Container[str]) -> Tensors:
        """Copies this rank's slices of the weights of these names."""
        copies: Tensors = {}
        for name, values in self.values().items():
            if name in names:
                copies[name] = values.clone()
                self.forget()
        return copies

    def gather(self, averages: Mapping[str, torch.Tensor]) -> Tensors:
        """Whole tensors of all ranks' slices, in the host's memory of rank 0; {} on the others. Collective."""
        found = {}
        for name, own in averages.items():
            p, part = self._by_name[name]
            whole = torch.empty(p.numel(), dtype=own.dtype, device=own.device) if self.is_root else None
            self._over.gather(whole, own, part.counts(p, self._over.size))
            if whole is not None:
                found[name] = whole.view(p.shape).cpu()
        return found

    def from_root(self, value: Any) -> Any:
        """Broadcasts rank 0's value. Collective."""
        return broadcast_object(self.comm, value)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole tensors, by name."""
        return {name: tuple(p.shape) for name, (p, _) in self._by_name.items()}

    def scatter(self, given: Mapping[str, torch.Tensor], names: Iterable[str]) -> Tensors:
        """This rank's slices of whole tensors of these names that rank 0 gives. Collective."""
        found = {}
        for name in names:
            p, part = self._by_name[name]
            own = torch.empty_like(part.values, requires_grad=False)
            whole = given[name].detach().to(own.device, own.dtype).contiguous() if self.is_root else None
            self._over.scatter(own, whole, part.counts(p, self._over.size))
            found[name] = own
        return found
