"""Steps: the calls of a program as `native.OneCopy` reads them: copies and sums by addresses, others as they stand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...base.buffers import address
from ...base.float_errors import Runner
from .processor import Calls, Processor

Function = Callable[..., Any]
Step = tuple[Any, ...]
CALL, COPY, ADD, MULTIPLY, DIVIDE, MEET = range(6)  # as in one_copy.c
_WITH_NUMBER: dict[Any, int] = {np.multiply: MULTIPLY, np.divide: DIVIDE}
_FLOATS = ("f4", "f8")


def steps(program: Calls | None, barrier: Function, runner: Runner | None) -> list[Step] | None:
    """The steps of a program, behind each other; None for None.

    barrier: the ranks', which C makes itself.
    runner: runs what is called in Python; None where nothing need be.

    They hold the addresses of the program's arrays, which its user keeps.
    """
    return None if program is None else [_step(*call, barrier, runner) for call in program]


def _step(function: Function, arguments: tuple[Any, ...], barrier: Function, runner: Runner | None) -> Step:
    if function is barrier:
        return (MEET,)
    if getattr(function, "__func__", function) in (Processor.copy, np.copyto):
        target, source = arguments
        if _alike(target, source):
            return COPY, address(target), address(source), target.nbytes
    elif function is np.add:
        first, second, out = arguments
        if _is_summed(out) and _alike(out, first) and _alike(out, second):
            return ADD, out.itemsize, address(out), address(first), address(second), out.size
    elif function in _WITH_NUMBER:
        first, by, out = arguments
        if _is_summed(out) and _alike(out, first) and np.ndim(by) == 0:
            return _WITH_NUMBER[function], out.itemsize, address(out), address(first), float(by), out.size
    if runner is None:
        return CALL, function, arguments
    return CALL, runner, (partial(function, *arguments),)


def _is_summed(out: Any) -> bool:
    return out.dtype.str[1:] in _FLOATS and out.dtype.isnative


def _alike(first: Any, second: Any) -> bool:
    """Returns whether both are contiguous arrays of as many elements of one type."""
    return (
        isinstance(second, np.ndarray)
        and first.dtype == second.dtype
        and first.size == second.size
        and first.flags.c_contiguous
        and second.flags.c_contiguous
    )
