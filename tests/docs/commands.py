"""The programs that README and docs start, with the options that they give them."""

import shlex
from dataclasses import dataclass, field

from .snippets import Snippet

_OF_THE_READER = ("train.py",)


@dataclass
class Started:
    """A program as a line starts it. program: arguments of `python`, such as ("-m", "mpidl.memory")."""

    program: tuple[str, ...]
    options: list[str] = field(default_factory=list)


def programs(snippet: Snippet) -> list[Started]:
    """The Python programs of a shell block, those inside other commands too, with their long options.

    The reader's own train.py is left out.
    """
    variables: dict[str, str] = {}
    found: list[Started] = []
    for line in snippet.source.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        if len(words) == 1 and words[0].partition("=")[0].isupper():
            variables[words[0].partition("=")[0]] = words[0].partition("=")[2]
            continue
        while "python" in words:
            words = words[words.index("python") + 1 :]
            is_module = words[0] == "-m"
            started = Started(tuple(words[: 1 + is_module]))
            if started.program == _OF_THE_READER:
                continue
            if started.program == ("-m", "mpidl.checkpoint"):  # its options belong to commands
                started.program += (words[2],)
            end = words.index("python") if "python" in words else len(words)
            started.options = [word for word in words[:end] if word.startswith("--") and word != "--"]
            found.append(started)
    return found
