"""Messages between the ranks of a group, as users call them; `collectives.messages` carries them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf
from typing import Any, Literal, TypeVar, overload

from ..base import arguments
from ..errors import WorkTimeout
from ..messages.message import Receiving
from ..messages.messages import Envelope, P2POp
from ..process.labels import label
from ..runtime.progress import Work
from .ordered_group import OrderedGroup

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _unusable_if_cut_short(method: _Method) -> _Method:
    """Makes the communicator unusable where a timeout or an interrupt, such as Ctrl-C, leaves a message under way."""

    @wraps(method)
    def called(self: GroupMessages, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except WorkTimeout as late:
            raise self._refusal.give_up_after_timeout(late) from None
        except (KeyboardInterrupt, SystemExit):
            self._refusal.give_up_after_interrupt(method.__name__)
            raise

    return called  # type: ignore[return-value]


class GroupMessages(OrderedGroup):
    """A group whose ranks send each other messages. Messages do not queue behind collectives.

    Messages from one rank to another with one tag meet receives in the order in which both are posted. A receive
    from any rank has its place in that order.

    timeout: of `send`, `recv` and `sendrecv`; seconds, after which OperationTimeout is raised and the communicator
    cannot be used any more, as the message may still come to the array. After a timeout of `probe` nothing has changed.
    """

    @_unusable_if_cut_short
    def send(
        self, x: Any, dest: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Work | None:
        """Sends x to rank `dest`, which must receive as many elements of the same dtype with the same tag.

        Messages do not queue behind collectives: two ranks may both receive first and then send, asynchronously. A
        message to this rank itself is copied, and `send` returns at once; with async_op it is not copied.
        """
        self._refusal.check("send")
        limit = None if timeout is None else arguments.timeout("send", timeout, async_op)
        with label("collectives::send"):
            return self._messages.send(x, dest, tag, async_op=async_op, timeout=limit)

    @overload
    def recv(
        self,
        x: Any,
        source: int | None = None,
        tag: int = 0,
        *,
        async_op: Literal[False] = False,
        timeout: float | None = None,
    ) -> int: ...
    @overload
    def recv(self, x: Any, source: int | None = None, tag: int = 0, *, async_op: Literal[True]) -> Receiving: ...
    @overload
    def recv(self, x: Any, source: int | None = None, tag: int = 0, *, async_op: bool) -> Receiving | int: ...

    @_unusable_if_cut_short
    def recv(
        self,
        x: Any,
        source: int | None = None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Receiving | int:
        """Fills x with the next message of the same tag from rank `source`, or from any rank; returns the sender.

        source: None: any rank. With async_op the Work's `sender` is the rank, after its `wait`; a long message from any
        rank arrives only while this rank waits for a message or asks for one, not while it is in a collective.

        Raises OperationError if the message is longer or shorter than x, or of another dtype; x may then hold anything.
        Raises ArgumentError where this rank waits for itself and has sent nothing.
        """
        self._refusal.check("recv")
        limit = None if timeout is None else arguments.timeout("recv", timeout, async_op)
        with label("collectives::recv"):
            message = self._messages.recv(x, source, tag, async_op=async_op, timeout=limit)
        return message if async_op else message.sender

    @_unusable_if_cut_short
    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int | None = None,
        tag: int = 0,
        recv_tag: int | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Sends x to rank `dest` and fills out with a message from rank `source`, both at once; returns the sender.

        Neither waits for the other, so that ranks may pass arrays around a ring. x and out must not overlap.
        source: None: any rank.
        recv_tag: of the message that is received; by default `tag`. Errors: those of `recv`.
        """
        self._refusal.check("sendrecv")
        own_tag = tag if recv_tag is None else recv_tag
        limit = None if timeout is None else arguments.timeout("sendrecv", timeout)
        with label("collectives::sendrecv"):
            return self._messages.sendrecv(x, dest, out, source, tag, own_tag, limit)

    @_unusable_if_cut_short
    def batch_isend_irecv(self, operations: Sequence[P2POp]) -> list[Work]:
        """Begins several messages at once and returns their Works, in the order of the list.

        All arguments are checked before anything is sent. Receives begin first, then sends, both in the order of the
        list, so that ranks may list them in any order. No rank but the peers need call it.
        """
        self._refusal.check("batch_isend_irecv")
        with label("collectives::batch_isend_irecv"):
            return self._messages.batch(operations)

    def probe(self, source: int | None = None, tag: int = 0, *, timeout: float | None = None) -> Envelope:
        """Waits for a message of the tag from a rank, or from any (None), and describes it without receiving it.

        The next `recv` from the described `source` with this tag takes that message. Messages for receives that are
        posted already are not seen.

        timeout: seconds, after which WorkTimeout is raised.
        """
        self._refusal.check("probe")
        limit = inf if timeout is None else arguments.seconds("probe: timeout", timeout)
        with label("collectives::probe"):
            found = self._messages.probe(source, tag, seconds=limit)
        if found is None:
            raise WorkTimeout(f"probe: no message has come after {timeout} s")
        return found

    def iprobe(self, source: int | None = None, tag: int = 0) -> Envelope | None:
        """Describes the message that `probe` would wait for, or returns None if it has not come; never blocks."""
        self._refusal.check("iprobe")
        return self._messages.probe(source, tag, seconds=0)
