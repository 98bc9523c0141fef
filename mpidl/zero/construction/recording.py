"""deferred_init: builds a model on the meta device, and records on a tape how its values would have come about.

Every operator that would make or change a tensor is recorded and run on the meta device, where it makes shapes only. A
number or list that a constructor reads from a tensor is computed at once; if the tensor depends on random numbers, all
random operations before it run for this, and again when the tape is played. After each random operation the recorder
seeds the generator with a number of its own. The next random operation looks the generator's state up among those after
these seeds. If it is one of them, the stream of random numbers goes on; if not, `build` has seeded the generator in
between. The idea is torchdistx's `deferred_init`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ...errors import ConfigurationError
from .tape import RecordedOperation, RecordedTensor, Start, Tape

Model = TypeVar("Model", bound=torch.nn.Module)

# In-place operations that do not read what they write.
_OVERWRITING = (
    "aten.bernoulli_.float aten.cauchy_.default aten.copy_.default aten.exponential_.default aten.fill_.Scalar "
    "aten.fill_.Tensor aten.geometric_.default aten.log_normal_.default aten.normal_.default aten.random_.default "
    "aten.random_.from aten.random_.to aten.uniform_.default aten.zero_.default"
)
_REFUSED = ("resize_", "resize_as_", "set_", "as_strided_")
_TO_HOST = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
# Attributes of a recorded tensor inside `build`, with the values of an ordinary construction.
_ASKED: Any = torch.Tensor
_CPU_ANSWERS: dict[Any, Any] = {
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

    Raises ConfigurationError naming an operation that cannot be recorded: on a GPU, or on another owner's memory.
    """
    recording, before = Recording(), torch.get_rng_state()
    try:
        with recording, _Functions(recording):
            model = build(*args, **kwargs)
    finally:
        recording.finish(before)
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"deferred_init: got a {type(model).__name__} from build; needs a torch.nn.Module")
    recording.versions = {id(tensor): tensor._version for tensor in (*model.parameters(), *model.buffers())}
    model._mpidl_recording = recording  # type: ignore[assignment]
    return model


