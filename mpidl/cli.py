"""Options, errors and progress of every command: on many ranks they are printed once, and an error ends every rank.

`collectives.command_line` has what needs no model; this adds devices, compression and lines of progress.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from collectives import Communicator, command_line
from collectives.command_line import at_least as at_least
from collectives.command_line import bytes_text as bytes_text
from collectives.command_line import names as names
from collectives.command_line import print_error as print_error

from . import memory
from .errors import ConfigurationError, UsageError
from .gradients.compression import COMPRESSORS
from .gradients.compression.settings import OF_PARAMETERS, compression
from .job.agreement import agree_or_exit


class Parser(command_line.Parser):
    """argparse without abbreviations, with errors as UsageError."""

    refusal = UsageError


class ArgumentParser(Parser):
    """A parser of a program on many ranks, whose help rank 0 alone prints."""

    def __init__(self, comm: Communicator, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter, **settings)
        self._comm = comm

    def print_help(self, file: Any = None) -> None:
        """Prints the help, on rank 0 alone."""
        if self._comm.rank == 0:
            super().print_help(file)
            sys.stdout.flush()

    def parse_on_all_ranks(
        self, check: Callable[[argparse.Namespace], None], argv: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Parses and checks the options; wrong ones end every rank with status 2 and one line. Collective."""

        def parse() -> argparse.Namespace:
            options = self.parse_args(argv)
            check(options)
            return options

        return agree_or_exit(self._comm, parse)


def add_device(parser: Any) -> None:
    """Adds --device to a parser or a group of its options."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to train")


def choose_dtype(options: argparse.Namespace) -> None:
    """Gives --dtype, where it is left out, what is usual on the device: bf16 on a GPU, else fp32."""
    options.dtype = options.dtype or ("bf16" if options.device == "cuda" else "fp32")


class Progress:
    """A line from rank 0 for the first step, the last and about 25 between: speed, time left, memory.

    steps: of the whole training, which begins now.
    tokens: of all ranks in a step.
    before: steps of earlier runs.
    """

    def __init__(self, comm: Communicator, steps: int, tokens: int, before: int = 0) -> None:
        self._speaks, self._steps, self._tokens, self._before = comm.rank == 0, steps, tokens, before
        self._began = time.perf_counter()
        self._latest: deque[float] = deque(maxlen=10)

    def show(self, done: int, ms: float, measured: str) -> None:
        """Prints the progress after step `done`, counted from 1, which took `ms`. measured: a text such as its loss."""
        self._latest.append(ms)
        if self._speaks and (done in (self._before + 1, self._steps) or done % max(1, self._steps // 25) == 0):
            speed = self._tokens / statistics.median(self._latest) * 1e3
            left = int((time.perf_counter() - self._began) / (done - self._before) * (self._steps - done))
            print(
                f"step {done:5d}/{self._steps}  {measured}  {speed:7.0f} tokens/s  "
                f"{left // 60}:{left % 60:02d} left  {memory.rss_mib():.0f} MiB",
                flush=True,
            )


def add_compress(parser: Any) -> None:
    """Adds --compress; its value is None, or a text that `Compression` accepts."""
    parser.add_argument(
        "--compress", type=_method, metavar="METHOD", help=f"how gradients are sent: auto, {', '.join(COMPRESSORS)}"
    )


def add_compress_parameters(parser: Any) -> None:
    """Adds --compress-parameters: None, or a method of ZeroOptimizer's argument."""
    parser.add_argument(
        "--compress-parameters", choices=OF_PARAMETERS, help="how ZeRO-3 gathers parameters, over several nodes"
    )


def _method(text: str) -> str:
    try:
        compression(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("compress: ")) from None
    return text


def check_writable(path: Path | None) -> None:
    """Raises UsageError if a file cannot be written there; creates it if it is not there."""
    command_line.check_writable(path, UsageError)
