"""deferred_init: builds a model on the meta device and records how its values would have come about.

Every operator that would make or change a tensor is recorded and run on the meta device, where it makes shapes only.
Numbers and lists that a constructor reads off a tensor are computed then and there; if random numbers went into it, all
those before have to be drawn for it, and once more later. A random operation moves the generator to a place of its own,
by which the next one tells what it goes on from: from there, or from a state that somebody has set meanwhile. The idea
is torchdistx's `deferred_init`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ...errors import ConfigurationError
from .tape import Operation, Start, Tape, View

Model = TypeVar("Model", bound=torch.nn.Module)

# In-place operations that do not read what they write.
_OVERWRITING = (
    "bernoulli_.float cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ random_.from random_.to "
    "uniform_ zero_"
)
_REFUSED = ("resize_", "resize_as_", "set_", "as_strided_")
_TO_HOST = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
# What a recorded tensor says of itself inside `build`, as it would in an ordinary construction.
_ASKED: Any = torch.Tensor
_SAYS: dict[Any, Any] = {
    _ASKED.is_meta.__get__: False,
    _ASKED.is_cpu.__get__: True,
    _ASKED.device.__get__: torch.device("cpu"),
}
_MARK = 0x6D70_6964_6C00_0000


def deferred_init(build: Callable[..., Model], *args: Any, **kwargs: Any) -> Model:
    """`build(*args, **kwargs)`, a model, without memory for its values: on the meta device. Not collective.

    A ZeroOptimizer gives it the values that the same call would have given it here and now, to the bit: with the
    random numbers from rank 0's generator as it is at this call. torch's default generator is left where it is; once
    the ZeroOptimizer is made, it is where an ordinary construction would have left it, unless it has been used or
    seeded since. So one call builds the whole model. A `build` that looks at random values needs one seed on all ranks.
    Parameters may be frozen and tied afterwards, but not written to or converted: do that in `build`.

    Raises ConfigurationError naming an operation that cannot be recorded: on a GPU, on memory of somebody else's.
    """
    recorder = Recorder()
    with recorder:
        model = build(*args, **kwargs)
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"deferred_init: got a {type(model).__name__} from build; needs a torch.nn.Module")
    model._mpidl_recording = recorder.finish(model)  # type: ignore[assignment]
    return model


class Recording:
    """A tape, and which tensor's values are where on it."""

    def __init__(self, tape: Tape, numbers: dict[int, int], storages: list[torch.UntypedStorage]) -> None:
        self.tape = tape
        self._numbers = numbers
        self._storages = storages  # kept, so that no other storage gets one's identity
        self.versions: dict[int, int] = {}
        self.marked: torch.Tensor | None = None

    def view(self, tensor: torch.Tensor) -> View | None:
        """A recorded tensor's place; None for another one."""
        plain = tensor.layout == torch.strided
        number = self._numbers.get(tensor.untyped_storage()._cdata) if plain else None
        if number is None:
            return None
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def __deepcopy__(self, _: Any) -> Any:
        return self


