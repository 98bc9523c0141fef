"""Writes each rank's part of a checkpoint, and commits all parts on rank 0.

In the foreground, `save` writes and the ranks agree by collectives. In the background, a thread on each rank writes
during the next steps. These threads use no MPI: each leaves a description of its files next to them, and rank 0's
thread polls for all of them and renames the directory:

    rank00001.writing      still writing              missing, with no .json: it failed
    rank00001.json         all is on the disk; lists the files
    rank00001.failed       why it failed, if that could be written

A rank that gets an exception which is no failure to write, such as an interrupt, removes the directory. The program may
catch it and save the same step again.

`wait` raises a failure. If the program ends without a `wait`, rank 0 ends the job with it (`ending.BACKGROUND_ERRORS`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collectives import Communicator

from ..errors import CheckpointError, MpidlError
from ..job.agreement import Failure, attempt, error_of, failure_of, on_rank_0
from ..job.ending import BACKGROUND_ERRORS, TEMP_PATHS
from ..job.objects import all_gather_object
from . import cuts, folder, index, parts
from .collect import PieceToWrite, join_descriptions, rank_name
from .engine import Engine
from .json_checks import CODES
from .tensorfile import write_file

_PAUSE = 0.01  # seconds between two looks at what the other ranks have left
RankFiles = dict[str, Any]


def write_part(
    path: Path, rank: int, pieces: Sequence[PieceToWrite], own: dict[str, Any], file_bytes: int
) -> RankFiles:
    """Writes this rank's files, none much larger than `file_bytes`, and describes them. Raises OSError.

    own: JSON of this rank, for the index.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for number, group in enumerate(_groups(pieces, file_bytes)):
        name = f"{rank_name(rank)}-{number:03d}.safetensors"
        entries = [(p.key, p.dtype, p.shape, p.values) for p in group]
        written = write_file(path / name, entries, {"format": "pt"})
        files[name] = {"bytes": written.bytes, "header": written.header}
        for p in group:
            sums = written.blocks[p.key]
            part = {"file": name, "key": p.key, "start": p.start, "stop": p.stop, "crc32": sums}
            if p.cut != cuts.whole(p.cut.shape):
                part["runs"] = p.cut.runs
            tensors.setdefault(p.name, (CODES[p.dtype], list(p.cut.shape), []))[2].append(part)
    return {"files": files, "tensors": tensors, "own": own}


def _groups(pieces: Sequence[PieceToWrite], file_bytes: int) -> list[list[PieceToWrite]]:
    groups: list[list[PieceToWrite]] = []
    size = 0
    for piece in pieces:
        if not groups or (size and size + piece.bytes > file_bytes):
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.bytes
    return groups


