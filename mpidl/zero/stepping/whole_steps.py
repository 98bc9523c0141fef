"""Steps on whole parameters, each on one rank that owns it, for optimizers such as Muon and Adafactor.

    slices of gradients and values    rank 0 [ w0 | v0 ]    rank 1 [ w1 | v1 ]
    all-to-all                        rank 0 [ w0   w1 ]    rank 1 [ v0   v1 ]      its owner has a parameter whole
    a step of the inner optimizer     rank 0   w            rank 1   v
    all-to-all back                   rank 0 [ w0 | v0 ]    rank 1 [ w1 | v1 ]

Where parameters are cut over tp as well, all ranks of dp x tp take part, and the owner joins the parts of tp too
(`parameter_distribution`): so the work on whole parameters is dealt over these ranks, and none is done twice.

The step takes a few parameters of every owner at a time, so that no rank holds many whole parameters. With a class
whose needs were found by trial steps (`optimizer_trial`) it takes all at once, as such a class may count its steps, or
change parameters that have no gradient.

The owner keeps the optimizer's state. For saving and loading it is cut like the parameters, as other optimizers' states
are, and state of other shapes is copied to every rank; the next step moves it back to the owner.

Who runs what: the thread of the step. For the batches, in an order that is equal on every rank: an all-to-all of
values, one of gradients, the owners' steps, an agreement that all succeeded, an all-to-all back. The ranks have agreed
before which parameters have gradients (`methods.step`), so all make the same collectives, and none waits for an owner
that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ...gradients.buckets import MIB
from ...job.agreement import check_everywhere
from ...job.objects import all_gather_object
from ...mesh import Mesh, placement
from ...optim.elementwise_state import is_slice, mark_replicated, state_tensors
from ..placeholder import placeholder
from ..shard_group import ShardGroup
from ..slices import ShardedStateSpec, Slice
from .inner import InnerOptimizer, masters
from .optimizer_class import frozen
from .parameter_distribution import Distribution, distributions, ranks_with_slices

BATCH_BYTES = 32 * MIB  # of values that an owner has whole at a time, if no parameter is larger


@dataclass(eq=False)
class _Owned:
    """A parameter.

    part: this rank's slice of it.
    held: all ranks'.
    owner: the rank that steps on it.
    whole: what the inner optimizer steps on, on the owner; between steps without memory.
    """

    part: Slice
    held: Distribution
    owner: int
    whole: torch.nn.Parameter


@dataclass(frozen=True)
class _ReplicatedState:
    """A state without the parameter's shape, in the host's memory.

    with_parameter: its tensors were on the parameter's device.
    """

    value: Any
    with_parameter: bool


class WholeSteps(InnerOptimizer):
    """Steps on the slices' values by an inner optimizer of whole parameters. Call `add_param_groups` next.

    With tp the constructor is collective over dp x cp x tp.

    over: the ranks over which parameters are cut.
    mesh: over whose tp they may be cut, too.
    make: an inner optimizer of parameter groups.
    slices: of all parameters, also of those that are added later.
    together: steps on all that a rank owns in one call.
    param_groups: settings, and slices' values.
    state: by slices' values, cut like them; filled by `cut_state` until the next step, else empty.
    """

    needs_wholes: ClassVar = True

    def __init__(
        self,
        over: ShardGroup,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        slices: Mapping[torch.nn.Parameter, Slice],
        together: bool,
        mesh: Mesh | None = None,
    ) -> None:
        self._comm, self._make, self._slices, self._together = ranks_with_slices(over, mesh), make, slices, together
        self._over = over
        self._tp = mesh.rank("tp") if mesh is not None and mesh.size("tp") > 1 else None
        self._loads = [0] * self._comm.size  # elements that each rank owns
        self._owned: dict[torch.Tensor, _Owned] = {}
        self._batches: list[list[_Owned]] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._is_cut = False
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    def add_param_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Adds groups of slices' values, the same on every rank, to step on from now on. Collective."""
        parts = {part.values: (p, part) for p, part in self._slices.items()}
        added = [parts[values] for values in dict.fromkeys(values for group in groups for values in group["params"])]
        size, rank = self._over.size, self._over.rank
        found = distributions(
            self._comm, self._tp, [(p.shape, part.counts(p, size), rank, placement(p)) for p, part in added]
        )
        for (_, part), held in sorted(zip(added, found, strict=True), key=lambda pair: -pair[1].shape.numel()):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += held.shape.numel()
            whole = torch.nn.Parameter(placeholder(held.shape, part.values.dtype, part.values.device))
            self._owned[part.values] = _Owned(part, held, owner, whole)
        made = []
        for group in groups:
            owned = [self._owned[values] for values in group["params"]]
            mine = [each.whole for each in self._mine(owned)]
            # Some take a group to hold something.
            nothing = [torch.nn.Parameter(each.whole.new_empty([0] * each.whole.dim())) for each in owned[:1]]
            made.append({**group, "params": mine or nothing})
            self.param_groups.append(dict(group))
        if self.optimizer is None:
            self.optimizer = self._make(made)
        else:
            for group in made:
                self.optimizer.add_param_group(group)
        self._batches = self._cut_batches()

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Adds one group. Collective."""
        self.add_param_groups([group])

    def _cut_batches(self) -> list[list[_Owned]]:
        """Cuts the parameters of each dtype into batches: of every owner the next ones, up to BATCH_BYTES each.

        A batch is sorted by owner.
        """
        batches: dict[tuple[torch.dtype, int], list[_Owned]] = {}
        last: dict[tuple[torch.dtype, int], tuple[int, int]] = {}  # of an owner: the batch, and its bytes in it
        for values, each in self._owned.items():
            size = each.whole.numel() * values.element_size()
            number, held = last.get((values.dtype, each.owner), (0, 0))
            if held and held + size > BATCH_BYTES:
                number, held = number + 1, 0
            last[values.dtype, each.owner] = number, held + size
            batches.setdefault((values.dtype, number), []).append(each)
        return [sorted(batch, key=lambda each: each.owner) for batch in batches.values()]

    # ---- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        """Steps on the slices' values by their gradients, which are None on all ranks or on none. Collective."""
        assert self.optimizer is not None
        self._take_back_state()
        for batches in [self._batches] if self._together else [[batch] for batch in self._batches]:
            for group, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
                inner.update(frozen(group))
            self._step_on(batches)
        if self._together:
            self._take_notes()

    def _step_on(self, batches: Sequence[Sequence[_Owned]]) -> None:
        """Calls the inner optimizer once; parameters without a gradient are whole too where it may change them."""
        assert self.optimizer is not None
        lent = [b if self._together else [e for e in b if e.part.values.grad is not None] for b in batches]
        mine = [self._mine(batch) for batch in lent]
        try:
            for batch, own in zip(lent, mine, strict=True):
                values = self._to_owners(batch, [each.part.values.detach() for each in batch])
                for each, whole in zip(own, values, strict=True):
                    each.whole.data = whole.view(each.whole.shape)
                reached = [each for each in batch if each.part.values.grad is not None]
                gradients = self._to_owners(reached, [each.part.values.grad for each in reached])
                for each, whole in zip(self._mine(reached), gradients, strict=True):
                    each.whole.grad = whole.view(each.whole.shape)
            check_everywhere(self._comm, self.optimizer.step)  # or others would wait for what a rank never sends
            for batch, own in zip(lent, mine, strict=True):
                self._from_owners(batch, [each.whole.detach().reshape(-1) for each in own])
        finally:
            for each in (each for own in mine for each in own):
                each.whole.grad = None
                each.whole.data = placeholder(each.whole.shape, each.whole.dtype, each.whole.device)

    def _take_notes(self) -> None:
        """Takes over what the optimizer has changed in its groups; of several ranks the first one's."""
        assert self.optimizer is not None
        pairs = zip(self.param_groups, self.optimizer.param_groups, strict=True)
        mine = [
            {k: v for k, v in frozen(inner).items() if k not in group or not _same(group[k], v)}
            for group, inner in pairs
        ]
        for notes in reversed(all_gather_object(self._comm, mine)):
            for group, noted in zip(self.param_groups, notes, strict=True):
                group.update(noted)

    def _to_owners(self, batch: Sequence[_Owned], slices: Sequence[Any]) -> list[torch.Tensor]:
        """Sends slices to the owners; returns this rank's whole tensors, flat, in the batch's order."""
        if not batch:  # on all ranks
            return []
        rank = self._comm.rank
        leaving, arriving = self._splits(batch, [each.held.source_counts for each in batch])
        sent = torch.cat([piece[: each.held.source_counts[rank]] for each, piece in zip(batch, slices, strict=True)])
        received = sent.new_empty(sum(arriving))
        self._comm.all_to_all(received, sent, arriving, leaving)
        mine = self._mine(batch)
        pieces = self._pieces([each.held.source_counts for each in mine], received, arriving)
        return [each.held.join(some) for each, some in zip(mine, pieces, strict=True)]

    def _from_owners(self, batch: Sequence[_Owned], wholes: Sequence[torch.Tensor]) -> None:
        """Sends the owners' whole tensors back into the slices' values."""
        if not batch:
            return
        arriving, leaving = self._splits(batch, [each.held.counts for each in batch])
        mine = self._mine(batch)
        values = batch[0].part.values.detach()
        sent = values.new_empty(sum(leaving))
        places = self._pieces([each.held.counts for each in mine], sent, leaving)
        for each, whole, pieces in zip(mine, wholes, places, strict=True):
            for piece, part in zip(pieces, each.held.split(whole), strict=True):
                piece.copy_(part)
        received = values.new_empty(sum(arriving))
        self._comm.all_to_all(received, sent, arriving, leaving)
        sizes = [each.held.counts[self._comm.rank] for each in batch]
        for each, part in zip(batch, received.split(sizes), strict=True):
            each.part.values.detach().copy_(part)

    def _mine(self, batch: Sequence[_Owned]) -> list[_Owned]:
        """Returns the parameters that this rank owns."""
        return [each for each in batch if each.owner == self._comm.rank]

    def _splits(self, batch: Sequence[_Owned], counts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """Elements of slices of this rank's by owner, and of what it owns by the rank that has the slices.

        counts: of each parameter's elements that are exchanged, by rank.
        """
        ranks, rank = range(self._comm.size), self._comm.rank
        pairs = [*zip(batch, counts, strict=True)]
        of_owner = [sum(count[rank] for each, count in pairs if each.owner == owner) for owner in ranks]
        of_slices = [sum(count[other] for each, count in pairs if each.owner == rank) for other in ranks]
        return of_owner, of_slices

    @staticmethod
    def _pieces(counts: Sequence[Sequence[int]], flat: torch.Tensor, sizes: Sequence[int]) -> list[list[torch.Tensor]]:
        """Every rank's slice of each parameter that this rank owns, as views of the buffer that is exchanged.

        counts: of the parameter's elements, by rank.
        """
        by_rank = [
            part.split([count[rank] for count in counts]) if counts else ()
            for rank, part in enumerate(flat.split(list(sizes)))
        ]
        return [[parts[number] for parts in by_rank] for number in range(len(counts))]

    # ---- its state --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def cut_state(self) -> None:
        """Cuts the state like the parameters, into `state`: what is not of their shape is whole on every rank.

        Collective.
        """
        if self._is_cut:
            return
        assert self.optimizer is not None
        found = [(n, each, self.optimizer.state.get(each.whole)) for n, each in enumerate(self._owned.values())]
        held = {number: (each, entry) for number, each, entry in found if entry}
        outlines = {number: _outline(each, entry) for number, (each, entry) in held.items()}
        known = {n: outline for rank in all_gather_object(self._comm, outlines) for n, outline in rank.items()}
        for number, (values, each) in enumerate(self._owned.items()):
            own = held[number][1] if number in held else {}
            for key, spec in known.get(number, {}).items():
                entry = self.state.setdefault(values, {})
                if isinstance(spec, ShardedStateSpec):
                    entry[key] = self._scatter(each, own.get(key), spec.dtype)
                else:
                    move = partial(torch.Tensor.to, device=values.device if spec.with_parameter else "cpu")
                    entry[key] = mark_replicated(tree_map_only(torch.Tensor, move, spec.value))
            self.optimizer.state.pop(each.whole, None)
        self._is_cut = True

    @torch.no_grad()
    def _take_back_state(self) -> None:
        """Gives the owners the state back, as it was or as it was loaded into `state`."""
        if not self._is_cut:
            return
        assert self.optimizer is not None
        for values, entry in self.state.items():
            each = self._owned[values]
            for key, value in entry.items():
                whole = self._gather(each, value) if is_slice(value, values) else value
                if each.owner == self._comm.rank:
                    self.optimizer.state[each.whole][key] = whole
        self.state.clear()
        self._is_cut = False

    def _scatter(self, each: _Owned, whole: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """This rank's slice of the owner's."""
        own = torch.empty_like(each.part.values, dtype=dtype, requires_grad=False)
        pieces = None if whole is None else each.held.concatenated(whole)
        self._comm.scatter(own, pieces, each.owner, each.held.counts)
        return own

    def _gather(self, each: _Owned, own: torch.Tensor) -> torch.Tensor | None:
        """Gathers all ranks' slices to the whole, on the owner."""
        given, rank = each.held.source_counts, self._comm.rank
        pieces = own.new_empty(sum(given)) if each.owner == rank else None
        self._comm.gather(pieces, own.contiguous()[: given[rank]], each.owner, given)
        return None if pieces is None else each.held.join(pieces.split(given)).view(each.whole.shape)

    @property
    def _own_state(self) -> Mapping[Any, Any]:
        """State of the parameters that this rank owns, whole."""
        return {} if self.optimizer is None else self.optimizer.state

    def foreign_state(self) -> list[Any]:
        """Keys of this rank's state that are no parameter."""
        return [key for key in self._own_state if not torch.is_tensor(key)]

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """State, whole or cut, and masters."""
        entries = [*self.state.values(), *self._own_state.values()]
        return {"optimizer": state_tensors(entries) + masters(self._slices)}


def _same(first: Any, second: Any) -> bool:
    if torch.is_tensor(first) and torch.is_tensor(second):
        return torch.equal(first, second)
    return first is second or (type(first) is type(second) and (first == second) is True)


def _outline(each: _Owned, entry: Mapping[str, Any]) -> dict[str, ShardedStateSpec | _ReplicatedState]:
    """The outline of a parameter's state that every rank is told."""
    outline: dict[str, ShardedStateSpec | _ReplicatedState] = {}
    for key, value in entry.items():
        if torch.is_tensor(value) and value.dim() and value.shape == each.whole.shape:
            outline[key] = ShardedStateSpec(value.dtype)
        else:
            leaves = [leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf)]
            with_parameter = any(leaf.device == each.whole.device for leaf in leaves)
            outline[key] = _ReplicatedState(tree_map_only(torch.Tensor, torch.Tensor.cpu, value), with_parameter)
    return outline