class Recorder:
    """The modes under which a construction is recorded, and the tape that comes of it."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []
        self._recording = Recording(self.tape, self._numbers, self._storages)
        self._marks: dict[bytes, int] = {}
        self._operators, self._functions = _Operators(self), _Functions(self)

    def __enter__(self) -> None:
        self._before = torch.get_rng_state()
        self._operators.__enter__()
        self._functions.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._functions.__exit__(*raised)
        self._operators.__exit__(*raised)
        now = torch.get_rng_state()
        self.tape.end = self._marks.get(_bytes(now))
        if self.tape.end is not None:
            self.tape.first = self._before
            torch.set_rng_state(self._before)

        self.tape.forget()

    def finish(self, model: torch.nn.Module) -> Recording:
        """The recording, which also knows when each of the model's tensors was written to last."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._recording.versions[id(tensor)] = tensor._version
        return self._recording

    def view(self, tensor: torch.Tensor) -> View | None:
        """A recorded tensor's place on the tape."""
        return self._recording.view(tensor)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with a value, put on the tape; its stand-in."""
        value = tensor.detach().clone()
        stand_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        place = self._new(stand_in)
        self.tape.add(
            Operation(
                "constant",
                outputs=(place,),
                writes=frozenset([place.storage]),
                overwrites=frozenset([place.storage]),
                constant=value,
            )
        )
        return stand_in

    def computed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives for the values of recorded tensors."""

        def value(leaf: Any) -> Any:
            place = self.view(leaf) if torch.is_tensor(leaf) else None
            return leaf if place is None else self.tape.value(place)

        with _disable_current_modes():
            return function(*tree_map(value, args), **tree_map(value, kwargs))

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on the meta device and puts it on the tape, if it makes or changes anything."""
        args, kwargs = tree_map(
            lambda leaf: self.constant(leaf) if torch.is_tensor(leaf) and self.view(leaf) is None else leaf,
            (args, kwargs),
        )
        called, meta = dict(kwargs), dict(kwargs)
        generator = kwargs.get("generator")
        if generator is not None:
            called["generator"] = meta["generator"] = None
        if any(argument.name == "device" for argument in function._schema.arguments):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type not in ("cpu", "meta"):
                raise ConfigurationError(f"deferred_init: {_name(function)} on {device}; ZeRO's parameters are on CPUs")
            called["device"], meta["device"] = torch.device("cpu"), torch.device("meta")
            if device is None and self._tensors(args):
                called["device"] = None
            meta.pop("pin_memory", None)
            called.pop("pin_memory", None)
        try:
            made = function(*args, **meta)
        except (NotImplementedError, RuntimeError) as error:
            if self._random(function) or _written(function, args, kwargs):
                raise ConfigurationError(f"deferred_init: {_name(function)} cannot be recorded: {error}") from error
            return tree_map(
                lambda leaf: self.constant(leaf) if torch.is_tensor(leaf) else leaf,
                self.computed(function, args, called),
            )
        outputs = tuple(self._new(t) for t in tree_leaves(made) if torch.is_tensor(t) and self.view(t) is None)
        written = _written(function, args, kwargs)
        if outputs or written:
            places = [self.view(t) for t in written]
            read = [self.view(t) for t in self._tensors((args, kwargs))]
            whole = {p.storage for p in places if p and self._overwrites(function, p)}
            new = {place.storage for place in outputs}
            touched = {p.storage for p in read if p}
            # Of a storage that is overwritten, another argument may be a view.
            others = [
                p.storage
                for p, t in zip(read, self._tensors((args, kwargs)), strict=True)
                if p and not any(t is w for w in written)
            ]
            whole -= set(others)
            seen = tree_map(lambda leaf: self.view(leaf) if torch.is_tensor(leaf) else leaf, (args, called))
            operation = Operation(
                function,
                args=seen[0],
                kwargs=seen[1],
                outputs=outputs,
                reads=frozenset(touched - whole),
                writes=frozenset({p.storage for p in places if p} | new),
                overwrites=frozenset(whole | new),
                default_dtype=torch.get_default_dtype(),
                random=self._random(function),
            )
            if operation.random:
                operation.start = self._position(generator or torch.default_generator)
            number = self.tape.add(operation)
            if operation.random:
                self._mark(generator or torch.default_generator, number)
        return made

    def _tensors(self, tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]

    def _new(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
            self.tape.bytes_of.append(storage.nbytes())
        place = self.view(tensor)
        assert place is not None
        return place

    def _overwrites(self, function: Any, place: View) -> bool:
        """Whether an operator sets every byte of a tensor's storage and looks at none of them."""
        name = function._schema.name.removeprefix("aten::")
        variant = f"{name}.{function._overloadname}"
        writes_only = name in _OVERWRITING.split() or variant in _OVERWRITING.split()
        if name == "bernoulli_" and variant != "bernoulli_.float":
            writes_only = False
        expected = 1
        for stride, size in sorted(zip(place.stride, place.shape, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return writes_only and expected * place.dtype.itemsize == self.tape.bytes_of[place.storage]

    @staticmethod
    def _random(function: Any) -> bool:
        return torch.Tag.nondeterministic_seeded in function.tags

    def _position(self, generator: torch.Generator) -> Start:
        """Where a random operation's numbers begin: after which other one, or from which state on."""
        if generator.device.type != "cpu":
            raise ConfigurationError(f"deferred_init: a generator on {generator.device}; ZeRO's parameters are on CPUs")
        state = generator.get_state()
        return self._marks.get(_bytes(state), state)

    def _mark(self, generator: torch.Generator, number: int) -> None:
        generator.manual_seed(_MARK + number)
        self._marks[_bytes(generator.get_state())] = number


class _Operators(TorchDispatchMode):
    """Sees every operator, below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        recorder, name = self._recorder, func._schema.name.removeprefix("aten::")
        if name in ("lift_fresh", "lift") and recorder.view(args[0]) is None:
            # An empty one is only made to ask it for the default device.
            return recorder.constant(args[0]) if args[0].numel() else func(*args)
        known = [tensor for tensor in tensors if recorder.view(tensor) is not None]
        makes = not tensors and any(argument.name == "device" for argument in func._schema.arguments)
        if not known and not makes:
            if recorder._random(func):
                raise ConfigurationError(f"deferred_init: {_name(func)} on a tensor that was not made inside build")
            return func(*args, **kwargs)
        if known and (name in _REFUSED or any(t.is_conj() or t.is_neg() for t in tensors)):
            raise ConfigurationError(f"deferred_init: {_name(func)} cannot be recorded")
        if any(recorder.view(tensor) is None for tensor in _written(func, args, kwargs)):
            raise ConfigurationError(
                f"deferred_init: {_name(func)} writes what has no value yet into a tensor not made inside build"
            )
        if known and not any("Tensor" in str(result.type) for result in func._schema.returns):
            return recorder.computed(func, args, kwargs)
        return recorder.record(func, args, kwargs)


class _Functions(TorchFunctionMode):
    """Sees what no operator does: copying a tensor's values out of torch, and asking where they are."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SAYS and self._recorder.view(args[0]) is not None:
            return _SAYS[func]
        if func in _TO_HOST and self._recorder.view(args[0]) is not None:
            found = self._recorder.computed(func, args, kwargs or {})
            if isinstance(found, np.ndarray):
                found.flags.writeable = False  # what is written there would not reach the tensor
            return found
        return func(*args, **(kwargs or {}))


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it changes."""
    if torch.Tag.inplace_view in function.tags:
        return []
    found: list[torch.Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if torch.is_tensor(leaf)]
    return found


def _name(function: Any) -> str:
    schema = getattr(function, "_schema", None)
    return str(function) if schema is not None else f"Tensor.{function.__name__}"


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
