"""The ranks' positions as seen by the process that has started them."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from collectives import Communicator
from collectives.runtime.positions import ANY, Positions
from collectives.runtime.witness import Witness, send_processes

pytestmark = pytest.mark.mpi


@pytest.fixture
def witness(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Witness]:
    """Rank 0 of each node stands for the process that waits for the job."""
    token = comm.mpi.bcast(secrets.token_hex(8)) + str(comm.rank - comm.local_rank)
    made = Witness(token) if comm.local_rank == 0 else Witness(secrets.token_hex(8))
    monkeypatch.setenv("MPIDL_JOB", token)
    comm.barrier()
    yield made
    made.close()


def here(comm: Communicator) -> list[int]:
    """This node's ranks, in the world."""
    nodes = comm.mpi.allgather((comm.rank - comm.local_rank, comm.rank))
    return [rank for first, rank in nodes if first == comm.rank - comm.local_rank]


def test_it_sees_each_group_by_the_world_s_numbers(comm: Communicator, witness: Witness) -> None:
    backwards = Communicator(comm.mpi.Split(0, -comm.rank))
    backwards.all_reduce(np.ones(3))
    backwards.barrier()
    comm.barrier()
    witness.look()
    node = here(comm)
    if comm.local_rank == 0:
        (group,) = witness.groups()
        assert sorted(group) == node
        assert {there.operation for there in group.values()} == {"barrier"}
        assert {there.number for there in group.values()} == {2}
    comm.barrier()
    backwards.close()


def test_it_sees_peers_by_the_world_s_numbers(comm: Communicator, witness: Witness) -> None:
    backwards = Communicator(comm.mpi.Split(0, -comm.rank))
    witness.look()
    comm.barrier()
    if backwards.rank == backwards.size - 1 and comm.size > 1:  # rank 0 of the world waits for the last one
        with backwards._dispatch.positions.waiting("recv", 0):
            assert witness.groups()[0][0].peer == comm.size - 1
        with backwards._dispatch.positions.waiting("recv", ANY):
            (there,) = (group[0] for group in witness.groups())
            assert str(there) == "is in recv from any rank"
            assert there.waits_for(1)
    comm.barrier()
    backwards.close()


