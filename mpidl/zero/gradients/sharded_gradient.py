"""The `.grad` of a parameter that a ZeroOptimizer trains: of the parameter's shape, cut over the ranks.

    p.grad         no memory of its own; it refers to the optimizer's gradient shards
    rank 0 reads   [ 0 .. k |          ]     this rank's part, looked up at each use
    rank 1 reads   [        | k .. n   ]

An operator that treats every element by itself works on this rank's part, in place or into a result that is cut in the
same way. One that makes a number of all elements (norm, max, all, ...) combines the numbers of all ranks: every rank
must call it. Where parameters are cut over tp, norms are of whole parameters, all else of the part that this rank has.
Shape, dtype and device are known without communication. `out=` and an assignment to `.data` take only a result that was
computed from the same parameter's gradient. Every other operator is refused by name, and so is every way to memory that
it does not have.

`torch._foreach_norm` and the norms one by one, as `torch.nn.utils.clip_grad_norm_` asks for them, cost one operation
between the ranks for all gradients together (`grad_attribute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from ...errors import TrainingError
from ...gradients.backward import inside_backward
from ...gradients.buckets import Piece
from ...gradients.clip import local_norms
from ...mesh import Placement

_ELEMENTWISE = frozenset(
    {"abs", "neg", "sign", "sgn", "sqrt", "rsqrt", "reciprocal", "exp", "log", "log2", "log10", "log1p", "pow"}
    | {"square", "add", "sub", "rsub", "mul", "div", "clamp", "clamp_min", "clamp_max", "nan_to_num", "where"}
    | {"maximum", "minimum", "isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge"}
    | {"logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or"}
    | {"clone", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like"}
)
_IN_PLACE = frozenset(
    {"abs_", "neg_", "sign_", "sqrt_", "pow_", "square_", "add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_"}
    | {"clamp_", "clamp_min_", "clamp_max_", "nan_to_num_"}
)
CHANGED_INSIDE = "its .grad was changed inside a backward pass; change it after the pass"
_ALIASES = frozenset({"detach", "alias"})
_NORMS = frozenset({"linalg_vector_norm", "norm"})
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class Source(Protocol):
    """The source of the reduced gradients of an optimizer's parameters."""

    def read(self, place: GradientPlace) -> torch.Tensor:
        """This rank's part of a gradient, flat."""

    def write(self, place: GradientPlace, change: str) -> torch.Tensor:
        """This rank's part, to be changed in place. change: the operator and its arguments, the same on every rank."""

    def shows(self, gradient: ShardedGradient) -> bool:
        """True if the tensor is the one that was put into `.grad`, and not another one that refers to it."""

    def norm(self, place: GradientPlace, order: float) -> float:
        """The norm of a whole gradient. Collective."""

    def gather_part_values(self, place: GradientPlace, operation: str, value: float) -> torch.Tensor:
        """The value of each part of a gradient, in double precision. operation: as of `gather_values`. Collective."""

    def gather_values(self, place: GradientPlace, operation: str, value: float) -> torch.Tensor:
        """Gathers every rank's value, by rank, in double precision. Collective.

        operation: name of the operation, the same on every rank.
        """

    @property
    def norms_are_over_tp(self) -> bool:
        """True if norms are of whole parameters where these are cut over tp."""

    def combine_over_tp(self, place: GradientPlace, operation: str, power: float, infinite: bool) -> float:
        """Combines a norm's power over tp: returns that of the whole parameter's gradient. Collective."""

    def max_over_tp(self, value: float) -> float:
        """The largest number of the ranks of tp. Collective."""

    def whole(self, place: GradientPlace, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts, flat. Collective."""


@dataclass(eq=False)
class GradientPlace:
    """The place of one parameter's gradient.

    name: of the parameter.
    piece: what this rank holds of it.
    number, index: the bucket, and the parameter in it.
    source: gives the Source; None once that is gone.
    arrived: what autograd has added to the `.grad` in the backward pass under way.
    placed: the parameter's placement on a mesh.
    """

    name: str
    number: int
    index: int
    piece: Piece
    source: Callable[[], Source | None]
    placed: Placement
    arrived: torch.Tensor | None = None

    def live_source(self) -> Source:
        """Returns the source; raises TrainingError once it is gone."""
        source = self.source()
        if source is None:
            raise TrainingError(f"{self.name}: the ZeroOptimizer that held its gradient is gone")
        return source


def _without_memory(name: str) -> Any:
    """A method that refuses: torch's own reads or shares memory, and a ShardedGradient has none."""

    def refuse(self: ShardedGradient, *_: Any, **__: Any) -> Any:
        raise self._refusal(f"{name}()")

    return refuse


class ShardedGradient(torch.Tensor):
    """A gradient that is cut over the ranks, or what was computed of one element by element.

    result: this rank's part of what was computed, flat; None: the gradient itself, as the optimizer has it at each use.
    """

    place: GradientPlace
    result: torch.Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        place: GradientPlace,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        result: torch.Tensor | None = None,
    ) -> ShardedGradient:
        """Makes a tensor without memory of its own."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        made.place, made.result = place, result
        torch._C._set_throw_on_mutable_data_ptr(made)  # by which C++ would read address 0
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        piece = self.place.piece
        held = f"this rank holds elements {piece.start} to {piece.stop}"
        return f"ShardedGradient({self.place.name}, shape={tuple(self.shape)}, dtype={self.dtype}; {held})"

    def __deepcopy__(self, _: Any) -> ShardedGradient:
        raise self._refusal("a copy")

    def __reduce_ex__(self, _: Any) -> Any:
        raise self._refusal("pickling")

    __dlpack__ = _without_memory("__dlpack__")
    __dlpack_device__ = _without_memory("__dlpack_device__")
    apply_ = _without_memory("apply_")
    data_ptr = _without_memory("data_ptr")
    numpy = _without_memory("numpy")
    share_memory_ = _without_memory("share_memory_")
    tolist = _without_memory("tolist")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Storage without memory, which has a size alone: torch.compile asks for it."""
        return torch.UntypedStorage(self.numel() * self.dtype.itemsize, device="meta")

    @property
    def data(self) -> ShardedGradient:  # type: ignore[override]
        """Returns `detach()`. It may be set to a result that was computed of the same parameter's `.grad`."""
        return self._with(self.result)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        cut = value if isinstance(value, ShardedGradient) and value.place is self.place else None
        if cut is None or cut.dtype.is_floating_point != self.dtype.is_floating_point:
            raise TrainingError(
                f"{self.place.name}: the .data of its .grad was set to {_described(value)}; needs what is computed of "
                "the same .grad element by element, as p.grad.data = p.grad.data.clamp(-1, 1)"
            )
        if self.result is not None or not self.place.live_source().shows(self):
            self.result = None if cut.result is None else cut.result.to(self.dtype)
        elif cut.result is not None:
            self.place.live_source().write(self.place, ".data = a result").copy_(cut.result)

    @property
    def norm_is_over_tp(self) -> bool:
        """True if its norm is that of the whole parameter's gradient where that is cut over tp."""
        return "tp" in self.place.placed.axes and self.place.live_source().norms_are_over_tp

    def take_arrived(self) -> torch.Tensor | None:
        """Returns what autograd has added since the last call."""
        arrived, self.place.arrived = self.place.arrived, None
        return arrived

    def full_tensor(self) -> torch.Tensor:
        """The whole gradient, on every rank. Collective."""
        return self.place.live_source().whole(self.place, self.part()).view(self.shape)

    def part(self) -> torch.Tensor:
        """This rank's part, flat."""
        return self.place.live_source().read(self.place) if self.result is None else self.result

    def _refusal(self, what: str) -> TrainingError:
        return TrainingError(
            f"{self.place.name}: {what} of a gradient that is cut over the ranks; take .grad.full_tensor() on every "
            "rank, or optimizer.gradients(), which rank 0 gets whole"
        )

    # ---- operators --------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        first = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, cls))
        with torch.no_grad():
            if kwargs and any(argument.is_out for argument in function._schema.arguments):
                return first._into(function, args, kwargs)
            if name in _ALIASES:
                return first._with(first.result)
            if name == "add_" and inside_backward():
                return first._arrive(args)
            if name in _ELEMENTWISE:
                return first._computed(function, args, kwargs)
            if name in _IN_PLACE and first is args[0]:
                return first._changed(function, args, kwargs)
            if name in _NORMS:
                return first._norm(function, args, kwargs)
            if name in _REDUCTIONS and len(function._schema.returns) == 1:  # not max(0), which gives indices too
                return first._reduced(name, args, kwargs)
            if name.startswith("_foreach_"):
                return _for_each(name, args, kwargs)
            if name == _UNSCALE:
                return _unscale(*args)
        raise first._refusal(f"{function.__name__}()")

    def _with(self, result: torch.Tensor | None) -> ShardedGradient:
        dtype = self.dtype if result is None else result.dtype
        return ShardedGradient(self.place, self.shape, dtype, self.device, result)

    def _arrive(self, args: tuple[Any, ...]) -> ShardedGradient:
        """Takes in what autograd adds, in another backward pass before the optimizer forgets the gradient."""
        place, gradient = self.place, args[1]
        if place.arrived is not None or isinstance(gradient, ShardedGradient) or args[0] is not self:
            raise TrainingError(f"{place.name}: {CHANGED_INSIDE}")
        place.arrived = gradient
        return self

    def _parts(self, function: Any, given: Any) -> Any:
        """The arguments with this rank's parts in place of what is cut."""
        for leaf in tree_flatten(given)[0]:
            if isinstance(leaf, ShardedGradient):
                fits = leaf.place is self.place
            else:
                fits = not isinstance(leaf, torch.Tensor) or leaf.dim() == 0
            if not fits:
                raise self._refusal(f"{function.__name__}() with a tensor that is not of the same parameter's .grad,")
            if isinstance(leaf, torch.device) and leaf.type != self.device.type:
                raise self._refusal(f"{function.__name__}() to {leaf}")
        return tree_map_only(ShardedGradient, lambda t: t.part(), given)

    def _computed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> ShardedGradient:
        """Computes an operator on each element; the result is cut likewise."""
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        args, kwargs = self._parts(function, (args, kwargs))
        return self._with(function(*args, **kwargs))

    def _changed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> ShardedGradient:
        compared = [*args[1:], *kwargs.values()]
        args, kwargs = self._parts(function, (args, kwargs))
        function(self._target(function, compared), *args[1:], **kwargs)
        return self

    def _into(self, function: Any, args: Any, kwargs: dict[str, Any]) -> ShardedGradient:
        """Computes an operator on each element into out=, a tensor that is cut likewise."""
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        out, given = kwargs.pop("out", None), tree_flatten((args, kwargs))[0]
        fits = isinstance(out, ShardedGradient) and out.place is self.place
        if not fits or function.overloadpacket.__name__ not in _ELEMENTWISE or not any(_is_cut(leaf) for leaf in given):
            raise TrainingError(
                f"{self.place.name}: {function.__name__}() with out=; needs an operator on each element of a .grad, "
                "with the same parameter's .grad as out=; leave out= off, and take what the operator returns"
            )
        self._parts(function, given)
        target = out._target(function, [*given, "out"])
        args, kwargs = self._parts(function, (args, kwargs))
        function(*args, **kwargs, out=target)
        return out

    def _target(self, function: Any, arguments: Sequence[Any]) -> torch.Tensor:
        """This rank's part, for the operator to write into. arguments: of the operator, for the ranks to compare."""
        if self.result is not None:
            return self.result
        change = f"{function.overloadpacket.__name__}({', '.join(_argument_text(a) for a in arguments)})"
        return self.place.live_source().write(self.place, change)

    def _norm(self, function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        given = dict(zip([a.name for a in function._schema.arguments], args, strict=False)) | kwargs
        order = given.get("ord", given.get("p"))
        order = 2.0 if order is None else float(order)
        self._check_all_of_it(function.__name__, given.get("dim"), given.get("keepdim"))
        if not order > 0:
            raise self._refusal(f"a norm of order {order}")
        if self.result is None:
            norm = self.place.live_source().norm(self.place, order)
        else:
            (own,) = local_norms([self.result], order)
            operation, infinite = f"norm of order {order}", math.isinf(order)
            norms = self._of_parts(operation, own)
            power = float(norms.max() if infinite else (norms**order).sum())
            norm = root_of(self.place.live_source().combine_over_tp(self.place, operation, power, infinite), order)
        return torch.tensor(norm, dtype=given.get("dtype") or _finer(self.dtype).to_real(), device=self.device)

    def _reduced(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """A number that is made of all elements."""
        dim, keepdim = (*args[1:3], None, None)[:2]
        self._check_all_of_it(name, kwargs.get("dim", dim), kwargs.get("keepdim", keepdim))
        part = self.part()
        if part.is_complex() and name not in _OF_COMPLEX:
            raise self._refusal(f"{name}() of complex numbers")
        reduction = _REDUCTIONS[name]
        found = reduction.combine(self._of_parts(name, float(reduction.local(part))))
        if name == "mean":
            found = found / self.numel()
        if name == "_local_scalar_dense":
            return found.to(self.dtype).item()
        dtype = reduction.dtype or (_finer(self.dtype) if self.dtype.is_floating_point else torch.int64)
        return found.to(kwargs.get("dtype") or dtype).to(self.device)

    def _check_all_of_it(self, what: str, dim: Any, keepdim: Any) -> None:
        dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
        if keepdim or (dims and len(dims) < self.dim()):
            raise self._refusal(f"{what}() over some of the dimensions")

    def _of_parts(self, operation: str, value: float) -> torch.Tensor:
        return self.place.live_source().gather_part_values(self.place, operation, value)


@dataclass(frozen=True)
class _Reduction:
    """A reduction of a gradient over the ranks.

    local: of this rank's part, which may be empty.
    combine: of all ranks' numbers.
    dtype: of the result.
    """

    local: Callable[[torch.Tensor], Any]
    combine: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None


def _sum(part: torch.Tensor) -> torch.Tensor:
    return part.sum(dtype=torch.float64 if part.is_floating_point() else None)


def _largest(part: torch.Tensor) -> Any:
    return part.max() if part.numel() else -math.inf


def _least(part: torch.Tensor) -> Any:
    return part.min() if part.numel() else math.inf


_REDUCTIONS = {
    "sum": _Reduction(_sum, torch.sum),
    "mean": _Reduction(_sum, torch.sum),
    "max": _Reduction(_largest, torch.max),
    "amax": _Reduction(_largest, torch.max),
    "min": _Reduction(_least, torch.min),
    "amin": _Reduction(_least, torch.min),
    "all": _Reduction(torch.all, torch.min, torch.bool),
    "any": _Reduction(torch.any, torch.max, torch.bool),
    "count_nonzero": _Reduction(torch.count_nonzero, torch.sum, torch.int64),
    "_local_scalar_dense": _Reduction(_sum, torch.sum),
}
_FOREACH = _ELEMENTWISE | _IN_PLACE | _NORMS | set(_REDUCTIONS)  # of torch._foreach_...
_OF_COMPLEX = frozenset({"all", "any", "count_nonzero"})


def root_of(power: float, order: float) -> float:
    """The norm of this order whose ranks' powers add up to `power`; for the infinite one the largest of them."""
    return power if math.isinf(order) else power ** (1.0 / order)


def _is_cut(given: Any) -> bool:
    return isinstance(given, ShardedGradient)


def _described(value: torch.Tensor) -> str:
    of = f" of {value.place.name}" if isinstance(value, ShardedGradient) else ""
    return f"a {type(value).__name__}{of} of {value.dtype}"


def _finer(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _argument_text(argument: Any) -> str:
    """An argument as the ranks compare it, to six digits."""
    if isinstance(argument, ShardedGradient) or (isinstance(argument, torch.Tensor) and argument.device.type != "cpu"):
        return "a tensor"  # a GPU would be waited for
    try:
        return f"{float(argument):.6g}"
    except (TypeError, ValueError):
        return str(argument)


def _for_each(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """torch._foreach_...: the operator on one after the other."""
    operator = name.removeprefix("_foreach_")
    call = torch.linalg.vector_norm if operator == "norm" else getattr(torch.Tensor, operator, None)
    if operator not in _FOREACH or call is None or not isinstance(args[0], list | tuple):
        raise next(leaf for leaf in tree_flatten((args, kwargs))[0] if _is_cut(leaf))._refusal(f"{operator}()")
    results = []
    for number, gradient in enumerate(args[0]):
        rest = [a[number] if isinstance(a, list | tuple) else a for a in args[1:]]
        results.append(call(gradient, *rest, **kwargs))
    return None if operator.endswith("_") else results


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Unscales gradients as torch.amp.GradScaler does, with one answer of all ranks. Collective."""
    own = [g for g in gradients if isinstance(g, ShardedGradient)]
    change = f"unscaled by {_argument_text(inverse_scale)}"
    parts = [g.place.live_source().write(g.place, change) if isinstance(g, ShardedGradient) else g for g in gradients]
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inverse_scale)
    place = own[0].place
    found = float(place.live_source().gather_values(place, "finite", float(found_inf)).max())
    found_inf.fill_(place.live_source().max_over_tp(found))
