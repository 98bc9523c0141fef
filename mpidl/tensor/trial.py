"""Tries out what plan="auto" cuts: whether a block computes the same cut and whole, gradients too.

    a block of the model    -> a copy without values, before the model is cut
    a call of the block     -> its arguments; the input is replaced by random numbers
                               copy, whole  |  copy, cut over tp as in the plan      the same random weights
                               outputs, gradients of the input, of each parameter: equal?

The plan is read from source, and a program may do what the reading has not seen: a function that looks at all features,
a number of heads from elsewhere, a weight that another module reads. It computes something else then, without an error.
So each kind of block is tried. In `parallelize` with its input alone, where its forward pass takes that; what differs
stays whole. And in its first call with other arguments, such as masks, where a difference is an error.

The copies compute in double precision, in single where a block is large, or in the parameters' own where nothing else
runs; without dropout. A trial touches no parameter of the model and no random number. It runs in a thread of its own,
so that autocast, checkpoints and no_grad around the call do not reach it.
"""

from __future__ import annotations

import copy
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compiling import uncompiled
from ..errors import ConfigurationError
from ..job.objects import all_gather_object
from ..mesh import Mesh
from ..module_tensors import tensors_in
from .communication import TensorGroup
from .input_check import sums_of
from .linear import kind_of, sizes_of
from .plans import Found
from .regions import AttentionParallel, FeedForwardParallel, joined
from .styles import Argument, SequenceBegins, SequenceEnds, Style
from .tensor_parallel import TensorParallel
from .trial_copies import Alone, Copies, Root, dtypes_of

_BATCH, _TOKENS = 3, 7  # of an input that is made up; no number of heads or of ranks divides both
_NUMBER = re.compile(r"(?:^|_)(?:idx|index|id|number|no)$")  # in the name of an attribute, that it numbers a module

Relative = dict[str, list[Style]]  # names in a block, and their styles
Apply = Callable[[nn.Module, Relative, TensorParallel], None]


@dataclass
class Kind:
    """Blocks of a model with the same modules and settings, and what a plan does with them.

    names: of the blocks.
    plan: of the modules in each.
    template: a copy of the first one, without values.
    input: the name of the argument that comes in pieces.
    problem: why there is no copy.
    alone: whether it was tried with its input alone.
    """

    names: list[str]
    plan: Relative
    template: nn.Module | None
    input: str
    problem: str = ""
    alone: bool = False

    @property
    def regions(self) -> list[str]:
        """Names in the block of what is cut by heads or by features."""
        return [name for name, styles in self.plan.items() if any(map(_is_region, styles))]

    @property
    def pattern(self) -> str:
        """The names as one, with * for numbers."""
        first = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", self.names[0])
        return first if len(self.names) > 1 else self.names[0]


