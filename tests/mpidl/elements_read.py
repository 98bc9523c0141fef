"""How many elements of each tensor of safetensors files are read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mpidl import model_files


def count_elements_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """From here on reads are counted, by the tensor's name in the files."""
    safe_open, problem = model_files.import_safe_open()
    read: Counter[str] = Counter()

    class Opened:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._file = safe_open(*arguments, **settings)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def keys(self) -> Any:
            return self._file.keys()

        def get_slice(self, key: str) -> Any:
            part = self._file.get_slice(key)

            class Counted:
                get_shape = part.get_shape

                def __getitem__(self, index: Any) -> Any:
                    found = part[index]
                    read[key] += found.numel()
                    return found

            return Counted()

    monkeypatch.setattr(model_files, "import_safe_open", lambda: (Opened, problem))
    return read
