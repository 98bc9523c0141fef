"""Runs a job, and starts it again from its newest checkpoint when it fails.

    python -m mpidl.launch --max-restarts 10 --checkpoint runs/a -- \\
        mpirun -n 4 python examples/gpt2_zero3.py --checkpoint-dir runs/a --save-every 50

The command must go on from its newest checkpoint by itself, as the example does. SIGTERM, SIGUSR1 and SIGHUP, that of
a closed terminal, are passed on as SIGUSR1, which asks the job to save and to stop; SIGINT ends it at once. The exit
status is 0 when the job is done, 75 when it was asked to stop and can go on, 130 when it was interrupted, 2 for wrong
use, else that of the last run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..cli import Parser, at_least, check_writable
from ..errors import UsageError
from .supervise import RestartPlan, Supervisor


def _numbers(text: str) -> list[int]:
    return [at_least(1)(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the options. Raises UsageError."""
    parser = Parser(
        prog="python -m mpidl.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-restarts", type=at_least(0), default=3, metavar="N", help="restarts in all (3)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="where the command saves, to see its progress")
    parser.add_argument(
        "--patience",
        type=at_least(1),
        default=3,
        metavar="K",
        help="give up after K runs in a row without a newer checkpoint (3)",
    )
    parser.add_argument(
        "--min-ranks",
        type=at_least(1),
        metavar="M",
        help="after a run without a newer checkpoint start one rank fewer, down to M",
    )
    parser.add_argument(
        "--ranks-divide",
        type=at_least(1),
        metavar="N",
        help="with --min-ranks: only numbers of ranks that divide N",
    )
    parser.add_argument(
        "--ranks-on-restart",
        type=_numbers,
        default=[],
        metavar="N,N,...",
        help="ranks of the first restart, the second, ...; the last number holds from there on",
    )
    parser.add_argument("--backoff", type=at_least(0, float), default=1.0, metavar="S", help="first pause, seconds (1)")
    parser.add_argument(
        "--longest-backoff", type=at_least(0, float), default=60.0, metavar="S", help="longest pause, seconds (60)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write there what became of each run")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    options = parser.parse_args(arguments)
    options.command = options.command[options.command[:1] == ["--"] :]
    if not options.command:
        parser.error("there is no command to run")
    if options.min_ranks is not None and options.ranks_on_restart:
        parser.error("--min-ranks and --ranks-on-restart: give one of them")
    if options.ranks_divide is not None and options.min_ranks is None:
        parser.error("--ranks-divide: needs --min-ranks")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit status."""
    try:
        options = parse(arguments)
        supervisor = Supervisor(
            RestartPlan(
                options.command,
                options.checkpoint,
                options.max_restarts,
                options.patience,
                options.backoff,
                options.longest_backoff,
                options.ranks_on_restart,
                options.min_ranks,
                options.ranks_divide,
            )
        )
        check_writable(options.json)
        try:
            return supervisor.run()
        finally:
            if options.json is not None:
                _write(options.json, json.dumps(supervisor.report(), indent=1) + "\n")
    except UsageError as error:
        print(f"mpidl.launch: error: {error}", file=sys.stderr)
        return 2


def _write(path: Path, text: str) -> None:
    """Writes the report. An error, such as of a full disk, leaves the exit status as it is."""
    try:
        path.write_text(text)
    except OSError as error:
        print(f"mpidl.launch: {path}: cannot be written: {error.strerror}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
