"""State that the cut layers of a model share: the ranks of tp, whether sequences are in pieces, and the random numbers.

    replicated   every rank of tp computes the same: embeddings, residuals, norms           the same random numbers
    in a region  between a column-parallel and a row-parallel layer: other heads, features  a stream for each rank
    on pieces    sequence parallel: everything from the first block to the last norm        a stream for each rank

The stream of a rank begins with a seed that is drawn from the default generator, which is in the same state on all
ranks of tp. So its state is the only one that a checkpoint has to keep, and activation checkpoints, which restore it
before they compute again, restore the streams as well. With dropout by index (`dropout`) there are no streams.
"""

from __future__ import annotations

import ast
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from ..compiling import uncompiled
from ..errors import TrainingError
from ..mesh import Cut, Mesh, placement
from .communication import TensorGroup
from .functions import KeepsRowSums, copy_to_region, summed_gradients
from .local_elements import LocalPart
from .regathered import GatheredInput
from .sizes import Heads, run_of
from .source import methods_of, run_by
from .step_checks import watch_steps

ATTRIBUTE = "_mpidl_tensor_parallel"  # of a model that is cut
_ODD = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: seeds of neighbouring ranks lie far from each other


@dataclass(frozen=True)
class _RandomStream:
    """Random numbers of this rank's own. before: the generator's state, which comes back when the stream ends."""

    generator: torch.Generator
    before: torch.Tensor
    seed: int
    of_region: bool

    def goes_on(self) -> bool:
        """Returns whether the generator is still in the stream; an activation checkpoint may have restored it."""
        return self.generator.initial_seed() == self.seed


