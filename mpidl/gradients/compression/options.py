"""Reads the settings in the name of a method: "powersgd:4,fp16,min_rate=3" is the number 4, a word and a value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError


@dataclass(frozen=True)
class Option:
    """A value in a name.

    reads: makes it of its text, ValueError if that is none.
    fits: tests it.
    needs: in words.
    """

    reads: Callable[[str], Any]
    fits: Callable[[Any], bool]
    needs: str


@dataclass(frozen=True)
class Given:
    """The settings read.

    first: the number that begins them, None without.
    words, values: those given.
    """

    first: Any
    words: frozenset[str]
    values: dict[str, Any]


def read(
    method: str,
    text: str | None,
    first: tuple[str, Option],
    words: Collection[str] = (),
    values: Mapping[str, Option] | None = None,
) -> Given:
    """Reads the settings that follow the colon of a method's name.

    text: of them; None: there are none.
    first: name and kind of the number.
    words: allowed ones.
    values: allowed `name=value`.

    Raises ConfigurationError for wrong ones.
    """
    values = values or {}
    whole = method if text is None else f"{method}:{text}"
    leading, found_words, found_values = None, set(), {}
    for index, part in enumerate([] if text is None else text.split(",")):
        name, equals, value = part.partition("=")
        if equals and name in values:
            found_values[name] = _checked(whole, name, values[name], value)
        elif not equals and name in words:
            found_words.add(name)
        elif index == 0 and not equals:
            leading = _checked(whole, *first, part)
        else:
            allowed = [*words, *(f"{known}=..." for known in values)]
            raise ConfigurationError(
                f"compress: got {whole!r}: {part!r}; needs {method}:{first[0]}"
                + (f", then any of {', '.join(allowed)}" if allowed else " alone")
            )
    return Given(leading, frozenset(found_words), found_values)


def check(method: str, name: str, option: Option, value: Any) -> None:
    """Refuses a value that does not fit. Raises ConfigurationError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not option.fits(value):
        raise ConfigurationError(f"compress: {method}: {name}: got {value!r}; needs {option.needs}")


def _checked(whole: str, name: str, option: Option, text: str) -> Any:
    try:
        value = option.reads(text)
    except ValueError:
        value = None
    if value is None or not option.fits(value):
        raise ConfigurationError(f"compress: got {whole!r}: {name} {text!r}; needs {option.needs}")
    return value
