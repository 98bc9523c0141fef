"""Directories of checkpoints: finding complete ones, committing a new one by a rename, and removing old ones.

    step-00000020.tmp      being written: whatever it holds is no checkpoint, and the next save removes it
    step-00000020          complete: its files were on the disk, then its index, before it got this name
    step-00000010.old      replaced by another checkpoint of the same step
    step-00000010.gone     being removed
    latest                 a text file: the name of the checkpoint written last

A rename commits the new checkpoint: before it the former one is the newest. Where both are of the same step, the former
one gets a second name first, by hard links, so that `latest` names a complete checkpoint at any time:

    20, .tmp    latest: 20    ->    20, .old, .tmp    latest: 20.old    ->    20 anew, .old    latest: 20

All names step-N.tmp, .old and .gone belong to saving; what this process still writes in the background for another
model is left alone.

The program's thread begins checkpoints and threads of `writing` commit them; `_NAMES_LOCK` lets one at a time change
the names of a directory. Inside it `_HELD_LOCK` of `directory_lock` may be taken, never the other way round.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigurationError
from ..job.ending import TEMP_PATHS
from ..regular_files import read_regular, size_of
from . import directory_lock, index, parts
from .index import Index
from .tensorfile import naming_path

LATEST = "latest"
_LONGEST_NAME = 4096  # bytes
_NAME = re.compile(r"step-(\d{8,})(?:\.(tmp|old))?")
_NAMES_LOCK = threading.Lock()  # to change a directory's names: several saves may be under way
_LEFT = re.compile(r"step-\d{8,}(\.(tmp|old))?(\.gone)?")


def name_of(step: int) -> str:
    """Name of the directory of a step."""
    return f"step-{step:08d}"


def sync(folder: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_of(path: Path) -> Path:
    """Path of the file that `write_text` writes and then renames."""
    return path.with_name(f"{path.name}.tmp")


def write_text(path: Path, text: str) -> None:
    """Writes a temporary file and renames it: readers see the former text or the new one, after an error the former."""
    temporary = temporary_of(path)
    try:
        with naming_path(temporary):
            temporary.unlink(missing_ok=True)  # what an interrupted save has left, or a pipe that would be waited for
        with naming_path(temporary), temporary.open("xb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:  # an interrupt too
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def make(folder: Path) -> None:
    """Makes a directory and those above it, unless they are there, and waits until their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if folder.is_file():
        raise CheckpointError(f"{folder}: is a file; needs a directory")
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def begin(folder: Path, step: int, inside: Collection[str] = ()) -> Path:
    """Makes the directory to write into, with empty ones in it, and removes what interrupted saves have left.

    The lock of `folder` is this process's from now on: see `directory_lock`.

    inside: names of the empty directories.
    """
    make(folder)
    with _NAMES_LOCK:
        directory_lock.hold(folder)
        clean(folder)
    temporary = folder / f"{name_of(step)}.tmp"
    try:
        temporary.mkdir()
    except FileExistsError:
        raise CheckpointError(f"{temporary}: is still being written, for another model") from None
    for name in inside:
        (temporary / name).mkdir()
    return temporary


def discard(temporary: Path) -> None:
    """Removes a directory that is being written, on any rank, unless it is committed.

    It is renamed first, so that rank 0 cannot commit it while its files are being removed.
    """
    gone = _name_for_removal(temporary)
    with contextlib.suppress(OSError):  # it has been committed, or another rank has renamed it
        temporary.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def clean(folder: Path) -> None:
    """Removes what interrupted saves have left, unless another process saves there.

    A replaced checkpoint whose successor was not finished gets its name back.
    """
    if directory_lock.is_held_elsewhere(folder):
        return
    being_written = {path.absolute() for path in TEMP_PATHS}
    for path in sorted(folder.iterdir()):
        if not path.suffix or not _LEFT.fullmatch(path.name) or path.absolute() in being_written:
            continue
        if path.suffix == ".old":
            final = path.with_name(path.stem)
            if not final.exists() and not _give_second_name(path, final):
                path.rename(final)
            if _latest(folder) == path.name:
                write_text(folder / LATEST, f"{final.name}\n")
                sync(folder)
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # a file of such a name
            path.unlink()


def commit(temporary: Path, content: Index, keep_last: int | None) -> Path:
    """Makes a written directory the newest checkpoint, and removes the oldest beyond `keep_last`.

    Its index is written, everything synced, then it gets its name, then `latest` names it.
    """
    with _NAMES_LOCK:
        return _commit(temporary, content, keep_last)


def _commit(temporary: Path, content: Index, keep_last: int | None) -> Path:
    folder, final = temporary.parent, temporary.with_name(temporary.stem)
    content.about["number"] = 1 + max((index.number_of(path) for path in by_age(folder)), default=0)
    write_text(temporary / index.NAME, content.text())
    sync(temporary)
    former = final.with_name(f"{final.name}.old")
    if final.exists() and _give_second_name(final, former):
        write_text(folder / LATEST, f"{former.name}\n")
        sync(folder)
        final.rename(_name_for_removal(former))
    elif final.exists():
        final.rename(former)  # until the next line `latest` names nothing, and `newest` finds the former one
    temporary.rename(final)
    sync(folder)
    write_text(folder / LATEST, f"{final.name}\n")
    sync(folder)
    if former.exists():
        shutil.rmtree(former, ignore_errors=True)
    _name_for_removal(former)
    if keep_last is not None:
        kept = 0
        for path in by_age(folder):
            if kept < keep_last:
                kept += is_complete(path)
                continue
            with contextlib.suppress(OSError):  # what cannot be removed does no harm to the new one
                gone = _name_for_removal(path)
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
    return final