class TensorParallel:
    """State that the cut layers of one model share. sequence_parallel: sequences are in pieces in training mode.

    overlaps: the pieces are gathered while the ranks compute.

    length: of the sequences that are in pieces at this place of a forward pass, and where a backward pass computes
        activations again; None where they are whole.
    region_length: the same for the region that began last.
    regions: their names.
    local_part: what this rank computes of the region that runs.
    gathered: the input of that region, while it is gathered from pieces.
    changes: what undoes the cuts, in order; of layers that a model is written with, none.
    summed: parameters whose gradients are summed over the ranks.
    recorded: of a model from deferred_init, the recordings, and where the whole values of its tensors are on their
        tapes.
    model: the one that was cut, not a copy of it.
    refused: why a plan does not fit on this rank, which others may not see.
    kept_sums: keeps outputs of row-parallel layers for a checkpoint.
    """

    def __init__(
        self, mesh: Mesh, *, sequence_parallel: bool = False, by_index: bool = False, overlaps: bool = False
    ) -> None:
        self.mesh, self.comm = mesh, mesh["tp"]
        self.rank, self.ranks = self.comm.rank, self.comm.size
        self.group = TensorGroup(self.comm, overlaps=overlaps)
        self.sequence_parallel = sequence_parallel and self.ranks > 1
        self.by_index = by_index
        self._length: int | None = None  # in a forward pass
        self._length_again: int | None = None  # in a backward pass
        self._ended_in: int | None = None  # the node of a backward pass whose activations have left the pieces
        self.region_length: int | None = None
        self.regions: list[str] = []
        self.local_part: LocalPart | None = None
        self.gathered: GatheredInput | None = None
        self.changes: list[Callable[[], Any]] | deque[Callable[[], Any]] = []
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.summed: set[torch.Tensor] = set()
        self.recorded: list[tuple[Any, dict[torch.Tensor, Any]]] = []
        self.refused: list[str] = []
        self.kept_sums: KeepsRowSums | None = None
        self._sharers: dict[int, TensorGroup] = {}  # by the number of key/value heads
        self._stream: _RandomStream | None = None
        watch_steps(self)

    @classmethod
    def of_layers(cls, mesh: Mesh) -> TensorParallel:
        """Returns what all layers that models are written with share on a mesh, which keeps it."""
        mesh["tp"]  # refuses a closed mesh
        if "_tensor_parallel" not in vars(mesh):
            made = cls(mesh)
            made.changes = deque(maxlen=0)  # the layers are never whole, and may go before the mesh does
            vars(mesh)["_tensor_parallel"] = made
        return vars(mesh)["_tensor_parallel"]  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # copies of a model compute with the same ranks

    # ---- changes to a model ------------------------------------------------------------------------------------------

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, until the cuts are undone."""
        before = getattr(owner, name)
        if name in vars(owner) or name == "__class__":
            self.changes.append(lambda: setattr(owner, name, before))
        else:
            self.changes.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def keep(self, handle: Any) -> None:
        """Keeps the handle of a hook, which is removed when the cuts are undone."""
        self.changes.append(handle.remove)

    def sum_gradients(self, module: nn.Module, heads: Heads | None = None, *, if_in_pieces: bool) -> None:
        """Sums the gradients of a module's parameters over the ranks of tp, each of which has a summand. Collective.

        Not of modules in it whose own gradients are summed, nor of layers in it that are cut.

        heads: those of this rank, whose sharers sum; None: all ranks do.
        if_in_pieces: only of passes in which sequences are in pieces.
        """
        group = self.group if heads is None else self.group_of(heads)
        self.summed.update(module.parameters())
        self.set(module, "forward", _SumsGradients(module, self, group, if_in_pieces))

    @property
    def groups(self) -> list[TensorGroup]:
        """Collectives over all ranks of tp, and over groups of them that share heads."""
        return [self.group, *self._sharers.values()]

    def group_of(self, heads: Heads) -> TensorGroup:
        """Collectives over the ranks that share these key/value heads. Collective at first."""
        if len(heads.sharers) == self.ranks:
            return self.group
        if (
            heads.total_key_heads not in self._sharers
        ):  # which tells the groups of all ranks, so that all come to `split_axis`
            division = f"sharers of {heads.total_key_heads} key/value heads"
            self._sharers[heads.total_key_heads] = TensorGroup(self.mesh.split_axis("tp", division, heads.sharers[0]))
        return self._sharers[heads.total_key_heads]

    # ---- sequences in pieces -----------------------------------------------------------------------------------------

    @property
    def length(self) -> int | None:
        """The whole length of the sequences that are in pieces here; None where they are whole."""
        return self._length_here() if self.sequence_parallel else None

    @uncompiled
    def _length_here(self) -> int | None:
        node = _backward_node()
        if node is None:
            return self._length
        return None if node == self._ended_in else self._length_again

    def begin_pieces(self, length: int) -> None:
        """Begins the part of a forward pass in which sequences of this length are in pieces."""
        if length < self.ranks:
            raise TrainingError(
                f"sequence parallelism: got sequences of {length} tokens on {self.ranks} ranks of tp; needs at least "
                "one for each"
            )
        self._set_length(length)

    @uncompiled
    def _set_length(self, length: int | None) -> None:
        self._ended_in = None
        if _backward_node() is None:
            self._length = length
        self._length_again = length

    @uncompiled
    def end_pieces(self) -> None:
        """Ends that part, and the stream of random numbers: what follows has whole sequences.

        In a backward pass, only for what the same node computes again: blocks before it are to come.
        """
        self.end_stream()
        node = _backward_node()
        if node is None:
            self._length = None
        else:
            self._ended_in = node

    def whole_pass(self) -> None:
        """Begins a pass in which all sequences are whole, as in evaluation."""
        self._set_length(None)

    def in_backward(self, length: int | None) -> None:
        """Takes up the length of the forward pass whose backward pass this is; others may have come in between."""
        self._length_again, self._ended_in = length, None

    def length_of(self, x: torch.Tensor) -> int | None:
        """Returns the whole length of sequences of which `x` has pieces; None if it has whole ones."""
        length = self.length
        if length is not None and x.dim() != 3:
            raise TrainingError(
                f"sequence parallelism: got an input of shape {tuple(x.shape)} of layers that are cut; needs "
                "[batch, sequence, width]"
            )
        if length is None or x.shape[1] == self.group.piece_lengths(length)[self.rank]:
            return length
        if x.shape[1] != length:
            raise TrainingError(
                f"sequence parallelism: got {x.shape[1]} tokens where sequences of {length} were in pieces last; "
                "needs a backward pass before a forward pass of another length, if it computes activations again"
            )
        return None

    def has_pieces(self, x: Any) -> bool:
        """Returns whether a module with this input computes on pieces, or between two that do."""
        return self.length is not None and not (torch.is_tensor(x) and x.dim() > 1 and x.shape[1] == self.length)

    # ---- regions -----------------------------------------------------------------------------------------------------

    def begin_region(self, x: torch.Tensor) -> int | None:
        """Begins a region. Returns the whole length of sequences of which `x` has pieces; None if whole."""
        self.region_length = self.length_of(x)
        return self.region_length

    def enter_region(self, x: torch.Tensor) -> torch.Tensor:
        """Begins a region, and returns its input: x, or what is gathered of its pieces, with the sum of gradients."""
        length = self.begin_region(x)
        if length is None:
            return copy_to_region(x, self.group)
        self.gathered = GatheredInput(x, self.group, length)
        return self.gathered.x

    def end_region(self) -> None:
        """Ends a region, and its stream of random numbers."""
        self.local_part = self.gathered = None
        if torch.compiler.is_compiling() or self._stream is not None:
            self.end_stream(of_region=True)

    def end_pass(self) -> None:
        """Ends a forward pass of the model, and all that one which failed has left open."""
        self.end_region()
        self.end_pieces()

    def end_passes_of(self, model: nn.Module) -> None:
        """Ends a pass as each forward pass of the model begins and ends, until the cuts are undone."""
        self.keep(model.register_forward_pre_hook(lambda *_: self.end_pass()))
        self.keep(model.register_forward_hook(lambda *_: self.end_pass(), always_call=True))

    def cut_of(self, x: torch.Tensor, dim: int | None = None) -> Cut:
        """Returns the elements of a whole tensor that `x` has. dim: that of heads, if it is known."""
        if self.local_part is not None:
            return self.local_part.cut(x.shape, dim)
        shape, length = tuple(x.shape), self.length
        if length is not None and x.dim() > 2 and shape[1] == self.group.piece_lengths(length)[self.rank]:
            return Cut.along((shape[0], length, *shape[2:]), 1, [run_of(length, self.ranks, self.rank)])
        return Cut(shape, tuple(((0, size),) for size in shape))

    # ---- random numbers ----------------------------------------------------------------------------------------------

    @uncompiled
    def begin_stream(self, device: torch.device, *, of_region: bool = False) -> None:
        """Begins a stream of this rank's own random numbers on the device, until the region or all pieces end."""
        if self.by_index or (self._stream is not None and self._stream.goes_on()):
            return
        generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
        drawn = int(torch.randint(0, 1 << 62, (), device=device))
        seed = (drawn + (self.rank + 1) * _ODD) % (1 << 63)
        self._stream = _RandomStream(generator, generator.get_state(), seed, of_region)
        generator.manual_seed(seed)

    @uncompiled
    def end_stream(self, *, of_region: bool = False) -> None:
        """Ends the stream: random numbers are the same on all ranks of tp again, and go on where it began."""
        stream = self._stream
        if stream is not None and stream.of_region >= of_region:
            self._stream = None
            if stream.goes_on():
                stream.generator.set_state(stream.before)


