"""Command lines of programs that run on many ranks: options are read once, wrong ones end every rank in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from .communicator import Communicator

__all__ = ["Parser", "Refused", "at_least", "bytes_text", "check_writable", "names", "parse_together", "print_error"]

Options = TypeVar("Options")


class Refused(Exception):
    """Options that cannot be used. Its text: the option, its value and what is needed, in one line."""


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, which raises `refusal` in place of printing the usage and exiting."""

    refusal: type[Exception] = Refused

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raises the refusal."""
        raise self.refusal(f"{message} (--help lists the options)")


def print_error(error: object) -> None:
    """Prints one line, "error: ...", to the error output. Launchers may look for it."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def check_writable(path: Path | None, refusal: type[Exception] = Refused) -> None:
    """Raises the refusal if a file cannot be written there; creates it if it is not there."""
    if path is not None:
        try:
            with path.open("a"):
                pass
        except OSError as error:
            raise refusal(f"{path}: cannot be written: {error.strerror}") from None


def parse_together(
    comm: Communicator, parse: Callable[[], Options], check: Callable[[Options], None] = lambda options: None
) -> Options:
    """Returns rank 0's options on every rank. Collective.

    parse: reads them, on rank 0 alone; it may exit, as for `--help`: then every rank exits with its status.
    check: looks at them on every rank, for what may differ between ranks. Where either raises Refused on any rank, rank
        0 prints one line, "error: ...", and every rank exits with status 2. Any other error is raised where it occurs,
        and the other ranks exit with status 1.
    """
    found: Any = None
    refused: str | None = None
    failure: BaseException | None = None
    if comm.rank == 0:
        try:
            found = parse()
        except Refused as error:
            refused = str(error)
        except (Exception, SystemExit) as error:
            failure = error
    found, refused, status = comm.mpi.bcast((found, refused, _status(failure)))
    if status is not None:
        raise failure or SystemExit(status)
    if refused is None:
        problem = None
        try:
            check(found)
        except Refused as error:
            problem = str(error)
        except (Exception, SystemExit) as error:
            failure = error
        problems, statuses = zip(*comm.mpi.allgather((problem, _status(failure))), strict=True)
        if any(status is not None for status in statuses):
            raise failure or SystemExit(1)
        wrong = [rank for rank, text in enumerate(problems) if text is not None]
        if wrong:
            where = "" if len(wrong) == comm.size else f" (on rank {', '.join(map(str, wrong))})"
            refused = f"{problems[wrong[0]]}{where}"
    if refused is not None:
        if comm.rank == 0:
            print_error(refused)
        sys.exit(2)
    return found  # type: ignore[no-any-return]


def _status(failure: BaseException | None) -> int | None:
    """The status with which the other ranks exit after a failure; None after none."""
    if not isinstance(failure, SystemExit):
        return None if failure is None else 1
    return failure.code if isinstance(failure.code, int) else int(failure.code is not None)


def at_least(low: float, number: type = int) -> Callable[[str], Any]:
    """An argparse type: a number not below `low`."""

    def convert(text: str) -> Any:
        value = number(text)
        if not value >= low:
            raise argparse.ArgumentTypeError(f"got {text}; needs at least {low}")
        return value

    convert.__name__ = number.__name__
    return convert


def bytes_text(text: str) -> int:
    """A number of bytes: 64, 16K, 4M, 1G."""
    units = {"K": 10, "M": 20, "G": 30}
    value = int(text[:-1]) << units[text[-1].upper()] if text[-1:].upper() in units else int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}; needs at least one byte")
    return value


bytes_text.__name__ = "number of bytes"  # as argparse calls it


def names(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    """An argparse type: names with commas between, each one of `allowed`."""

    def convert(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        for name in found or [""]:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"got {name!r}; needs any of {','.join(allowed)}")
        return found

    return convert
