"""Random changes of JSON: other types, missing and further fields, deep nesting, odd names and numbers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

DEEP = 100_000


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


ODD: list[Any] = [
    *[None, True, -1, 0, 7, 1 << 40, 1 << 70, 1.5, 1e300, "", "x", "a\0b", "\ud800", "/etc/passwd", "a" * 20_000],
    *[[], {}, [[]], {"": 0}, [-2, -3], [1 << 40, 1 << 40], [0, 1 << 62, 1 << 62], nested(80), nested(900)],
    *[{"$tensor": "extra/0"}, {"$tensor": "nothing"}, {"$tensor": 3}, {"$tuple": "x"}, {"$tuple": [1]}, {"$odd": 1}],
    *[{"$dict": [[[], 1]]}, {"$dict": [[{"$array": {"$tensor": "x"}}, 1]]}, {"$dict": 3}, {"$dict": [[1]]}],
    *[{"$float": "x"}, {"$bytes": "0"}, {"$bytes": "zz"}, {"$dtype": "load"}, {"$dtype": "int32"}],
    *[{"$scalar": ["int16", 1 << 20]}, {"$scalar": ["load", 1]}, {"$scalar": []}, {"$scalar": ["float32", "x"]}],
    *[{"$array": 3}, {"$array": {"$scalar": ["bfloat16", 1.0]}}, "$slices", "F64", "BF16", "NaN"],
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def mutated(content: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy with a random change at a random place, and what was changed."""
    made = copy.deepcopy(content)
    found = [*places(made)]
    # Tensors and states outnumber all else.
    top = rng.choice([*made])
    container, key = rng.choice([(made, top), *places(made[top])] if rng.random() < 0.7 else found)
    kind = rng.choice(["replace", "replace", "replace", "delete", "add", "number", "swap"])
    if kind == "number" and type(container[key]) is int:
        container[key] = rng.choice([container[key] + 1, container[key] - 1, -container[key], container[key] * 20_000])
    elif kind == "delete":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[rng.choice(["x", "$tensor", "params", "", "a\0", str(key)[:-1]])] = copy.deepcopy(container[key])
    elif kind == "add":
        container.append(copy.deepcopy(container[key]))
    elif kind == "swap":
        other, place = rng.choice(found)
        if other[place] is not container:
            container[key] = copy.deepcopy(other[place])
    else:
        container[key] = rng.choice(ODD)
    return made, f"{kind} {key}"


def as_text(content: Any, checksum: Callable[[Any], str]) -> str:
    """An index's text with the checksum that it should have."""
    content = {key: value for key, value in content.items() if key != "checksum"}
    try:
        return json.dumps({**content, "checksum": checksum(content)})
    except RecursionError:
        return json.dumps({**content, "extra": None, "checksum": "00000000"})