class Recording(TorchDispatchMode):
    """A mode that sees every operator, below autograd; the tape of them, and which tensor's values are where on it.

    versions: by tensor's identity, how often torch had counted a write to it when the model was built.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.versions: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept, so that no other storage gets one's identity
        self._marks: dict[bytes, int] = {}

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def finish(self, before: torch.Tensor) -> None:
        """Puts the default generator back to `before`, unless `build` has seeded it after its last use."""
        self.tape.end = self._marks.get(_bytes(torch.get_rng_state()))
        if self.tape.end is not None:
            self.tape.first = before
            torch.set_rng_state(before)
        self.tape.forget()

    def view(self, tensor: torch.Tensor) -> RecordedTensor | None:
        """A recorded tensor's place on the tape; None for another one."""
        plain = tensor.layout == torch.strided
        number = self._numbers.get(tensor.untyped_storage()._cdata) if plain else None
        return None if number is None else RecordedTensor.of(tensor, number)

    def computed(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function for the values of recorded tensors."""

        def value(leaf: Any) -> Any:
            place = self.view(leaf) if torch.is_tensor(leaf) else None
            return leaf if place is None else self.tape.value(place)

        with _disable_current_modes():
            return function(*tree_map(value, args), **tree_map(value, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors, name = _tensors((args, kwargs)), func._schema.name.removeprefix("aten::")
        if name in ("lift_fresh", "lift") and self.view(args[0]) is None:
            # An empty one is only made to ask it for the default device.
            return self._constant(args[0]) if args[0].numel() else func(*args)
        known = [tensor for tensor in tensors if self.view(tensor) is not None]
        if not known and (tensors or not _takes_device(func)):
            if _is_random(func):
                raise ConfigurationError(f"deferred_init: {func} on a tensor that was not made inside build")
            return func(*args, **kwargs)
        if known and (name in _REFUSED or any(t.is_conj() or t.is_neg() for t in tensors)):
            raise ConfigurationError(f"deferred_init: {func} cannot be recorded")
        if any(self.view(tensor) is None for tensor in _written(func, args, kwargs)):
            raise ConfigurationError(
                f"deferred_init: {func} writes what has no value yet into a tensor not made inside build"
            )
        if known and not any("Tensor" in str(result.type) for result in func._schema.returns):
            return self.computed(func, args, kwargs)
        return self._record(func, args, kwargs)

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator on the meta device and puts it on the tape, if it makes or changes anything."""
        args, kwargs = tree_map(
            lambda leaf: self._constant(leaf) if torch.is_tensor(leaf) and self.view(leaf) is None else leaf,
            (args, kwargs),
        )
        generator = kwargs.get("generator")
        if generator is not None:
            kwargs["generator"] = None
        called = meta = kwargs
        if _takes_device(function):
            device = kwargs.get("device")
            if device is not None and torch.device(device).type not in ("cpu", "meta"):
                raise ConfigurationError(
                    f"deferred_init: {function} on {device}; values are computed in the host's memory: needs device "
                    "'cpu' in build, and ZeroOptimizer(device=...) for a GPU"
                )
            kwargs.pop("pin_memory", None)
            called, meta = {**kwargs, "device": torch.device("cpu")}, {**kwargs, "device": torch.device("meta")}
        random, written = _is_random(function), _written(function, args, kwargs)
        try:
            made = function(*args, **meta)
        except (NotImplementedError, RuntimeError) as error:
            if random or written:
                raise ConfigurationError(f"deferred_init: {function} cannot be recorded: {error}") from error
            return tree_map(
                lambda leaf: self._constant(leaf) if torch.is_tensor(leaf) else leaf,
                self.computed(function, args, called),
            )
        outputs = tuple(self._new(t) for t in _tensors(made) if self.view(t) is None)
        if outputs or written:
            new = {place.storage for place in outputs}
            read = [t for t in _tensors((args, kwargs)) if not any(t is w for w in written)]
            # Another argument may be a view of a storage that is overwritten.
            whole = self._storages_of([t for t in written if _overwrites(function, t)]) - self._storages_of(read)
            seen = tree_map(lambda leaf: self.view(leaf) if torch.is_tensor(leaf) else leaf, (args, called))
            operation = RecordedOperation(
                function,
                seen[0],
                seen[1],
                outputs=outputs,
                reads=self._storages_of([*read, *written]) - whole,
                writes=self._storages_of(written) | new,
                overwrites=whole | new,
                default_dtype=torch.get_default_dtype(),
                random=random,
                start=self._position(generator or torch.default_generator) if random else None,
            )
            number = self.tape.add(operation)
            if random:
                self._mark(generator or torch.default_generator, number)
        return made

    def _constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with a value, put on the tape; its stand-in."""
        value = tensor.detach().clone()
        stand_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        place = self._new(stand_in)
        made = frozenset([place.storage])
        self.tape.add(
            RecordedOperation(torch.ops.aten.clone.default, (value,), {}, (place,), writes=made, overwrites=made)
        )
        return stand_in

    def _new(self, tensor: torch.Tensor) -> RecordedTensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
            self.tape.bytes_of.append(storage.nbytes())
        return RecordedTensor.of(tensor, self._numbers[storage._cdata])

    def _storages_of(self, tensors: list[torch.Tensor]) -> frozenset[int]:
        """The numbers of recorded tensors' storages."""
        return frozenset(place.storage for t in tensors if (place := self.view(t)) is not None)

    def _position(self, generator: torch.Generator) -> Start:
        """The start of a random operation's numbers: after which other one, or the state from which on."""
        if generator.device.type != "cpu":
            raise ConfigurationError(f"deferred_init: a generator on {generator.device}; needs a generator of the CPU")
        state = generator.get_state()
        return self._marks.get(_bytes(state), state)

    def _mark(self, generator: torch.Generator, number: int) -> None:
        generator.manual_seed(_MARK + number)
        self._marks[_bytes(generator.get_state())] = number


class _Functions(TorchFunctionMode):
    """Sees what no operator does: copying a tensor's values out of torch, and asking where they are."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CPU_ANSWERS and self._recording.view(args[0]) is not None:
            return _CPU_ANSWERS[func]
        if func in _TO_HOST and self._recording.view(args[0]) is not None:
            found = self._recording.computed(func, args, kwargs or {})
            if isinstance(found, np.ndarray):
                found.flags.writeable = False  # what is written there would not reach the tensor
            return found
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _is_random(function: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in function.tags


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it changes."""
    if torch.Tag.inplace_view in function.tags:
        return []
    found: list[torch.Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _overwrites(function: Any, tensor: torch.Tensor) -> bool:
    """Tells if an operator sets every byte of a tensor's storage and looks at none of them."""
    return (
        str(function) in _OVERWRITING.split()
        and torch.ops.aten.is_non_overlapping_and_dense(tensor)
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