class Trials:
    """The kinds of blocks that a plan cuts, to be tried over the ranks of tp. Made before the model is cut.

    apply: carries out the plan of a block on a module that has it as `block`.
    """

    def __init__(self, model: nn.Module, found: Found, mesh: Mesh, apply: Apply, *, sequence_parallel: bool) -> None:
        self._model = weakref.ref(model)
        self._mesh, self._apply, self._sequence_parallel = mesh, apply, sequence_parallel
        self._kinds = list(_kinds(model, found))

    def wrong_alone(self) -> dict[str, str]:
        """Tries each kind with its input alone. Returns the names of regions that differ, and how. Collective."""
        found: dict[str, str] = {}
        for kind in self._kinds:
            block = self._block(kind)
            made = _made_up_input(block, kind)
            if made is None:
                continue
            wrong = self.difference(kind, block, kind.plan, (made,), {})
            kind.alone = wrong is not None
            if not wrong:
                continue
            by_itself = {
                name: self.difference(kind, block, {name: kind.plan[name]}, (made,), {}) for name in kind.regions
            }
            differing = {name: how for name, how in by_itself.items() if how}
            for region in differing or kind.regions:
                how = differing.get(region) or wrong
                for name in kind.names:
                    found[joined(name, region)] = f"cut, it computes something else: {how}"
        return found

    def _block(self, kind: Kind) -> nn.Module:
        model = self._model()
        assert model is not None
        return model.get_submodule(kind.names[0])

    def try_first_calls(self, tp: TensorParallel) -> None:
        """Has each kind tried in its first call in which it gets more than it was tried with. tp: of the model."""
        for kind in self._kinds:
            block = self._block(kind)
            tp.keep(block.register_forward_pre_hook(_FirstCall(self, kind, tp), with_kwargs=True, prepend=True))

    def difference(
        self,
        kind: Kind,
        block: nn.Module,
        plan: Relative,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        warns: bool = False,
    ) -> str | None:
        """How the cut copy differs: "" if it does not, None if it cannot be tried. The same on every rank. Collective.

        block: one of the kind, for its buffers and its mode.
        warns: say so where it cannot be tried.
        """
        found: list[str | None] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(self._tried(kind, block, plan, args, kwargs, warns))
            except BaseException as error:  # raised in the caller's thread
                failed.append(error)

        thread = threading.Thread(target=run, name="mpidl-trial")
        thread.start()
        thread.join()
        if failed:  # in a way that is not the program's
            raise failed[0]
        everyone = all_gather_object(self._mesh["tp"], found[0])
        return next((each for each in everyone if each), found[0])

    def _tried(
        self,
        kind: Kind,
        real: nn.Module,
        plan: Relative,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        warns: bool,
    ) -> str | None:
        device = next((t.device for t in tensors_in((args, kwargs))), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        template, problem = kind.template, kind.problem or self._unequal(kind, real, args, kwargs)
        with torch.random.fork_rng(devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for dtype in [] if problem else dtypes_of(real):
                assert template is not None  # as there is no problem
                for training in (True, False) if self._sequence_parallel or real.training else (False,):
                    copies = Copies(template, kind.input, real, args, kwargs, dtype, device, training=training)
                    failed = self._any(copies.run_whole)
                    if failed:
                        problem = failed
                        continue
                    # By itself first: where it fails on one rank the others would wait for it.
                    failed = self._any(partial(copies.run_alone, self._cut(kind, plan, copies, True)))
                    failed = failed or self._any(partial(copies.compare, self._cut(kind, plan, copies, False)))
                    return f"it fails with {failed}" if failed else copies.wrong
        if warns:
            text = problem.strip().split("\n")[0][:200]
            warnings.warn(
                f"plan='auto': {kind.pattern} could not be tried by itself ({text}); compare a step with one process",
                stacklevel=2,
            )
        return None

    def _any(self, run: Callable[[], Any]) -> str:
        """Runs something on every rank. Returns what it failed with on any of them, "" if it did not. Collective."""
        failed = ""
        try:
            run()
        except Exception as error:  # of the program's
            failed = f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]
        return next(filter(None, all_gather_object(self._mesh["tp"], failed)), "")

    def _unequal(self, kind: Kind, real: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Says so if an argument besides the input is not the same on all ranks, as biases of their heads."""
        x = Argument(real, kind.input).of(args, dict(kwargs))
        mine = [(tuple(t.shape), () if t is x else sums_of(t)) for t in tensors_in((args, kwargs))]
        everyone = all_gather_object(self._mesh["tp"], repr(mine))
        return "" if everyone.count(everyone[0]) == len(everyone) else "an argument is not the same on all ranks"

    def _cut(self, kind: Kind, plan: Relative, copies: Copies, alone: bool) -> Callable[[nn.Module], nn.Module]:
        """Returns what cuts a copy. alone: it computes without the other ranks, and something else."""

        def cut(block: nn.Module) -> nn.Module:
            root = Root(block)
            tp = TensorParallel(self._mesh, sequence_parallel=self._sequence_parallel and copies.training)
            if alone:
                tp.group = TensorGroup(Alone(tp.comm))  # type: ignore[arg-type]
            tp.model = weakref.ref(root)
            named = {joined("block", name): list(styles) for name, styles in plan.items()}
            if tp.sequence_parallel:
                named.setdefault("block", []).extend([SequenceBegins(kind.input), SequenceEnds()])
            self._apply(root, named, tp)
            root.register_forward_pre_hook(lambda *_: tp.end_pass())
            root.register_forward_hook(lambda *_: tp.end_pass(), always_call=True)
            return root

        return cut


class _FirstCall:
    """Hook before a block's forward pass, which tries its kind once."""

    def __init__(self, trials: Trials, kind: Kind, tp: TensorParallel) -> None:
        self._trials, self._kind, self._tp = trials, kind, tp
        self._done = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _FirstCall:
        return self  # a copy of the model is cut like the model

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._done and not torch.compiler.is_compiling():
            self._look(block, args, kwargs)

    @uncompiled
    def _look(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind, length = self._kind, self._tp.length
        argument = Argument(block, kind.input)
        x = argument.of(args, kwargs)
        given = [each for each in (*args, *kwargs.values()) if each is not None]
        if kind.alone and len(given) == 1:
            return
        self._done = True
        if torch.is_tensor(x) and length is not None and x.dim() > 1 and x.shape[1] != length:
            whole = x.new_empty(x.shape[0], length, *x.shape[2:])  # its values do not matter
            args, kwargs = argument.replaced(args, kwargs, whole)
        warns = self._tp.rank == 0 and not kind.alone
        wrong = self._trials.difference(kind, block, kind.plan, args, kwargs, warns=warns)
        kind.template = None
        if wrong:
            regions = ", ".join(joined(kind.pattern, region) for region in kind.regions)
            raise ConfigurationError(
                f"parallelize: plan='auto': {kind.pattern} computes something else when it is cut over "
                f"{self._tp.ranks} ranks: {wrong}; needs leave_whole= with some of {regions}, or a plan by hand"
            )


def _is_region(style: Any) -> bool:
    return isinstance(style, AttentionParallel | FeedForwardParallel)


def _kinds(model: nn.Module, found: Found) -> Iterator[Kind]:
    """Groups the blocks that a plan cuts by what they are."""
    styles = {name: [s for s in given if not isinstance(s, SequenceBegins | SequenceEnds)] for name, _, given in found}
    units = {_unit(model, name) for name, given in styles.items() if any(map(_is_region, given))}
    units -= {inner for inner in units for outer in units if inner.startswith(f"{outer}.") and outer != inner}
    kinds: dict[Any, Kind] = {}
    for unit, block in model.named_modules():
        if unit not in units:
            continue
        plan = {
            name[len(unit) :].strip("."): given
            for name, given in styles.items()
            if given and (name == unit or not unit or name.startswith(f"{unit}."))
        }
        key = repr((type(block), sorted((name, repr(given)) for name, given in plan.items()), _settings(unit, block)))
        if key in kinds:
            kinds[key].names.append(unit)
            continue
        given = next(s for some in plan.values() for s in some if _is_region(s))
        template, problem = _without_values(block, model)
        kinds[key] = Kind([unit], plan, template, getattr(given, "input", "hidden_states"), problem)
    yield from kinds.values()


def _unit(model: nn.Module, name: str) -> str:
    """The block in which a region is tried: the innermost element of a list, or what is around the region."""
    parts = name.split(".") if name else []
    for count in range(len(parts), 0, -1):
        if isinstance(model.get_submodule(".".join(parts[: count - 1])), nn.ModuleList | nn.Sequential | nn.ModuleDict):
            return ".".join(parts[:count])
    return ".".join(parts[:-1]) or name


def _settings(unit: str, block: nn.Module) -> list[Any]:
    """Shapes and plain attributes of all modules in a block, but for what numbers it, such as layer_idx."""
    numbers = {int(part) + first for part in unit.split(".") if part.isdigit() for first in (0, 1)}
    found: list[Any] = []
    for name, module in block.named_modules():
        own = [
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, int | float | str)
            and key != "training"
            and not (type(value) is int and value in numbers and _NUMBER.search(key))
        ]
        shapes = [(key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False)]
        found.append((name, type(module), sorted(own), shapes))
    return found


def _without_values(block: nn.Module, model: nn.Module) -> tuple[nn.Module | None, str]:
    """A copy of a block whose parameters have no memory; or None, and why it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    for module in model.modules():
        recording = vars(module).get("_mpidl_recording")
        memo[id(recording)] = recording
    try:
        return copy.deepcopy(block, memo), ""
    except Exception as error:  # of the program's
        return None, f"it cannot be copied: {error}"


def _made_up_input(block: nn.Module, kind: Kind) -> torch.Tensor | None:
    """An input for a block; None where the width is not known."""
    for region in kind.regions:
        style: Any = next(s for s in kind.plan[region] if _is_region(s))
        first = style.inputs[0] if isinstance(style, FeedForwardParallel) else style.fused or style.query
        layer = block.get_submodule(joined(region, first))
        if kind_of(layer) is not None:
            weight = next(layer.parameters())
            width = sizes_of(region, layer)[0]
            device = torch.device("cpu") if weight.is_meta else weight.device
            return torch.empty(_BATCH, _TOKENS, width, device=device)
    return None
