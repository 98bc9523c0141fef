"""Directories of checkpoints: which are complete, how one comes about in a single instant, which may go.

    step-00000020.tmp      being written: whatever it holds is no checkpoint, and the next save removes it
    step-00000020          complete: its files were on the disk, then its index, before it got this name
    step-00000010.old      replaced by another checkpoint of the same step
    step-00000010.gone     on its way to be removed
    latest                 a text file: the name of the checkpoint written last

A rename is the instant. Before it the former checkpoint is the newest, after it the new one. Where both are of one step
the former has a second name meanwhile, by hard links, so that `latest` names a complete checkpoint at any instant:

    20, .tmp    latest: 20    ->    20, .old, .tmp    latest: 20.old    ->    20 anew, .old    latest: 20

All names step-N.tmp, .old and .gone belong to saving; what this process still writes in the background for another
model is left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from ..ending import UNFINISHED
from ..errors import CheckpointError
from . import holding, index
from .index import Index
from .tensorfile import naming

LATEST = "latest"
_COMPLETE = re.compile(r"step-(\d{8,})(\.old)?")
_ONE_AT_A_TIME = threading.Lock()  # to change a directory's names: several saves may be under way
_LEFT = re.compile(r"step-\d{8,}(\.(tmp|old))?(\.gone)?")


def name_of(step: int) -> str:
    """The directory of a step."""
    return f"step-{step:08d}"


def sync(folder: Path) -> None:
    """Waits until the names in a directory are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a file beside and renames it: readers see the former text or the new one."""
    beside = path.with_name(f"{path.name}.tmp")
    with naming(beside), beside.open("wb") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def make(folder: Path) -> None:
    """Makes a directory and those above it, unless they are there, and waits until their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def begin(folder: Path, step: int) -> Path:
    """The directory to write into, new and empty; what earlier saves left behind is removed.

    The one above is this process's from now on: see `holding`.
    """
    make(folder)
    with _ONE_AT_A_TIME:
        holding.hold(folder)
        clean(folder)
    temporary = folder / f"{name_of(step)}.tmp"
    try:
        temporary.mkdir()
    except FileExistsError:
        raise CheckpointError(f"{temporary}: is still being written, for another model") from None
    return temporary


def clean(folder: Path) -> None:
    """Removes what interrupted saves left; a replaced checkpoint whose successor never came gets its name back.

    Unless another process is at it.
    """
    if holding.is_another_s(folder):
        return
    under_way = {path.absolute() for path in UNFINISHED}
    for path in sorted(folder.iterdir()):
        if not path.suffix or not _LEFT.fullmatch(path.name) or path.absolute() in under_way:
            continue
        if path.suffix == ".old":
            final = path.with_name(path.stem)
            if not final.exists() and not _give_second_name(path, final):
                path.rename(final)
            if _latest(folder) == path.name:
                write_text(folder / LATEST, f"{final.name}\n")
                sync(folder)
        shutil.rmtree(path, ignore_errors=True)


def commit(temporary: Path, content: Index, keep_last: int | None) -> Path:
    """Makes a written directory the newest checkpoint, and removes the oldest beyond `keep_last`.

    Its index is written, everything synced, then it gets its name, then `latest` names it.
    """
    with _ONE_AT_A_TIME:
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
        final.rename(_out_of_the_way(former))
    elif final.exists():
        final.rename(former)  # until the next line `latest` names nothing, and `newest` finds the former one
    temporary.rename(final)
    sync(folder)
    write_text(folder / LATEST, f"{final.name}\n")
    sync(folder)
    for useless in (former, _out_of_the_way(former)):
        shutil.rmtree(useless, ignore_errors=True)
    if keep_last is not None:
        kept = 0
        for path in by_age(folder):
            if kept < keep_last:
                kept += is_complete(path)
                continue
            with contextlib.suppress(OSError):  # what cannot be removed does no harm to the new one
                gone = _out_of_the_way(path)
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
    return final


def _give_second_name(path: Path, other: Path) -> bool:
    """Makes the directory `other` of the same files, complete at once; False where there are no hard links."""
    making = _out_of_the_way(other)
    try:
        making.mkdir()
        for file in path.iterdir():
            os.link(file, making / file.name)
        sync(making)
        making.rename(other)
    except OSError:
        shutil.rmtree(making, ignore_errors=True)
        return False
    return True


def _out_of_the_way(path: Path) -> Path:
    """A name that stands for nothing, beside a directory's; free."""
    gone = path.with_name(f"{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    return gone


def _latest(folder: Path) -> str:
    """What `latest` says; nothing if that cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / LATEST).read_text().strip()
    return ""


def named(folder: Path) -> list[Path]:
    """The directories with the name of a complete checkpoint, whatever is left of it, in the order of their steps."""
    found = []
    with contextlib.suppress(OSError):
        found = [path for path in folder.iterdir() if (match := _COMPLETE.fullmatch(path.name)) and not match[2]]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def by_age(folder: Path) -> list[Path]:
    """The directories that have an index, the newest first: in the order in which they were written.

    By their numbers; by the indexes' times where there are none.
    """
    found = []
    for path in folder.iterdir():
        match = _COMPLETE.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match and not (match[2] and path.with_name(path.stem).exists()):
                time = (path / index.NAME).stat().st_mtime_ns
                found.append((index.number_of(path), time, int(match[1]), path))
    return [path for *_, path in sorted(found, reverse=True)]


def is_complete(path: Path) -> bool:
    """Whether a directory's index is undamaged, and all files are there, as long as they were."""
    try:
        check_files(index.read(path))
    except CheckpointError:
        return False
    return True


def check_files(content: Index) -> None:
    """Raises CheckpointError unless all files are there, as long as they were."""
    for name, about in content.files.items():
        path = content.path / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: is missing or cannot be read: {error.strerror}") from None
        if size != about["bytes"]:
            raise CheckpointError(f"{path}: is cut short or damaged: has {size} bytes, needs {about['bytes']}")


def newest(folder: str | Path, without: Collection[Path] = ()) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint in a directory, and why newer ones were passed over.

    Complete: the index is undamaged, and all files are there, as long as they were. No directory, no checkpoint.
    without: checkpoints that are not wanted, such as one that turned out damaged while it was loaded.
    """
    passed: list[str] = []
    try:
        candidates = by_age(Path(folder))
    except FileNotFoundError:
        return None, passed
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    passed += [
        f"{path}: was not finished"
        for path in sorted(Path(folder).glob("step-*"))
        if re.fullmatch(r"step-\d{8,}(\.tmp)?", path.name) and path not in candidates
    ]
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