def _give_second_name(path: Path, other: Path) -> bool:
    """Makes the directory `other` of the same files, complete at once; False where there are no hard links."""
    making = _name_for_removal(other)
    try:
        _link_all(path, making)
        making.rename(other)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        return False
    return True


def _link_all(path: Path, other: Path) -> None:
    """Makes the directory `other` of the files of one, and of the parts in it."""
    other.mkdir()
    for file in path.iterdir():
        if file.is_dir():
            _link_all(file, other / file.name)
        else:
            os.link(file, other / file.name)
    sync(other)


def _name_for_removal(path: Path) -> Path:
    """Returns a free name next to a directory, to rename it to before its removal."""
    gone = path.with_name(f"{path.name}.gone")
    if gone.exists():
        shutil.rmtree(gone, ignore_errors=True)
    return gone


def _latest(folder: Path) -> str:
    """Reads the name in `latest`; empty if that cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return read_regular(folder / LATEST, _LONGEST_NAME).decode().strip()
    return ""


def _listed(folder: Path) -> list[tuple[int, str, Path]]:
    """Lists directories that may be checkpoints: step, ending of the name ("", "tmp", "old"), path. Raises OSError."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), match[2] or "", path) for match, path in matches if match)


def named(folder: Path) -> list[Path]:
    """Lists the directories with the name of a complete checkpoint, damaged ones too, in the order of their steps."""
    with contextlib.suppress(OSError):
        return [path for _, ending, path in _listed(folder) if not ending]
    return []


def by_age(folder: Path) -> list[Path]:
    """Lists the directories that have an index, the one written last first.

    By their numbers; by the indexes' times where there are none.
    """
    found = []
    for step, ending, path in _listed(folder):
        if not ending or (ending == "old" and not path.with_name(path.stem).exists()):
            with contextlib.suppress(OSError):
                found.append((index.number_of(path), (path / index.NAME).stat().st_mtime_ns, step, path))
    return [path for *_, path in sorted(found, reverse=True)]


def is_complete(path: Path) -> bool:
    """Returns True if a directory's index is undamaged and all its files have their lengths."""
    try:
        check_files(index.read(path))
    except CheckpointError:
        return False
    return True


def check_files(content: Index) -> None:
    """Raises CheckpointError unless all files of all parts are there and have their lengths."""
    files = [
        (each.path / name, about) for each in parts.contents(content).values() for name, about in each.files.items()
    ]
    for path, about in files:
        try:
            size = size_of(path)
        except OSError as error:
            raise CheckpointError(f"{path}: is missing or cannot be read: {error.strerror}") from None
        if size != about["bytes"]:
            raise CheckpointError(f"{path}: is cut short or damaged: has {size} bytes, needs {about['bytes']}")


def newest(folder: str | Path, without: Collection[Path] = ()) -> tuple[Path | None, list[str]]:
    """Finds the newest complete checkpoint in a directory, and says why newer ones were passed over.

    Complete: the index is undamaged, and all files have their lengths. A missing directory has no checkpoint.
    without: checkpoints that are not wanted, such as one that turned out damaged while it was loaded.
    """
    passed: list[str] = []
    try:
        candidates = by_age(Path(folder))
    except FileNotFoundError:
        return None, passed
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    for _, ending, path in _listed(Path(folder)):
        if ending != "old" and path not in candidates:
            passed.append(f"{path}: was not finished")
    for path in candidates:
        if path in without:
            continue
        try:
            check_files(index.read(path))
        except CheckpointError as error:
            passed.append(str(error))
            continue
        return path, passed
    return None, passed


def find(path: Path, without: Collection[Path] = ()) -> tuple[Path | None, list[str]]:
    """Finds the checkpoint of a path: its directory, its index, a file `latest`, or a directory of checkpoints.

    Raises CheckpointError for another file.
    """
    if os.path.isfile(path):
        if path.name not in (index.NAME, LATEST):
            raise CheckpointError(f"{path}: is a file; needs the directory of a checkpoint, or of several")
        meant = path.parent if path.name == index.NAME else path.with_name(_latest(path.parent) or "nothing")
        if not os.path.exists(meant):
            return None, [f"{meant}: no such directory"]
        path = meant
    if os.path.exists(path / index.NAME):
        return path, []
    found, passed = newest(path, without)
    if not found and not passed and _NAME.fullmatch(path.name) and os.path.isdir(path):
        passed.append(f"{path}: was not finished")
    return found, passed


def path_of(given: Any) -> Path:
    """Converts an argument to a path. Raises ConfigurationError."""
    try:
        path = Path(given)
    except TypeError:
        raise ConfigurationError(f"path: got {type(given).__name__}; needs a directory's path") from None
    if "\0" in str(path):
        raise ConfigurationError(f"path: got {str(path)!r}; no name can hold a null character")
    return path
