"""Options and errors that all commands of mpidl have."""

from __future__ import annotations

import pytest

from mpidl.cli import Parser, add_device, choose_dtype, print_error
from mpidl.errors import UsageError


@pytest.fixture
def parser() -> Parser:
    made = Parser(prog="a")
    add_device(made)
    made.add_argument("--dtype")
    commands = made.add_subparsers(parser_class=Parser)
    commands.add_parser("inspect").add_argument("--tensors", action="store_true")
    return made


@pytest.mark.parametrize("line", ["--dev cuda", "inspect --tens", "--device auto", "--device tpu", "--device"])
def test_options_that_are_abbreviated_or_wrong_are_usage_errors(parser: Parser, line: str) -> None:
    with pytest.raises(UsageError, match=r"\(--help lists the options\)$"):
        parser.parse_args(line.split())


@pytest.mark.parametrize(
    ("line", "device", "dtype"),
    [("", "cpu", "fp32"), ("--device cuda", "cuda", "bf16"), ("--device cuda --dtype fp16", "cuda", "fp16")],
)
def test_the_device_is_the_cpu_unless_asked_and_gives_the_dtype(
    parser: Parser, line: str, device: str, dtype: str
) -> None:
    options = parser.parse_args(line.split())
    choose_dtype(options)
    assert (options.device, options.dtype) == (device, dtype)


def test_an_error_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(UsageError("no\n  such  file"))
    assert capsys.readouterr() == ("", "error: no such file\n")
