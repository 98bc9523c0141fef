"""Calls of operations, prepared once for the arrays and arguments that they are made with, and kept.

    arrays, arguments -- checks -- choice of the algorithm -- call of its backend -- kept by the arrays' signatures

A call that is made again on the same arrays is looked up and needs no second check. It knows the arrays by their
addresses and does not keep them alive. For a list of arrays the call is made anew each time.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

import numpy as np
import torch

from ..base import buffers, coalesced, reduction
from ..base.buffers import DTYPES, Buffer, DeviceBuffer, signature
from ..base.reduction import Reduction
from ..errors import ArgumentError
from ..memory import shared_memory
from ..memory.shared_memory import is_one_for_all
from ..native import compiled
from ..runtime.positions import NO_WORDS
from . import details
from .issue import Issuer, Prepared
from .prepared import PREPARE_ONLY, PreparedOperation

KEPT_CALLS = 4096  # of a few hundred bytes each
Method = TypeVar("Method", bound=Callable[..., Any])


def signature_in_python(array: Any) -> tuple[Any, ...] | None:
    """Returns the array's signature, another one for memory that all ranks of the node share."""
    seen = signature(array)
    if shared_memory.one_for_all and seen is not None and is_one_for_all(seen[0]):
        return (*seen, "one for all")
    return seen


def signature_from_c() -> Callable[[Any], tuple[Any, ...] | None] | None:
    """`signature_in_python` in C; None where it cannot be."""
    if compiled is None:
        return None
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    compiled.look_at(
        np.ndarray, buffers.PLAIN_TENSORS, exchange, kinds(), shared_memory.one_for_all, signature_in_python
    )
    found: Callable[[Any], tuple[Any, ...] | None] = compiled.signature
    return found


def kinds() -> dict[tuple[int, int], Any]:
    """The dtypes of tensors by DLPack's numbers for their kind, and their bits."""
    numbers = {"i": 0, "u": 1, "f": 2, "b": 6}
    known = [dtype for dtype in DTYPES.values() if dtype.torch is not None and dtype.kind in numbers]
    return {(4 if d.name == "bfloat16" else numbers[d.kind], 8 * d.itemsize): d.torch for d in known}


signature_of = signature_from_c() or signature_in_python


def refuse_shared(name: str, data: Buffer) -> None:
    """Raises ArgumentError for an array that is the same memory on all ranks of the node."""
    if is_one_for_all(data.address):
        raise ArgumentError(f"{name}: got an array of `Communicator.shared`, one for all ranks; needs one a rank")


def inspect_root_array(name: str, array: Any, root: int, rank: int, size: int, *, writable: bool) -> Buffer | None:
    """The root's large array, of so many elements; the others must give none."""
    if rank != root:
        if array is not None:
            raise ArgumentError(f"{name}: got an array on rank {rank}; only the root, {root}, gives one")
        return None
    data = buffers.inspect(array, name, writable=writable)
    if data.size != size:
        raise ArgumentError(f"{name}: got {data.size} elements; needs {size}, the sum of all ranks' parts")
    return data


def shortcut(method: Method) -> Method:
    """Wraps a method so that C finds the operation that an earlier call with the same arguments has prepared.

    Returns the method itself where there is no C. Every argument except `async_op` and `timeout` must be an array or a
    value on which the operation depends.
    """
    if compiled is None:
        return method
    given = [p for p in inspect.signature(method).parameters.values() if p.name not in ("self", "async_op", "timeout")]
    made: Any = compiled.Shortcut(
        method=method,
        name=method.__name__,
        parameters=tuple(p.name for p in given),
        defaults=tuple(... if p.default is p.empty else p.default for p in given),
        by_position=sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in given),
        not_yet=PREPARE_ONLY,
    )
    update_wrapper(made, method)
    found: Method = made
    return found


def _keep(kept: OrderedDict[tuple[Any, ...], Any], key: tuple[Any, ...], call: Any) -> None:
    """Keeps a call, in the place of the oldest one if there are many."""
    if len(kept) >= KEPT_CALLS:
        kept.popitem(last=False)
    kept[key] = call


