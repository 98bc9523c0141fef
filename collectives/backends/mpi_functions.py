"""The MPI library's own functions, called from C with arguments that are looked up once (`collectives.native`).

mpi4py looks through a call's arguments each time, which takes as long as the library takes for a small array. Here a
call is made of its addresses, counts and handles, and of those functions alone that take one count for each array.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..native import compiled

COUNTS = 2**31 - 1  # elements; not every MPI counts further


class Finish(NamedTuple):
    """Work that follows a reduction, in the floating-point numbers of its result.

    width: bytes of such a number, 4 or 8.
    numbers: how many; a complex one is two.
    divisor: what they are divided by, for an average.
    unify: make all NaNs the same bits.
    """

    width: int = 0
    numbers: int = 0
    divisor: int = 1
    unify: bool = False


NOTHING = Finish()


class _Shape(NamedTuple):
    """The form of a function's arguments: its number in mpi_call.c, and which of mpi4py's arguments are what."""

    number: int
    arrays: int = 2
    op: int | None = None
    root: int | None = None


_REDUCTION, _MOVEMENT = _Shape(0, op=2), _Shape(1)
_SHAPES = {
    "Allreduce": _REDUCTION,
    "Reduce_scatter_block": _REDUCTION,
    "Scan": _REDUCTION,
    "Exscan": _REDUCTION,
    "Allgather": _MOVEMENT,
    "Alltoall": _MOVEMENT,
    "Bcast": _Shape(2, arrays=1, root=1),
    "Reduce": _Shape(3, op=2, root=3),
    "Gather": _Shape(4, root=2),
    "Scatter": _Shape(4, root=2),
}
_PARTS_SENT, _PARTS_RECEIVED = ("Alltoall", "Scatter"), ("Allgather", "Alltoall", "Gather")


def _addresses() -> dict[str, int]:
    """Finds the functions: in the program, where a tool that counts calls puts its own, else in mpi4py's library."""
    found: dict[str, int] = {}
    for library in (ctypes.CDLL(None), ctypes.CDLL(MPI.__file__)):
        for name in _SHAPES:
            with contextlib.suppress(AttributeError):
                address = ctypes.cast(getattr(library, f"MPI_{name}"), ctypes.c_void_p).value
                found.setdefault(name, address or 0)
    return found


_FUNCTIONS = _addresses() if compiled is not None else {}
_POINTERS = MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_void_p)  # else numbers


def _fail(status: int) -> None:
    raise MPI.Exception(status)


def native_call(
    comm: MPI.Comm, name: str, arguments: tuple[Any, ...], finish: Finish, patiently: Callable[[], None]
) -> Callable[[], None] | None:
    """Makes the call in C; None where C cannot make it.

    arguments: as mpi4py has them, arrays as [memory, datatype].
    patiently: the same operation, for a thread that may not poll.
    """
    function, shape = _FUNCTIONS.get(name), _SHAPES.get(name)
    if compiled is None or function is None or shape is None:
        return None
    source, target = arguments[: shape.arrays][0], arguments[: shape.arrays][-1]
    datatype = next(array[1] for array in (source, target) if isinstance(array, list))
    ranks = comm.Get_size()
    x, sent = _place(source, ranks if name in _PARTS_SENT else 1)
    out, received = _place(target, ranks if name in _PARTS_RECEIVED else 1)
    if shape.op is not None:  # one count, of what a rank gets
        sent = received if isinstance(target, list) else sent
    if max(sent, received) > COUNTS:
        return None
    made: Callable[[], None] = compiled.MpiCall(
        function=function,
        shape=shape.number,
        pointers=_POINTERS,
        x=x,
        count=sent,
        out=out,
        count_out=received,
        datatype=MPI._handleof(datatype),
        op=MPI._handleof(MPI.OP_NULL if shape.op is None else arguments[shape.op]),
        root=0 if shape.root is None else arguments[shape.root],
        comm=MPI._handleof(comm),
        width=finish.width,
        numbers=finish.numbers,
        divisor=float(finish.divisor),
        unify=finish.unify,
        patiently=patiently,
        failed=_fail,
        kept=(comm, arguments),
    )
    return made


def is_native_call(call: Callable[[], object]) -> bool:
    """Returns whether a call is one of `native_call`, in which no numpy runs."""
    return compiled is not None and isinstance(call, compiled.MpiCall)


def _place(array: Any, parts: int) -> tuple[int, int]:
    """Returns an array's address and the elements of one of `parts` equal parts; 0 for MPI_IN_PLACE and None."""
    if not isinstance(array, list):
        return (0 if array is None else int(array)), 0
    memory, datatype = array
    if isinstance(memory, np.ndarray):  # of an empty array
        memory = MPI.memory.frombuffer(memory)
    return memory.address, memory.nbytes // datatype.Get_size() // parts
