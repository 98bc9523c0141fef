"""Sets the `.grad` of the parameters that a ZeroOptimizer trains, in step with the reduced gradients.

    zero_grad     backward (autograd gives gradients to the buckets)     the pass has ended       step      zero_grad
    p.grad None   None, or a ShardedGradient to which autograd adds      a ShardedGradient        same      None

With zero_grad(set_to_none=False) the last one is a ShardedGradient of zeros, where there was a gradient.
A parameter gets one at the end of a pass if any rank's passes have reached it, so that all ranks see the same ones.
`p.grad = None` forgets one gradient, as with a plain model.

Norms of all gradients are computed in one all-reduce and kept until they change, so that clipping by torch, which asks
for one after the other, is cheap and right, over tp too. For other numbers made of a whole gradient the ranks compare
what they ask for. Changes through `.grad` are noted, and compared at the step.

Where the step itself averages (OneBitAdam), every rank has whole gradients, of means or of its own. Then `.grad` is the
whole gradient of this rank, as under DDP: numbers are made of it without the other ranks, which may have others.

Who runs what: the thread of the program, in the operator that asks. Every rank must run the same operators in the same
order. Each message carries a code of its question: ranks that ask different questions of one kind raise an error.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from collectives import Communicator

from ...digest import code
from ...errors import TrainingError
from ...gradients.backward import BackwardWatch
from ...gradients.clip import local_norms
from ...mesh import placement
from .reduced_gradients import ReducedGradients
from .sharded_gradient import CHANGED_INSIDE, GradientPlace, ShardedGradient, root_of

_EXACT_BITS = 20  # of numbers whose squares, and sums of these over the ranks, are exact in double precision


class GradAttributes:
    """Puts ShardedGradients into `.grad`, and takes in what the program does to them.

    comm: the ranks over which `gradients` are cut.
    names: of the parameters.
    release: returns when no rank needs another one for a pass that is over; collective.
    tp: ranks over which parameters are cut as well, or None.
    """

    def __init__(
        self,
        gradients: ReducedGradients,
        comm: Communicator,
        watch: BackwardWatch,
        names: Mapping[torch.nn.Parameter, str],
        release: Callable[[], None],
        tp: Communicator | None = None,
    ) -> None:
        self._gradients, self._comm, self._watch = gradients, comm, watch
        self._names, self._release, self._tp = names, release, tp
        self._made: dict[torch.nn.Parameter, ShardedGradient] = {}
        self._shown: dict[torch.nn.Parameter, bool] = {}  # whether all ranks show it, or its passes were under no_sync
        self._norms: dict[float, dict[GradientPlace, float]] = {}
        self._changes: list[tuple[str, list[str]]] = []
        self._pass_is_open = False

    # ---- in step with the passes ------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begins a pass, after it has taken in what the program has set `.grad` to."""
        self.update()
        self._pass_is_open = True

    def show_gradients(self) -> None:
        """Gives every parameter that has a gradient its `.grad`."""
        self._pass_is_open = False
        self._norms.clear()
        agreed = not self._gradients.has_unreduced
        with torch._C.DisableTorchFunctionSubclass():
            for p, place in self._reached():
                if place.arrived is not None:
                    place.arrived = None
                    raise TrainingError(f"{place.name}: {CHANGED_INSIDE}")
                if p.grad is None:
                    p.grad = self._made[p]
                self._shown[p] = agreed or self._shown.get(p, False)

    def _reached(self) -> Iterator[tuple[torch.nn.Parameter, GradientPlace]]:
        for number, bucket in enumerate(self._gradients.buckets):
            flags = zip(self._gradients.reached(number), self._gradients.used(number), strict=True)
            for index, (p, (reached, used)) in enumerate(zip(bucket.parameters, flags, strict=True)):
                if reached or used:
                    if p not in self._made:
                        layout = bucket.layout
                        is_whole = self._gradients.sums_whole
                        piece = layout.whole(index) if is_whole else layout.piece(index, self._comm.rank)
                        place = GradientPlace(self._names[p], number, index, piece, weakref.ref(self), placement(p))
                        self._made[p] = ShardedGradient(place, p.shape, p.dtype, p.device)
                    yield p, self._made[p].place

    def update(self) -> None:
        """Takes in what the program has set `.grad` to: None, or what it has computed of the gradient itself."""
        self._norms.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for p in [p for p in self._shown if p.grad is not self._made[p]]:
                given, own = p.grad, self._made[p]
                if isinstance(given, ShardedGradient) and given.place is own.place:
                    if given.result is not None:
                        self._change(own.place, ".grad = a result").copy_(given.result)
                    p.grad = own
                    continue
                if self._shown.pop(p):
                    self.note(".grad = None", own.place.name)
                self._gradients.forget(own.place.number, own.place.index)

    def clear(self) -> None:
        """Forgets all gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            for p in self._shown:
                p.grad = None
        for made in self._made.values():
            made.place.arrived = None
        self._shown.clear()
        self._norms.clear()
        self._changes.clear()
        self._pass_is_open = False

    def with_gradient(self) -> dict[torch.nn.Parameter, bool]:
        """The parameters that have a gradient on this rank, with whether every rank's `.grad` shows it."""
        found = {}
        with torch._C.DisableTorchFunctionSubclass():
            for number, bucket in enumerate(self._gradients.buckets):
                for p, reached in zip(bucket.parameters, self._gradients.reached(number), strict=True):
                    if p.grad is not None or (reached and p not in self._shown):  # the program may have set None
                        found[p] = self._shown.get(p, False)
        return found

    def show_zeros(self, kept: Mapping[torch.nn.Parameter, bool]) -> None:
        """Gives parameters whose gradients were forgotten zeros as their gradients. kept: as of `with_gradient`.

        What not every rank shows has no `.grad` before the next pass; the step takes it as a zero.
        """
        for number, bucket in enumerate(self._gradients.buckets):
            self._gradients.reached(number)[:] = [p in kept for p in bucket.parameters]
        with torch._C.DisableTorchFunctionSubclass():
            for p, _ in self._reached():
                if kept[p]:
                    p.grad, self._shown[p] = self._made[p], True

    # ---- at the step ------------------------------------------------------------------------------------------------

    def note(self, change: str, name: str | None = None) -> None:
        """Notes a change of gradients, of the parameter `name` or of all, which all ranks must make."""
        if not self._changes or self._changes[-1][0] != change:
            self._changes.append((change, []))
        self._changes[-1][1].extend([] if name is None else [name])

    def take_changes(self) -> str:
        """Returns what was noted since the last call."""
        changes = "; ".join(f"{change} of {', '.join(names)}" if names else change for change, names in self._changes)
        self._changes.clear()
        self._norms.clear()  # a step may change gradients too
        return changes

    def step_problem(self) -> str | None:
        """The reason why no step can be taken on this rank's gradients."""
        cut = next(iter(self._reached()), None) if self._pass_is_open else None
        return None if cut is None else f"{cut[1].name}: {self._of_open_pass()}"

    def foreign_problem(self) -> str | None:
        """The `.grad` that was set otherwise than by a backward pass."""
        self.update()
        with torch._C.DisableTorchFunctionSubclass():
            for p, name in self._names.items():
                if p.requires_grad and p.grad is not None and p.grad is not self._made.get(p):
                    return (
                        f"{name}: its .grad was set otherwise than by a backward pass, and a step takes the reduced "
                        "gradients of those alone; set it to None, or change it in place after the pass"
                    )
        return None

    def _of_open_pass(self) -> str:
        if self._watch.is_running:
            return "its .grad was read inside a backward pass, at whose end the gradients are reduced; read it then"
        return "a backward pass was cut short by an exception, and its gradient is not complete; call zero_grad()"

    # ---- what a ShardedGradient asks for ----------------------------------------------------------------------------

    def read(self, place: GradientPlace) -> torch.Tensor:
        """This rank's part of a gradient, flat."""
        if self._pass_is_open:
            raise TrainingError(f"{place.name}: {self._of_open_pass()}")
        if self._gradients.used(place.number)[place.index]:
            raise TrainingError(
                f"{place.name}: with step_in_backward the backward pass has made the step, and the gradient that this "
                ".grad was is gone; to clip or to look at gradients make the ZeroOptimizer without it"
            )
        if not self._gradients.reached(place.number)[place.index]:
            raise TrainingError(f"{place.name}: the gradient that this .grad was has been forgotten; read .grad anew")
        return self._part(place)

    def _part(self, place: GradientPlace) -> torch.Tensor:
        take = self._gradients.whole if self._gradients.sums_whole else self._gradients.shard
        return place.piece.view_in(take(place.number))

    def shows(self, gradient: ShardedGradient) -> bool:
        """True if the tensor is the one that was put into `.grad`, and not another one that refers to it."""
        bucket = self._gradients.buckets[gradient.place.number]
        return self._made.get(bucket.parameters[gradient.place.index]) is gradient

    def write(self, place: GradientPlace, change: str) -> torch.Tensor:
        """This rank's part of a gradient, to change in place; fp32 if it has 16 bits. change: noted for the step."""
        self.read(place)
        return self._change(place, change)

    def _change(self, place: GradientPlace, change: str) -> torch.Tensor:
        self._norms.clear()
        if not self._gradients.sums_whole:  # else each rank may change its own, as under DDP
            self.note(change, place.name)
        self._gradients.promote_to_fp32()
        return self._part(place)

    def norm(self, place: GradientPlace, order: float) -> float:
        """The norm of a whole gradient. Collective, unless one of this order was asked for since the last change."""
        self.read(place)
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
        return self._norms[order][place]

    def _all_norms(self, order: float) -> dict[GradientPlace, float]:
        self._release()
        places = [place for p, place in self._reached() if p in self._shown]
        norms = local_norms([self._part(place) for place in places], order)
        if self._gradients.sums_whole:
            return dict(zip(places, norms.tolist(), strict=True))
        number = code(f"norms of order {order} of {len(places)} gradients", _EXACT_BITS)
        if math.isinf(order):
            unknown = np.isnan(norms)  # which MPI may lose from a maximum
            agreed = np.concatenate([np.where(unknown, 0, norms), unknown, [number, -number]])
            self._comm.all_reduce(agreed, "max")
            same = agreed[-2] == -agreed[-1]
            found = np.where(agreed[len(norms) : -2] > 0, math.nan, agreed[: len(norms)])
        else:
            with np.errstate(all="ignore"):
                powers = norms**order
            agreed = np.concatenate([powers, [number, number**2]])
            self._comm.all_reduce(agreed, "sum")
            same = agreed[-2] == number * self._comm.size and agreed[-1] == number**2 * self._comm.size
            found = agreed[:-2]
        if not same:
            raise TrainingError(
                f"{places[0].name}: this rank asks for norms of order {order} of {len(places)} gradients, and another "
                "rank for others; every rank must make the same calls"
            )
        found = self._over_tp(places, f"norms of order {order}", found, math.isinf(order))
        return {place: root_of(power, order) for place, power in zip(places, found.tolist(), strict=True)}

    @property
    def norms_are_over_tp(self) -> bool:
        """True if norms are of whole parameters where these are cut over tp."""
        return self._tp is not None

    def _over_tp(self, places: list[GradientPlace], operation: str, powers: np.ndarray, infinite: bool) -> np.ndarray:
        """Powers of norms of whole parameters, from those of the parts that this rank of tp has. Collective over tp.

        powers: changed in place.
        infinite: they are the largest elements.
        """
        cut = [n for n, place in enumerate(places) if "tp" in place.placed.axes]
        if self._tp is None or not cut:
            return powers
        number = code(f"{operation} of {[places[n].name for n in cut]}", _EXACT_BITS)
        own = [powers[n] if places[n].placed.counted else 0.0 for n in cut]
        table = np.empty((self._tp.size, len(cut) + 1))
        self._tp.all_gather(table, np.array([*own, number]))
        if (table[:, -1] != number).any():
            raise TrainingError(
                f"{places[cut[0]].name}: this rank asks for the {operation} of {len(cut)} gradients that are cut over "
                "tp, and another rank of tp for something else; every rank must make the same calls"
            )
        with np.errstate(all="ignore"):
            powers[cut] = table[:, :-1].max(0) if infinite else table[:, :-1].sum(0)
        return powers

    def combine_over_tp(self, place: GradientPlace, operation: str, power: float, infinite: bool) -> float:
        """Combines a norm's power over tp: returns that of the whole parameter's gradient. Collective."""
        return float(self._over_tp([place], operation, np.array([power]), infinite)[0])

    def max_over_tp(self, value: float) -> float:
        """The largest number of the ranks of tp. Collective."""
        largest = np.array([value])
        if self._tp is not None:
            self._tp.all_reduce(largest, "max")
        return float(largest[0])

    def gather_part_values(self, place: GradientPlace, operation: str, value: float) -> torch.Tensor:
        """The value of each part of a gradient: those of `gather_values`, or the given one of a whole gradient."""
        if self._gradients.sums_whole:
            return torch.tensor([value], dtype=torch.float64)
        return self.gather_values(place, operation, value)

    def gather_values(self, place: GradientPlace, operation: str, value: float) -> torch.Tensor:
        """Gathers every rank's value, by rank, in double precision. Collective.

        operation: name of the operation, the same on every rank.
        """
        self._release()
        number = code(f"{operation} of {place.name}", _EXACT_BITS)
        found = torch.empty(self._comm.size, 2, dtype=torch.float64)
        self._comm.all_gather(found, torch.tensor([value, number], dtype=torch.float64))
        if (found[:, 1] != number).any():
            raise TrainingError(
                f"{place.name}: this rank asks for the {operation} of its .grad, and another rank for something else; "
                "every rank must make the same calls"
            )
        return found[:, 0]

    def whole(self, place: GradientPlace, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts, flat; a copy of a whole gradient. Collective, unless this rank has whole ones."""
        if self._gradients.sums_whole:
            return part.clone()
        self.gather_values(place, "whole tensor", 0.0)
        layout = self._gradients.buckets[place.number].layout
        pieces = [layout.piece(place.index, rank) for rank in range(self._comm.size)]
        counts = [piece.stop - piece.start for piece in pieces]
        whole = part.new_empty(sum(counts))
        self._comm.all_gather(whole, part.contiguous(), counts)
        return whole
