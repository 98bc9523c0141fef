"""An operation whose arguments were checked ahead, for programs that make it on the same arrays again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..runtime.progress import Work
from ..schedules.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from .issue import Issuer, Prepared

PREPARE_ONLY = object()  # as timeout=: prepare the operation and do not run it
PREPARABLE = (*ALGORITHMS, "barrier")  # what `Communicator.prepare` takes


class PreparedOperation:
    """An operation of a group on arrays that it keeps alive; from `Communicator.prepare`.

    A call does what the method of that name does: all ranks make it, in the same order as their other operations, as a
    prepared operation or by the method. The arrays must keep their memory: no `resize_`, no freed storage.

    at_once: as of `issue.Prepared`.
    """

    def __init__(self, issuer: Issuer, prepared: Prepared, arrays: Any) -> None:
        self._issuer, self._prepared, self._arrays = issuer, prepared, arrays
        self.at_once = prepared.at_once

    def __call__(self, *, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Runs the operation. async_op, timeout: as the method has them."""
        if timeout is None and not async_op:
            self.at_once(self._arrays)
            return None
        return self._issuer.issue_prepared(self._prepared, async_op, timeout, self._arrays)

    def __repr__(self) -> str:
        return f"PreparedOperation({self._prepared.operation}, {self._issuer.parts.description})"