def _backward_node() -> int | None:
    """The number of the node of a graph that a backward pass computes in this thread; None in a forward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


class _SumsGradients:
    """The forward pass of a module whose parameters' gradients are summed over ranks of tp.

    The module computes with what `summed_gradients` makes of its parameters, which are its own again afterwards.
    """

    def __init__(self, module: nn.Module, tp: TensorParallel, group: TensorGroup, if_in_pieces: bool) -> None:
        self._module, self._tp, self._group, self._if_in_pieces = module, tp, group, if_in_pieces
        self._before = vars(module).get("forward")  # one that was set in place of the class's

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        forward = self._before or type(module).forward.__get__(module)
        whole = self._if_in_pieces and self._tp.length is None
        if whole or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        owners = [(owner, owner._parameters) for owner in self._owners(module) if owner._parameters]
        trained = [*dict.fromkeys(p for _, own in owners for p in own.values() if p is not None and p.requires_grad)]
        if not trained:
            return forward(*args, **kwargs)
        summed = dict(zip(trained, summed_gradients(trained, self._group), strict=True))
        try:
            for owner, own in owners:
                owner.__dict__["_parameters"] = {name: summed.get(p, p) for name, p in own.items()}  # type: ignore[arg-type]
            return forward(*args, **kwargs)
        finally:
            for owner, own in owners:
                owner.__dict__["_parameters"] = own

    def _owners(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yields a module and all in it, but for those whose own gradients are summed, and layers that are cut."""
        yield module
        for inner in module.children():
            is_cut = any(p is not None and placement(p).cut is not None for p in inner._parameters.values())
            if not is_cut and not isinstance(vars(inner).get("forward"), _SumsGradients):
                yield from self._owners(inner)