class Saving:
    """A checkpoint that is being saved. path: its final directory.

    write: writes what this rank owns.
    finish: on rank 0, commits what all ranks have written.
    """

    def __init__(
        self,
        comm: Communicator,
        temporary: Path,
        into: Path,
        write: Callable[[], RankFiles],
        finish: Callable[[list[RankFiles]], Path],
    ) -> None:
        self.path = temporary.with_name(temporary.stem)
        self._comm, self._temporary, self._into, self._finish = comm, temporary, into, finish
        self._unfinished = {temporary, folder.temporary_of(temporary.with_name(folder.LATEST))}
        self._write: Callable[[], RankFiles] | None = write
        self._thread: threading.Thread | None = None
        self._failures: tuple[Failure | None, Failure | None] = (None, None)  # to write, to finish
        self._error: str | None = None
        self._agreed = False

    def run(self) -> None:
        """Writes now. Raises CheckpointError on every rank, after the directory is removed. Collective."""
        try:
            TEMP_PATHS.update(self._unfinished)
            error, cause = self._commit_together()
            self._agreed = True
            if error is not None:
                self._remove()
        except BaseException:  # of this rank alone, such as an interrupt
            folder.discard(self._temporary)
            raise
        finally:
            TEMP_PATHS.difference_update(self._unfinished)
        if error is not None:
            raise self._error_with_step(str(error)) from cause

    def _commit_together(self) -> tuple[MpidlError | None, BaseException | None]:
        """Writes this rank's part, and commits all on rank 0. Returns the error of all ranks, and its cause."""
        part, failure, cause = attempt(self._write_once)
        error = error_of(all_gather_object(self._comm, failure))
        if error is None:
            parts = self._comm.gather_object(part) or []  # for rank 0
            try:
                on_rank_0(self._comm, lambda: self._finish(parts))
            except CheckpointError as raised_here:
                error, cause = raised_here, raised_here.__cause__
        return error, cause

    def start(self) -> None:
        """Writes in a thread, while the program goes on; at once on a rank that can start none. Collective."""
        thread = threading.Thread(target=self._write_in_background, name="mpidl-checkpoint", daemon=False)
        try:
            TEMP_PATHS.update(self._unfinished)
            with contextlib.suppress(OSError):  # a full disk is found out when there is more to write
                self._mark("writing").touch()
            self._comm.barrier()
            try:
                self._thread = thread
                thread.start()
            except RuntimeError:  # the system has no more; rank 0's thread waits for this rank's part
                self._thread = None
                self._write_in_background()
        except BaseException:  # of this rank alone, such as an interrupt
            if self._thread is None:
                TEMP_PATHS.difference_update(self._unfinished)
                folder.discard(self._temporary)
            raise

    @property
    def started(self) -> bool:
        """True if a thread writes, or has written, for which no `wait` has waited."""
        return self._thread is not None

    def done(self) -> bool:
        """True once this rank has written; on rank 0, once the checkpoint is complete or failed. Not collective."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the checkpoint is complete, and returns its directory. Collective.

        Raises CheckpointError on every rank if some rank could not write; the former checkpoints are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if not self._agreed:
            found = all_gather_object(self._comm, self._failures)
            error = error_of([f for f, _ in found]) or error_of([f for _, f in found[:1]])
            self._error = None if error is None else str(error)
            self._agreed = True
            BACKGROUND_ERRORS.pop(self._temporary, None)
            try:
                if error is not None:
                    self._remove()
            finally:
                TEMP_PATHS.difference_update(self._unfinished)
        if self._error is not None:
            raise self._error_with_step(self._error)
        return self.path

    def _write_in_background(self) -> None:
        part, failed, _ = attempt(self._write_and_mark)
        failed_to_finish = None
        if self._comm.rank == 0:
            _, failed_to_finish, error = attempt(lambda: self._finish(self._wait_for_parts(part, failed)))
            if error is not None:
                BACKGROUND_ERRORS[self._temporary] = self._comm, str(self._error_with_step(str(error)))
        self._failures = (failed, failed_to_finish)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Returns None: a copy of the model has no checkpoint in flight."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _write_and_mark(self) -> RankFiles:
        writing = self._mark("writing")
        try:
            part = self._write_once()
            folder.write_text(self._mark("json"), json.dumps(part))
            return part
        except Exception as error:
            with contextlib.suppress(OSError):
                for file in self._into.glob(f"{rank_name(self._comm.rank)}-*"):  # on a full disk: makes room
                    file.unlink()
                folder.write_text(self._mark("failed"), json.dumps(failure_of(error)))
            raise
        finally:
            with contextlib.suppress(OSError):
                writing.unlink()

    def _write_once(self) -> RankFiles:
        write, self._write = self._write, None  # which holds the copies, and is held for as long as a model is
        assert write is not None
        return write()

    def _wait_for_parts(self, own: RankFiles | None, failed: Failure | None) -> list[RankFiles]:
        """Waits for all ranks' threads and returns their parts. Raises the error that `wait` will, if a rank failed."""
        parts, failures = [own or {}], [failed]
        for rank in range(1, self._comm.size):
            while self._mark("writing", rank).exists():
                time.sleep(_PAUSE)
            part, failed = self._read_mark(rank)
            parts.append(part)
            failures.append(failed)
        error = error_of(failures)
        if error is not None:
            raise error
        for rank in range(self._comm.size):
            self._mark("json", rank).unlink()
        return parts

    def _read_mark(self, rank: int) -> tuple[RankFiles, Failure | None]:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(self._mark("json", rank).read_text()), None
        with contextlib.suppress(FileNotFoundError):
            name, text = json.loads(self._mark("failed", rank).read_text())
            return {}, (name, text)
        return {}, ("CheckpointError", f"{self._temporary}: rank {rank} could not write its part")

    def _mark(self, kind: str, rank: int | None = None) -> Path:
        return self._temporary / f"{rank_name(self._comm.rank if rank is None else rank)}.{kind}"

    def _remove(self) -> None:
        if self._comm.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _error_with_step(self, text: str) -> CheckpointError:
        return CheckpointError(f"{text}; {self.path.name} was not saved, and earlier checkpoints are as they were")


def make_commit(
    temporary: Path, engine: Engine, about: dict[str, Any], keep_last: int | None
) -> Callable[[list[RankFiles]], Path]:
    """Returns the function that commits on rank 0. It takes the files of the ranks, each with its part's label."""
    of, join = engine.part, engine.join

    def finish(written: list[RankFiles]) -> Path:
        if of.joined:
            written = sorted(written, key=lambda one: int(one["rank"]))
            whole = join_descriptions(join, [one["about"] for one in written if one["about"] is not None])
            return folder.commit(temporary, _merge_index(temporary, whole, written), keep_last)
        if not of.sizes:
            return folder.commit(temporary, _merge_index(temporary, about, written), keep_last)
        texts = {}
        for name in of.names:
            ranks = sorted((one for one in written if one["part"] == name), key=lambda one: int(one["rank"]))
            texts[name] = _merge_index(temporary / name, ranks[0]["about"], ranks).text()
            folder.write_text(temporary / name / index.NAME, texts[name])
            folder.sync(temporary / name)
        return folder.commit(temporary, parts.index_of_parts(temporary, of, about, texts), keep_last)

    return finish


def with_part_label(written: RankFiles, of: parts.ModelPart, about: dict[str, Any]) -> RankFiles:
    """Adds the part's name, the rank in it and its index to a rank's files, where a model lies in parts."""
    if not of.sizes:
        return written
    return {**written, "part": of.name, "rank": of.rank, "about": about if of.comm.rank == 0 else None}


def _merge_index(path: Path, about: dict[str, Any], written: list[RankFiles]) -> index.Index:
    return index.merge(path, {**about, "own": [one["own"] for one in written]}, written)
