"""Groups the blocks of a model that plan="auto" cuts in the same way, so that a trial of one stands for all of them.

h.0, h.1, ... h.11    the same modules, shapes, attributes and styles: one kind, which `trial` tries once
h.12                  another number of heads, or a hook: a kind of its own
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .plans import StyledModules
from .regions import AttentionParallel, FeedForwardParallel
from .source import methods_of
from .styles import SequenceBegins, SequenceEnds, Style

_NUMBER = re.compile(r"(?:^|_)(?:idx|index|id|number|no)$")  # in the name of an attribute, that it numbers a module

Relative = dict[str, list[Style]]  # names in a block, and their styles


@dataclass
class BlockKind:
    """Blocks of a model with the same modules and settings, and what a plan does with them.

    names: of the blocks.
    plan: of the modules in each.
    template: a copy of the first one, without values.
    input: the name of the argument that comes in pieces.
    problem: why there is no copy.
    identity: what tells it from other kinds.
    differences_by_signature: how it differed, by what it was called with when it was tried
        (`trial._signature`): "" if it did not.
    has_run: whether any trial of it could run.
    """

    names: list[str]
    plan: Relative
    template: nn.Module | None
    input: str
    problem: str = ""
    identity: str = ""
    differences_by_signature: dict[Any, str] = field(default_factory=dict)
    has_run: bool = False

    @property
    def regions(self) -> list[str]:
        """Names in the block of what is cut by heads or by features."""
        return [name for name, styles in self.plan.items() if any(map(is_region, styles))]

    @property
    def patterns(self) -> list[str]:
        """The names of the blocks, with * for numbers where there are several."""
        if len(self.names) == 1:
            return self.names
        return list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in self.names))


def is_region(style: Any) -> bool:
    """Returns True for the style of an attention or of a feed-forward network."""
    return isinstance(style, AttentionParallel | FeedForwardParallel)


def block_kinds(model: nn.Module, found: StyledModules) -> Iterator[BlockKind]:
    """Groups the blocks that a plan cuts by what they are."""
    styles = {name: [s for s in some if not isinstance(s, SequenceBegins | SequenceEnds)] for name, _, some in found}
    units = {_block_around(model, name) for name, some in styles.items() if any(map(is_region, some))}
    units -= {inner for inner in units for outer in units if inner.startswith(f"{outer}.") and outer != inner}
    kinds: dict[str, BlockKind] = {}
    for unit, block in model.named_modules():
        if unit not in units:
            continue
        plan = {
            name[len(unit) :].strip("."): some
            for name, some in styles.items()
            if some and (name == unit or not unit or name.startswith(f"{unit}."))
        }
        identity = repr(
            (type(block), sorted((name, repr(some)) for name, some in plan.items()), _fingerprint(unit, block))
        )
        if identity in kinds:
            kinds[identity].names.append(unit)
        else:
            region = next(s for some in plan.values() for s in some if is_region(s))
            template, problem = _without_values(block, model)
            kinds[identity] = BlockKind(
                [unit], plan, template, getattr(region, "input", "hidden_states"), problem, identity
            )
    yield from kinds.values()


def _block_around(model: nn.Module, name: str) -> str:
    """The block in which a region is tried: the innermost element of a list, or what is around the region."""
    parts = name.split(".") if name else []
    for count in range(len(parts), 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: count - 1])), nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return ".".join(parts[:count])
    return ".".join(parts[:-1]) or name


def _fingerprint(unit: str, block: nn.Module) -> list[Any]:
    """Lists what may tell one block from another: shapes, attributes, hooks.

    But for what numbers it, such as layer_idx, where its source only hands that to a cache.
    """
    numbers = {int(part) + first for part in unit.split(".") if part.isdigit() for first in (0, 1)}
    found: list[Any] = []
    for name, module in block.named_modules():
        own = [
            (key, _fingerprint_of_value(value))
            for key, value in vars(module).items()
            if key not in ("training", "_parameters", "_buffers", "_modules")
            and not (type(value) is int and value in numbers and _is_index_alone(module, key))
        ]
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(key, tuple(t.shape), t.dtype, t.requires_grad) for key, t in tensors]
        found.append((name, type(module), sorted(own, key=repr), shapes))
    return found


def _fingerprint_of_value(value: Any) -> Any:
    """Returns what stands for a value: equal for equal plain ones, else its own."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, list | tuple | set):
        return type(value), [_fingerprint_of_value(each) for each in value]
    if isinstance(value, Mapping):  # of hooks the keys are their numbers
        return type(value), [
            (None if isinstance(key, int) else _fingerprint_of_value(key), _fingerprint_of_value(each))
            for key, each in value.items()
        ]
    return tuple(value.shape) if torch.is_tensor(value) else id(value)


def _is_index_alone(module: nn.Module, attribute: str) -> bool:
    """Returns whether an attribute numbers a module, and its methods use it only to find its place in a cache."""
    if _NUMBER.search(attribute) is None:
        return False
    lines = [line for method in methods_of(module) if method.name != "__init__" for line in method.text.split("\n")]
    return all("update(" in line for line in lines if re.search(rf"\bself\.{attribute}\b", line))


def _without_values(block: nn.Module, model: nn.Module) -> tuple[nn.Module | None, str]:
    """A copy of a block whose parameters and buffers have no memory; or None, and why it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for module in model.modules():
        recording = vars(module).get("_mpidl_recording")
        memo[id(recording)] = recording
    try:
        return copy.deepcopy(block, memo), ""
    except Exception as error:  # of the program's
        return None, f"it cannot be copied: {error}"
