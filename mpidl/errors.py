"""Exceptions of mpidl, each derived from the built-in that fits, and the text of a list of names in their messages."""

from __future__ import annotations

from collections.abc import Sequence


class MpidlError(Exception):
    """Base of every error that this package raises by itself."""


class UsageError(MpidlError, ValueError):
    """Wrong use of a program: a missing file, options that do not fit. One line for the user, no traceback."""


class ConfigurationError(MpidlError, ValueError):
    """An argument or a combination of arguments that an engine cannot work with."""


class ConfigurationTypeError(ConfigurationError, TypeError):
    """An argument of a kind that an engine cannot work with, where torch raises a TypeError."""


class ConfigurationConflict(ConfigurationError, RuntimeError):
    """A call that does not fit what is there, where torch raises a RuntimeError: nothing to train, a second hook."""


class ModelMismatch(MpidlError, RuntimeError):
    """The ranks' models differ."""


class TrainingError(MpidlError, RuntimeError):
    """A step that cannot be carried out as asked: an unused parameter, sharded weights touched, ..."""


class CheckpointError(MpidlError, RuntimeError):
    """A checkpoint that cannot be written, or is torn, damaged, or of another model. Raised on every rank."""


class CheckpointMismatch(CheckpointError, ConfigurationError):
    """A checkpoint and arguments of another model, optimizer or training: a restart finds them no better."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names in words, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