class GroupCalls:
    """The calls of one group's operations: choice of the algorithm, preparation, reuse.

    issuer: of the group.
    barrier: the call of the operation that has no arrays.
    """

    def __init__(self, issuer: Issuer) -> None:
        self._issuer, self._dispatch = issuer, issuer.parts.dispatch
        self._choose = self._dispatch.selection.choose
        self._kept: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
        self.shortcuts: OrderedDict[tuple[Any, ...], Callable[[Any], None]] = OrderedDict()
        self.barrier = issuer.prepare("barrier", self._dispatch.prepare("barrier", "mpi"), NO_WORDS)

    def choose(
        self, operation: str, algorithm: str, data: Buffer, nbytes: int, op: Reduction | None = None, even: bool = True
    ) -> str:
        """Chooses the algorithm; on a GPU "auto" stays "auto", as the transport is chosen first."""
        if algorithm == "auto" and isinstance(data, DeviceBuffer):
            return algorithm
        return self._choose(operation, algorithm, data.dtype, nbytes, op, even)

    def recall(self, key: tuple[Any, ...]) -> Prepared | None:
        """The call that was prepared for the same arrays and arguments, which need no second check."""
        try:
            return self._kept.get(key)
        except TypeError:  # an argument that cannot be a key; the checks will say what is wrong with it
            return None

    def prepare(self, key: tuple[Any, ...], operation: str, algorithm: str, *checked: Any) -> Prepared:
        """The call for checked arguments, kept for the next time if the arrays can be told by their signatures.

        key: the operation, the signatures, and all that the checks and the choice depend on.

        It refers to the arrays by their addresses, so as not to keep them alive.
        """
        self._issuer.refusal.check(operation)
        detail = details.describe_arrays(algorithm, checked)
        if None in key[1:3]:
            return self._issuer.prepare(operation, self._dispatch.prepare(operation, algorithm, *checked), detail)
        free = [item.unowned() if isinstance(item, Buffer) else item for item in checked]
        prepared = self._issuer.prepare(operation, self._dispatch.prepare(operation, algorithm, *free), detail)
        with contextlib.suppress(TypeError):  # an argument that is right and yet no key
            _keep(self._kept, key, prepared)
        return prepared

    def forget(self) -> None:
        """Forgets all calls: what an array had is now other memory, or may be."""
        self._kept.clear()
        self.shortcuts.clear()

    def keep_shortcut(self, key: tuple[Any, ...], prepared: PreparedOperation) -> None:
        """Keeps an operation under the arguments that it was prepared for, for `shortcut`."""
        _keep(self.shortcuts, key, prepared.at_once)

    def issue(self, prepared: Prepared, async_op: bool, timeout: Any, arrays: Any) -> Any:
        """Issues the operation; returns it as a PreparedOperation, and runs nothing, where timeout is PREPARE_ONLY."""
        if timeout is None and not async_op:
            return prepared.at_once(arrays)
        if timeout is PREPARE_ONLY:
            return PreparedOperation(self._issuer, prepared, arrays)
        return self._issuer.issue_prepared(prepared, async_op, timeout, arrays)

    def issue_list(
        self,
        operation: str,
        algorithm: str,
        async_op: bool,
        timeout: float | None,
        *,
        wholes: list[Any],
        owns: Any = None,
        root: int = 0,
        op: Any = None,
    ) -> Any:
        """Checks every array of a list, chooses for every batch, and issues all of it as one operation."""
        rank, size = self._dispatch.rank, self._dispatch.size
        written = operation not in ("reduce", "broadcast") or (operation == "reduce") == (rank == root)
        items = coalesced.inspect(operation, wholes, owns, rank, size, writable=written)
        if operation in reduction.OPERATIONS:
            for number, item in enumerate(items):
                refuse_shared(coalesced.array_name(operation, number), item.whole)
        steps: list[tuple[Any, ...]] = []
        for batch in coalesced.batches(items):
            data = batch[0].whole
            reduced = None if op is None else reduction.check(op, data.dtype)
            nbytes = sum(item.whole.nbytes for item in batch)
            chosen = self.choose(operation, algorithm, data, nbytes, reduced)
            steps.append((operation, chosen, batch, root, reduced, written))
        call = self._dispatch.prepare_batches(operation, steps, coalesced.common_device(operation, items))
        arrays, rooted = [item.whole for item in items], operation in ("reduce", "broadcast")
        detail = details.describe_list(op, arrays, root, rooted, [step[1] for step in steps])
        if timeout is PREPARE_ONLY:
            return PreparedOperation(self._issuer, self._issuer.prepare(operation, call, detail), (wholes, owns))
        issue = self._issuer.issue if timeout is None else self._issuer.within(timeout)
        return issue(operation, call, detail, async_op, (wholes, owns))