def test_it_hears_which_process_is_which_rank(
    comm: Communicator, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.runtime.witness.RANKS_AT_ONCE", 2)
    told = [(f"node{rank // 2}", 10 + rank) for rank in range(5)]
    if comm.local_rank == 0:
        send_processes(told)
        witness.look()
        witness.close()
        assert witness.processes == dict(enumerate(told))


def test_what_it_keeps_is_bounded_and_goes_with_it(
    comm: Communicator, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.runtime.witness.KEPT_PAGES", 3)
    for _ in range(5):
        made = Communicator()
        comm.barrier()
        witness.look()
        made.close()
    if comm.local_rank == 0:
        assert len(witness.groups()) == 3
        before = len(os.listdir("/proc/self/fd"))
        witness.close()
        assert len(os.listdir("/proc/self/fd")) == before - 4
        assert witness.groups() == []


def test_it_keeps_the_page_of_the_world_in_whatever_order_they_come(
    comm: Communicator, witness: Witness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("collectives.runtime.witness.KEPT_PAGES", 3)
    worlds = [[0], [0, 1], [0], [1], [2]]
    if comm.local_rank == 0:
        path = tmp_path / "page"
        path.write_bytes(bytes(Positions.nbytes_seen(1)))
        for world in worlds:
            with path.open("rb") as file:
                deliver(json.dumps({"members": [0], "world": world}).encode(), [file.fileno()])
            witness.look()
        assert [page.world for page in witness.pages] == [[0, 1], [1], [2]]
    comm.barrier()


def test_no_rank_need_be_there(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDL_JOB", secrets.token_hex(8))
    made = Communicator()
    made.barrier()
    made.close()


def deliver(content: bytes, files: Sequence[int] = ()) -> None:
    """Sends a message to the witness of MPIDL_JOB as any program can."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect(f"\0mpidl-{os.environ['MPIDL_JOB']}")
        socket.send_fds(out, [content], files)


MALFORMED = [
    b"",
    b"not json",
    b"\xff\xfe",
    b"[" * 100_000,
    b"1" * 10_000,
    b"[]",
    b"null",
    *(
        json.dumps(message).encode()
        for message in [
            {"first": 0, "processes": 5},
            {"first": 0, "processes": [5]},
            {"first": 0, "processes": [["node", 1, 2]]},
            {"first": 0, "processes": [["node", "1"]]},
            {"first": 0, "processes": [["node", -1]]},
            {"first": 0, "processes": [["node", 0]]},
            {"first": 0, "processes": [["node", True]]},
            {"first": 0, "processes": [["node", 10**30]]},
            {"first": 0, "processes": [["n" * 300, 1]]},
            {"first": 0, "processes": [[1, 1]]},
            {"first": "0", "processes": [["node", 1]]},
            {"first": -1, "processes": [["node", 1]]},
            {"first": 10**12, "processes": [["node", 1]]},
            {"first": 0.0, "processes": [["node", 1]]},
            {"processes": [["node", 1]]},
            {"first": 0, "processes": [["node", 1]], "more": 1},
            {"first": 0, "processes": [["node", 1]] * 1001},
            {"members": [0], "world": [0]},
        ]
    ),
]


def test_malformed_messages_are_ignored(comm: Communicator, witness: Witness) -> None:
    if comm.local_rank == 0:
        witness.look()
        groups = len(witness.groups())
        for content in MALFORMED:
            deliver(content)
            witness.look()
            assert witness.processes == {}, content
            assert len(witness.groups()) == groups
    comm.barrier()


@pytest.mark.parametrize(
    "message",
    [
        {"members": [0, 1], "world": [0]},
        {"members": [1], "world": [0]},
        {"members": [-1], "world": [0]},
        {"members": ["0"], "world": [0]},
        {"members": [], "world": []},
        {"members": 0, "world": 0},
        {"members": [0], "world": [None]},
        {"members": [0], "world": [10**9]},
        {"members": [0], "world": [0], "file": 0},
        {"first": 0, "processes": [["node", 1]]},
        5,
    ],
)
def test_pages_that_are_none_are_closed(comm: Communicator, witness: Witness, message: object) -> None:
    if comm.local_rank == 0:
        before = os.listdir("/proc/self/fd")
        with open(__file__, "rb") as text:
            deliver(json.dumps(message).encode(), [text.fileno()])
        witness.look()
        assert os.listdir("/proc/self/fd") == before
        assert witness.groups() == []
        assert witness.processes == {}
    comm.barrier()


def test_a_file_of_other_content_is_no_page(comm: Communicator, witness: Witness) -> None:
    if comm.local_rank == 0:
        message = json.dumps({"members": [0, 1], "world": [0, 1]}).encode()
        with open(__file__, "rb") as text:
            deliver(message, [text.fileno()])
            deliver(message, [text.fileno()] * 2)
        with open("/dev/null", "rb") as device:
            deliver(message, [device.fileno()])
        witness.look()
        assert witness.groups() == []
        assert len(witness.pages) == 1
    comm.barrier()


def test_one_look_ends_while_messages_keep_coming(
    comm: Communicator, witness: Witness, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.local_rank == 0:
        inbox = witness.inbox
        assert inbox is not None
        monkeypatch.setattr("collectives.runtime.inbox.MESSAGES_AT_ONCE", 2)
        for _ in range(3):
            deliver(b"not json")
        assert len(list(inbox.receive())) == 2
        assert len(list(inbox.receive())) == 1
    comm.barrier()


def test_messages_of_another_user_are_dropped(comm: Communicator, witness: Witness) -> None:
    if comm.local_rank == 0:
        message = json.dumps({"first": 0, "processes": [["node", 7]]}).encode()
        if os.geteuid() == 0:
            sender = os.fork()
            if not sender:
                try:
                    os.setuid(65534)
                    deliver(message)
                finally:
                    os._exit(0)
            os.waitpid(sender, 0)
        else:  # this process may not send as another user, so the witness believes to be of another one
            deliver(message)
        with pytest.MonkeyPatch.context() as patch:
            if os.geteuid():
                patch.setattr("collectives.runtime.inbox.os.geteuid", lambda: 0)
            witness.look()
        assert witness.processes == {}
        deliver(message)
        witness.look()
        assert witness.processes == {0: ("node", 7)}
    comm.barrier()


def test_the_page_can_only_be_read_by_the_witness(comm: Communicator, witness: Witness) -> None:
    made = Communicator()
    if comm.local_rank == 0:
        witness.look()
        (page,) = witness.pages
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(page.file, b"x", 0)
    made.barrier()
    made.close()
