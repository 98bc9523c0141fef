"""Wrong arguments: an error that says what was given and what is needed, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from collectives import ArgumentError, ArgumentTypeError, CollectivesError, Communicator, P2POp

pytestmark = pytest.mark.mpi


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def read_only() -> np.ndarray:
    x = ones(4)
    x.flags.writeable = False
    return x


Call = Callable[[Communicator], Any]
WRONG: dict[str, tuple[type[CollectivesError], str, Call]] = {
    "a list": (
        ArgumentTypeError,
        r"array 0 of the list: got builtins.float; needs a numpy",
        lambda c: c.all_reduce([1.0]),
    ),
    "a transpose": (ArgumentError, "non-contiguous array of shape", lambda c: c.all_reduce(ones(3, 4).T)),
    "a strided tensor": (
        ArgumentError,
        "non-contiguous tensor",
        lambda c: c.broadcast(torch.ones(4, 4)[:, 1]),
    ),
    "an expanded tensor": (ArgumentError, "non-contiguous", lambda c: c.all_reduce(torch.ones(1).expand(4))),
    "read-only": (ArgumentError, "read-only", lambda c: c.all_reduce(read_only())),
    "text": (ArgumentTypeError, "got dtype", lambda c: c.all_reduce(np.array(["a"]))),
    "objects": (ArgumentTypeError, "got dtype", lambda c: c.all_reduce(np.array([None]))),
    "foreign byte order": (
        ArgumentTypeError,
        "native byte order",
        lambda c: c.all_reduce(ones(3, dtype=">f4" if np.little_endian else "<f4")),
    ),
    "a sparse tensor": (
        ArgumentTypeError,
        "dense",
        lambda c: c.all_reduce(torch.ones(3).to_sparse()),
    ),
    "a tensor elsewhere": (
        ArgumentTypeError,
        "on meta; needs a dense",
        lambda c: c.all_reduce(torch.ones(3, device="meta")),
    ),
    "an unknown operator": (ArgumentError, "got 'mean'; needs one of", lambda c: c.all_reduce(ones(3), "mean")),
    "an operator that is no name": (ArgumentTypeError, "op: got", lambda c: c.all_reduce(ones(3), sum)),
    "the average of integers": (
        ArgumentTypeError,
        r"'avg' on int32; an average needs a floating-point dtype, or op='sum' and then a division .* x // comm\.size",
        lambda c: c.all_reduce(ones(3, dtype=np.int32), "avg"),
    ),
    "the bits of floating-point numbers": (
        ArgumentTypeError,
        "'bxor' on float32; an operator on bits needs integers or bool",
        lambda c: c.all_reduce(ones(3), "bxor"),
    ),
    "the average of a prefix": (
        ArgumentError,
        "scan: got op 'avg'; needs op='sum' and then a division",
        lambda c: c.scan(ones(3), "avg"),
    ),
    "a timeout of no time": (
        ArgumentError,
        "all_reduce: timeout: got 0; needs a number of seconds above 0",
        lambda c: c.all_reduce(ones(3), timeout=0),
    ),
    "a timeout that is no number": (
        ArgumentTypeError,
        "send: timeout: got 'soon'",
        lambda c: c.send(ones(3), c.rank, timeout="soon"),
    ),
    "a timeout of an asynchronous operation": (
        ArgumentError,
        r"barrier: got timeout=1.0 and async_op; needs Work.wait\(timeout\)",
        lambda c: c.barrier(timeout=1.0, async_op=True),
    ),
    "a name that is no text": (ArgumentTypeError, "name: got 3", lambda c: Communicator(c.mpi, name=3)),
    "the larger of complex numbers": (
        ArgumentTypeError,
        "no order",
        lambda c: c.all_reduce(ones(3, dtype=np.complex64), "max"),
    ),
    "an unknown algorithm": (
        ArgumentError,
        "got algorithm 'star'; needs one of auto, mpi, (symmetric, symmetric_or_mpi, |hierarchical, )?ring, tree",
        lambda c: c.all_reduce(ones(3), algorithm="star"),
    ),
    "bf16 in the library": (
        ArgumentTypeError,
        "bfloat16, which MPI cannot reduce",
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.bfloat16), algorithm="mpi"),
    ),
    "a root outside": (ArgumentError, "root: got 9", lambda c: c.broadcast(ones(3), 9)),
    "a negative root": (ArgumentError, "root: got -1", lambda c: c.reduce(ones(3), -1)),
    "a root that is no number": (ArgumentTypeError, "root: got '0'", lambda c: c.broadcast(ones(3), "0")),
    "too large an out": (
        ArgumentError,
        r"out: got 7 elements; needs",
        lambda c: c.reduce_scatter(ones(7), ones(2 * c.size)),
    ),
    "too small an x": (ArgumentError, r"x: got 0 elements; needs 3", lambda c: c.all_gather(ones(3 * c.size), ones(0))),
    "two dtypes": (
        ArgumentTypeError,
        "out of float32 and x of float64",
        lambda c: c.all_gather(ones(3 * c.size), ones(3, dtype=np.float64)),
    ),
    "counts for another number of ranks": (
        ArgumentError,
        "counts; needs",
        lambda c: c.all_gather(ones(9), ones(3), [3] * (c.size + 1)),
    ),
    "counts that do not add up": (
        ArgumentError,
        "in all",
        lambda c: c.all_gather(ones(9), ones(3), [1] * c.size),
    ),
    "negative counts": (
        ArgumentError,
        "got -1",
        lambda c: c.all_gather(ones(9), ones(3), [-1] * c.size),
    ),
    "counts that are no list": (ArgumentTypeError, "counts", lambda c: c.all_gather(ones(9), ones(3), 3)),
    "overlapping arrays": (
        ArgumentError,
        "share memory",
        lambda c: (x := ones(4 * c.size), c.all_to_all(x, x)),
    ),
    "a part elsewhere in the whole": (
        ArgumentError,
        "share memory",
        lambda c: (x := ones(4 * c.size + 4), c.all_gather(x[: 4 * c.size], x[4 * c.rank + 1 :][:4])),
    ),
    "a sendrecv into what it sends": (
        ArgumentError,
        "sendrecv: out and x share memory",
        lambda c: (x := ones(4), c.sendrecv(x[:3], c.rank, x[1:], c.rank)),
    ),
    "a probe with no time": (
        ArgumentError,
        "probe: timeout: got -1; needs a number of seconds above 0",
        lambda c: c.probe(timeout=-1),
    ),
    "a message from oneself that was not sent": (
        ArgumentError,
        "recv: source: got .*, and rank . has no message of tag 3 to itself .* needs the send first",
        lambda c: c.recv(ones(1), c.rank, 3),
    ),
    "a probe for what was not sent": (ArgumentError, "has no message of tag 0 to itself", lambda c: c.probe(c.rank)),
    "a message to any rank": (ArgumentTypeError, "send: dest: got None", lambda c: c.send(ones(1), None)),
    "a batch of what is no message": (
        ArgumentTypeError,
        "operation 1: got .* needs a P2POp",
        lambda c: c.batch_isend_irecv([P2POp("send", ones(1), c.rank), "recv"]),
    ),
    "a batch with a send to any rank": (
        ArgumentTypeError,
        "operation 0: dest: got None",
        lambda c: c.batch_isend_irecv([P2POp("send", ones(1), None)]),
    ),
    "a message that neither comes nor goes": (
        ArgumentError,
        "kind: got 'isend'; needs 'send' or 'recv'",
        lambda c: P2POp("isend", ones(1), 0),
    ),
    "a batch that receives into read-only memory": (
        ArgumentError,
        "operation 0: x: got a read-only array",
        lambda c: c.batch_isend_irecv([P2POp("recv", read_only(), c.rank)]),
    ),
    "a message to no rank": (ArgumentError, "got 9", lambda c: c.recv(ones(1), 9)),
    "a tag that is too large": (
        ArgumentError,
        "tag: got 70000",
        lambda c: c.send(ones(1), (c.rank + 1) % c.size, 70000),
    ),
    "a colour that is no number": (ArgumentTypeError, "color", lambda c: c.split("red")),
    "a rank outside to be translated": (ArgumentError, "ranks: got 9", lambda c: c.translate_ranks([0, 9])),
    "a rank that is no number": (ArgumentTypeError, "ranks: got None", lambda c: c.translate_ranks(None)),
    "a group that is no Communicator": (
        ArgumentTypeError,
        "other: got .* needs a Communicator",
        lambda c: c.translate_ranks(0, c.mpi),
    ),
    "a root without its array": (
        ArgumentTypeError,
        "NoneType",
        lambda c: c.gather(None, ones(1), c.rank),
    ),
    "an array that only the root gives": (
        ArgumentError,
        "only the root",
        lambda c: c.gather(ones(c.size), ones(1), (c.rank + 1) % c.size),
    ),
    "an unknown dtype": (ArgumentTypeError, "dtype: got", lambda c: c.empty(3, "U5")),
}
NEEDS_TWO = {"a tag that is too large", "an array that only the root gives"}


def test_error_says_what_was_given_and_what_is_needed(comm: Communicator) -> None:
    for what, (kind, message, call) in WRONG.items():
        if comm.size == 1 and what in NEEDS_TWO:
            continue
        with pytest.raises(CollectivesError) as refused:
            call(comm)
        assert refused.type is kind, what
        assert re.search(message, str(refused.value)), f"{what}: {refused.value}"
        x = ones(3)
        comm.all_reduce(x)  # nothing was sent: the ranks are still in step
        assert (x == comm.size).all()


def test_errors_are_the_built_in_kinds_too() -> None:
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentTypeError, TypeError)
