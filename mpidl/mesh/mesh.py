"""Mesh: the ranks of a job on named axes, with a Communicator for each.

    mesh = mpidl.Mesh(tp=2)            4 ranks: dp=2, tp=2
    mesh["tp"]                         the Communicator of the ranks that differ from this one on tp alone
    mesh.rank("tp"), mesh.size("tp")   this rank's coordinate there, and the ranks there
    mesh.along("dp", "cp")             the Communicator of a product of axes: those of data parallelism

Which rank has which coordinates is `layout`'s matter. Each Communicator has a queue of its own, so operations on
different axes do not wait for each other; within one axis every rank calls the same ones in the same order.

Collective are the constructor, `close` and the first `along` of each product, and over an axis the first `split_axis`
of each division. The constructor makes the groups of all axes that are longer than 1, and of what engines work over,
dp x cp and edp, alone and with tp, in the order of `_EAGER`. A group that is the whole world in its own order has the
world's Communicator itself, and all axes of size 1 share one of this rank alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from collectives import Communicator
from collectives.diagnostics import describe_program

from ..errors import UsageError
from ..job.objects import all_gather_object
from ..job.runtime import default_communicator
from .layout import AXES, Layout
from .scaler_check import refuse_torchs_scaler

_open_meshes: list[Mesh] = []  # strong references: a garbage collector would forget them at other times on each rank
_EAGER = (("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("ep",), ("edp",), ("dp", "cp", "tp"), ("edp", "tp"))


class Mesh:
    """Named axes over the ranks of a Communicator, by their sizes, which are the same on every rank.

    One size may be -1: what the others leave of the ranks.

    dp: data parallelism.
    pp: pipeline stages.
    tp: tensor parallelism.
    cp: context parallelism, ranks that hold parts of the same sequences.
    ep: expert parallelism, a divisor of dp * cp (`layout` says why).
    comm: the Communicator whose ranks it orders, also as an attribute; by default the world, joined by `mpidl.init`.

    Collective. It is open until `close` or the end of a `with` block; `groups` says what that means for the default
    group of engines. Raises one UsageError on every rank for sizes that do not fit or differ between ranks. Rank 0
    warns where tp groups cross nodes.

    layout: the coordinates of all ranks.
    coordinates: this rank's, by axis.
    axes: sizes by axis. Iterating gives the names of the axes.
    """

    def __init__(
        self,
        dp: int = -1,
        pp: int = 1,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        *,
        comm: Communicator | None = None,
    ) -> None:
        if comm is not None and not isinstance(comm, Communicator):
            raise UsageError(f"Mesh: comm: got {type(comm).__name__}; needs a collectives.Communicator")
        self.comm = default_communicator(comm)
        self.layout = agreed_layout(self.comm, {"dp": dp, "pp": pp, "tp": tp, "cp": cp, "ep": ep})
        self.coordinates = self.layout.coordinates(self.comm.rank)
        self._by_axes: dict[tuple[str, ...], Communicator] = {}
        self._divisions: dict[tuple[str, str], Communicator] = {}
        self._comm_of_self: Communicator | None = None
        self._closed = False
        for axes in _EAGER:
            self.along(*axes)
        _open_meshes.append(self)
        describe_program(place=_coordinates_of_open_mesh)
        if self.layout.model_axes:
            refuse_torchs_scaler(_axes_of_parts)
        slow = self.layout.slow_tp()
        if slow is not None and self.comm.rank == 0:
            warnings.warn(f"Mesh: {': '.join(slow)}", RuntimeWarning, stacklevel=2)

    def __getitem__(self, axis: str) -> Communicator:
        return self.along(axis)

    def along(self, *axes: str) -> Communicator:
        """The Communicator of the ranks that differ from this one on these axes alone, in the order of coordinates.

        The first call for a product of several axes that are longer than 1 is collective over the mesh, except for
        ("dp", "cp"), ("dp", "cp", "tp") and ("edp", "tp"); `ranks` gives the members without communication. A product
        holds either of dp and cp or of ep and edp, which are other parts of the same ranks.
        """
        wanted = self.layout.in_order(axes)
        if self._closed:
            raise UsageError("Mesh: is closed; needs an open mesh")
        longer = tuple(axis for axis in wanted if self.size(axis) > 1)
        if not longer:
            return self._self_only()
        if self.ranks(*longer) == tuple(range(self.comm.size)):
            return self.comm
        if longer not in self._by_axes:
            groups = self.layout.groups(*longer)
            same = next((axes for axes in self._by_axes if self.layout.groups(*axes) == groups), None)
            self._by_axes[longer] = self._split(longer) if same is None else self._by_axes[same]
        return self._by_axes[longer]

    def split_axis(self, axis: str, division: str, color: int) -> Communicator:
        """The Communicator of the ranks of an axis with this rank's color, as of those that share something.

        division: names what gives the ranks their colors. The first call for it is collective over the axis.
        """
        group = self[axis]
        if (axis, division) not in self._divisions:
            new_comm = group.split(color, self.rank(axis))
            assert new_comm is not None
            self._divisions[axis, division] = new_comm
        return self._divisions[axis, division]

    def _split(self, axes: tuple[str, ...]) -> Communicator:
        members = self.ranks(*axes)
        made = self.comm.split(members[0], self.rank(*axes), name=self._named(axes, members))
        assert made is not None
        return made

    def _named(self, axes: tuple[str, ...], members: tuple[int, ...]) -> str:
        """Names a group by its axes and its coordinates on the others: "tp at dp=1"."""
        coordinates = [self.layout.coordinates(rank) for rank in members]
        longer = [axis for axis in AXES if self.size(axis) > 1]
        fixed = [axis for axis in longer if len({each[axis] for each in coordinates}) == 1]
        place = ", ".join(f"{axis}={self.coordinates[axis]}" for axis in fixed)
        return f"{' x '.join(axes)} at {place}" if place else " x ".join(axes)

    def _self_only(self) -> Communicator:
        if self.comm.size == 1:
            return self.comm
        if self._comm_of_self is None:
            self._comm_of_self = self.comm.split_self()
        return self._comm_of_self

    def rank(self, *axes: str) -> int:
        """This rank's number on an axis, or in the group along several."""
        return self.layout.rank_along(self.comm.rank, *axes)

    def size(self, *axes: str) -> int:
        """Number of ranks on an axis, or in a group along several."""
        return self.layout.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """The ranks, numbered as in `comm`, of this rank's group on an axis, or along several."""
        return self.layout.group(self.comm.rank, *axes)

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis: AXES, outermost first, and those of experts, edp and ep."""
        return self.layout.sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self.axes)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self.axes[axis]}" for axis in self.layout.shown_axes)
        place = self._coordinates_in_words()
        return f"Mesh({sizes}; rank {self.comm.rank} of {self.comm.size}{place and ' at '}{place})"

    def _coordinates_in_words(self) -> str:
        """Names this rank's coordinates on the axes that are longer than 1: "dp=1, tp=0"."""
        longer = [axis for axis in self.layout.shown_axes if self.axes[axis] > 1]
        return ", ".join(f"{axis}={self.coordinates[axis]}" for axis in longer)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Closes the Communicators that the mesh has made, not the one that it was given. Collective."""
        if self._closed:
            return
        self._leave()
        for made in dict.fromkeys((*self._divisions.values(), *self._by_axes.values())):
            made.close()
        if self._comm_of_self is not None:
            self._comm_of_self.close()

    def _leave(self) -> None:
        self._closed = True
        _open_meshes.remove(self)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # other ranks may never come to `close`
            self._leave()


def _coordinates_of_open_mesh() -> str:
    """Names this rank's place in the mesh that was opened last, for the watchdog's reports."""
    meshes = open_meshes()
    return meshes[-1]._coordinates_in_words() if meshes else ""


def open_meshes() -> list[Mesh]:
    """Lists the meshes that are not closed."""
    return list(_open_meshes)


def _axes_of_parts() -> frozenset[str]:
    """Returns the axes along which the ranks of an open mesh may hold different parameters."""
    return frozenset(axis for mesh in _open_meshes for axis in mesh.layout.model_axes)


def agreed_layout(comm: Communicator, sizes: dict[str, Any]) -> Layout:
    """Computes the layout of these sizes over the ranks of `comm`, the same on every rank. Collective.

    Raises one UsageError on every rank, also where the ranks gave different sizes.
    """
    everyone = all_gather_object(comm, ({axis: repr(size) for axis, size in sizes.items()}, comm.node_ranks[0]))
    first = everyone[0][0]
    for rank, (sizes_of_rank, _) in enumerate(everyone):
        for axis, size in sizes_of_rank.items():
            if size != first[axis]:
                raise UsageError(
                    f"Mesh: got {axis}={first[axis]} on rank 0 and {axis}={size} on rank {rank}; needs the same sizes"
                )
    return Layout.of([node for _, node in everyone], **sizes)