class Dropouts:
    """Tells whether modules draw random numbers: whether any of their probabilities of dropout is above 0.

    It looks at numbers of the modules, and of objects and dictionaries such as a config that these refer to, and for
    calls of a dropout function in their sources: at the number that an attribute, such as self.config.attention.rate,
    has there. One with a literal draws, and so does one of which nothing is known; and what draws other numbers.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._rates: list[tuple[Any, str]] = []
        self._noted: set[tuple[int, str]] = set()
        self._in_source = False
        seen: dict[int, bool] = {}  # settings, and whether they have a rate
        for module in (inner for root in modules for inner in root.modules()):
            known = self._look_at(module, vars(module))
            for value in vars(module).values():
                if isinstance(value, dict) and not isinstance(value, OrderedDict):
                    known |= self._look_at(value, value)
                if _holds_settings(value):
                    if id(value) not in seen:
                        seen[id(value)] = self._look_at(value, vars(value))
                    known |= seen[id(value)]
            draws, maybe, paths = _rates_in_source(module)
            for path in paths:
                if self._follow(module, path):
                    known = True
                else:
                    maybe = True
            self._in_source |= draws or (maybe and not known)

    def _look_at(self, owner: Any, held: Mapping[Any, Any]) -> bool:
        """Notes what looks like a rate; tells whether there is any."""
        found = [
            name
            for name, value in held.items()
            if isinstance(name, str) and isinstance(value, (int, float)) and ("drop" in name or name == "p")
        ]
        for name in found:
            self._note(owner, name)
        return bool(found)

    def _follow(self, owner: Any, path: str) -> bool:
        """Notes the rate that a path of attributes leads to; tells whether there is one."""
        *parts, last = path.split(".")
        for part in parts:
            owner = getattr(owner, part, None)
        value = getattr(owner, last, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):  # self.training is a factor of some
            self._note(owner, last)
        return isinstance(value, (int, float))

    def _note(self, owner: Any, name: str) -> None:
        if (id(owner), name) not in self._noted:
            self._noted.add((id(owner), name))
            self._rates.append((owner, name))

    def end(self) -> Callable[[], None]:
        """Sets all rates that were found to 0; returns what sets them to what they were."""
        owners = [owner if isinstance(owner, dict) else vars(owner) for owner, _ in self._rates]
        before = [own.get(name, self) for own, (_, name) in zip(owners, self._rates, strict=True)]

        def put(owner: Any, name: str, value: Any) -> None:
            if isinstance(owner, dict):
                owner[name] = value
            elif value is self:  # it is an attribute of the class
                delattr(owner, name)
            else:
                setattr(owner, name, value)

        for owner, name in self._rates:
            put(owner, name, 0.0)
        rates = list(self._rates)

        def undo() -> None:
            for (owner, name), value in zip(rates, before, strict=True):
                put(owner, name, value)

        return undo

    def __bool__(self) -> bool:
        if self._in_source:
            return True
        rates = (
            owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None) for owner, name in self._rates
        )
        return any(isinstance(rate, (int, float)) and rate > 0.0 for rate in rates)


_DROPOUT = re.compile(r"(?:^|\.)(?:\w+_)?dropout(?:[123]d)?_?$")
_RANDOM = re.compile(
    r"(?:^|\.)(?:rand\w*|(?:bernoulli|normal|uniform|exponential|poisson|rrelu)_?|multinomial|gumbel_softmax)$"
)


def _rates_in_source(module: nn.Module) -> tuple[bool, bool, set[str]]:
    """Reads a module's methods for calls of dropout functions and of others that draw random numbers.

    Returns whether one draws whatever the settings are, whether one has a rate that is not known, and the paths of
    attributes that are rates.
    """
    if type(module).__module__.startswith("torch."):
        return isinstance(module, nn.RReLU), False, set()
    methods = methods_of(module)
    found = [_dropouts_in(method.text) for method in methods]
    calls = (call for method in run_by(module) for call in method.calls)
    draws = any(_RANDOM.search(call) is not None for call in calls if not call.startswith("self."))
    return (
        draws or any(literal for literal, _, _ in found),
        any(unknown for _, unknown, _ in found),
        {path for _, _, paths in found for path in paths},
    )


@cache
def _dropouts_in(text: str) -> tuple[bool, bool, frozenset[str]]:
    """Reads a method: whether a literal rate is above 0, whether one is not known, and paths of attributes for others.

    text: of the method.
    """
    tree = ast.parse(text)
    values: dict[str, list[ast.expr]] = {}  # of variables
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    literal = unknown = False
    paths: set[str] = set()
    left = [rate for node in ast.walk(tree) if isinstance(node, ast.Call) for rate in _rates_of(node)]
    while left:
        rate = left.pop()
        if isinstance(rate, ast.Constant):
            literal |= bool(rate.value)
        elif isinstance(rate, ast.IfExp):
            left += [rate.body, rate.orelse]
        elif isinstance(rate, ast.BinOp):
            left += [side for side in (rate.left, rate.right) if not isinstance(side, ast.Constant)]
        elif isinstance(rate, ast.Attribute) and re.fullmatch(r"self(?:\.\w+)+", path := ast.unparse(rate)):
            paths.add(path.removeprefix("self."))
        elif isinstance(rate, ast.Name) and rate.id in values:
            left += values[rate.id]
            values[rate.id] = []  # a second time it adds nothing
        else:
            unknown = True
    return literal, unknown, frozenset(paths)


def _rates_of(call: ast.Call) -> list[ast.expr]:
    """Returns the probability that a call of a dropout function, or of an attention, is given."""
    name = ast.unparse(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    for keyword in ("dropout_p", "dropout"):  # of scaled_dot_product_attention, and of attentions of transformers
        if keyword in given:
            return [given[keyword]]
    if name.startswith("self.") or _DROPOUT.search(name) is None:
        return []
    return [given.get("p", call.args[1] if len(call.args) > 1 else ast.Constant(0.5))]


def _holds_settings(value: Any) -> bool:
    """Tells whether a module's attribute is an object with attributes, such as a config, and no part of the model."""
    return hasattr(value, "__dict__") and not (
        isinstance(value, (type, nn.Module, torch.Tensor, TensorParallel)) or callable(value)
    )
