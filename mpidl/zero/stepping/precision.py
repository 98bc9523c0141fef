"""Mixed precision: 16-bit parameters to compute with, fp32 masters to step on, and the dtype of the reduction.

    fp32 values of the model --> master shards, fp32        (12 bytes a parameter with Adam's two moments, cut)
                            `--> parameters, param_dtype    forward and backward; gradients come in the same dtype
    gradients --> reduce_dtype, reduced over the ranks --> fp32 --> a step of the masters --> rounded into parameters

Modules chosen by `keep_fp32` keep fp32 parameters; what flows into them is widened, what flows out is narrowed again.
Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3; the fields follow PyTorch's
MixedPrecisionPolicy of `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from ...errors import ConfigurationError
from ..placeholder import placeholder
from ..slices import HALVES

KeepRule = Callable[[str, torch.nn.Module], bool] | Iterable[type[torch.nn.Module]]
_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)  # not mpidl's own


@dataclass(frozen=True)
class Precision:
    """The dtypes that a ZeroOptimizer trains with.

    param_dtype: of parameters, frozen ones too, and so of forward and backward: torch.bfloat16 or torch.float16, for
        which mpidl.GradScaler is made; None leaves the model as it is. Buffers are left as they are.
    reduce_dtype: in which gradients are kept in buckets and reduced; None: each in its parameter's dtype. float32 costs
        twice the bytes sent and, in stage 1, for every gradient. Sums of several communicating passes are fp32 in
        any case; those inside `no_sync` are of this dtype.
    keep_fp32: modules, with all that is in them, that stay in fp32: module classes, or a function of a name and a
        module, as of `named_modules`. Their floating inputs are cast to fp32, their outputs to param_dtype. A batch
        normalization must be among them, as its statistics are buffers.
    cast_forward_inputs: cast the floating tensors among the model's inputs to param_dtype; they are looked for in
        lists, tuples and dictionaries.
    output_dtype: to which those of the model's outputs are cast; None: not.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_fp32: KeepRule = ()
    cast_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        allowed = {
            "param_dtype": (None, *HALVES),
            "reduce_dtype": (None, *HALVES, torch.float32),
            "output_dtype": (None, *HALVES, torch.float32, torch.float64),
        }
        for name, choices in allowed.items():
            given = getattr(self, name)
            if given not in choices:
                raise ConfigurationError(f"{name}: got {given!r}; needs {', '.join(map(str, choices))}")
        rule = self.keep_fp32
        if isinstance(rule, type) or not callable(rule):
            classes = (rule,) if isinstance(rule, type) else tuple(rule)
            if not all(isinstance(c, type) and issubclass(c, torch.nn.Module) for c in classes):
                raise ConfigurationError(
                    f"keep_fp32: got {rule!r}; needs module classes, or a function of a name and a module"
                )
            object.__setattr__(self, "keep_fp32", classes)
        if self.keep_fp32 != () and self.param_dtype is None:
            raise ConfigurationError("keep_fp32: needs a param_dtype that the other modules get")


@dataclass(frozen=True)
class Conversion:
    """Changes that a Precision makes to a model.

    kept: modules that stay in fp32, none in another.
    dtypes: new ones.
    """

    precision: Precision
    kept: dict[str, torch.nn.Module] = field(default_factory=dict)
    dtypes: dict[torch.nn.Parameter, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, model: torch.nn.Module, precision: Precision | None) -> Conversion:
        """Plans it and changes nothing yet. Raises ConfigurationError for a parameter that would need two dtypes."""
        if not isinstance(precision, Precision | None):
            raise ConfigurationError(f"precision: got {precision!r}; needs an mpidl.Precision")
        if precision is None or precision.param_dtype is None:
            return cls(precision or Precision())
        kept = _kept(model, precision.keep_fp32)
        fp32 = {p for module in kept.values() for p in module.parameters()}
        inside = {id(m) for module in kept.values() for m in module.modules()}
        for name, module in model.named_modules():
            for key, p in module._parameters.items() if id(module) not in inside else ():
                if p in fp32:
                    where = f"{name}.{key}".lstrip(".")
                    raise ConfigurationError(f"keep_fp32: chooses a module that shares {where}, but not {name!r} too")
        for name, module in model.named_modules():
            statistics = module.running_mean if type(module) in _NORMS and id(module) not in inside else None
            if statistics is not None and statistics.dtype != precision.param_dtype:
                raise ConfigurationError(
                    f"precision: {name}, a {type(module).__name__}, has running statistics of {statistics.dtype}, with "
                    f"which it takes no {precision.param_dtype}; choose it by keep_fp32"
                )
        floating = [p for p in model.parameters() if p.is_floating_point()]
        dtypes = {p: torch.float32 if p in fp32 else precision.param_dtype for p in floating}
        return cls(precision, kept, dtypes)

    def settings(self) -> dict[str, Any]:
        """Settings that must be the same on every rank."""
        of = self.precision
        names = {name: getattr(of, name) for name in ("param_dtype", "reduce_dtype", "cast_forward_inputs")}
        return {**names, "output_dtype": of.output_dtype, "keep_fp32": sorted(self.kept)}

    @torch.no_grad()
    def carry_out(self, model: torch.nn.Module) -> tuple[dict[torch.nn.Parameter, torch.Tensor], list[RemovableHandle]]:
        """Makes placeholders of the new dtypes of the parameters, and lets forward passes cast.

        Returns the values, of which shards and masters are to be filled; a parameter that keeps its dtype is not among
        them. And the hooks.
        """
        originals = {}
        for p, dtype in self.dtypes.items():
            if p.dtype != dtype:
                originals[p] = p.data
                p.data = placeholder(p.shape, dtype, p.device)
                p.grad = None
        of, hooks = self.precision, []
        if of.param_dtype is not None:
            if of.cast_forward_inputs:
                hooks.append(model.register_forward_pre_hook(_cast_inputs(of.param_dtype), with_kwargs=True))
            for module in self.kept.values():
                hooks.append(module.register_forward_pre_hook(_cast_inputs(torch.float32), with_kwargs=True))
                hooks.append(module.register_forward_hook(_cast_outputs(of.param_dtype)))
        if of.output_dtype is not None:
            hooks.append(model.register_forward_hook(_cast_outputs(of.output_dtype)))
        return originals, hooks


def _kept(model: torch.nn.Module, rule: KeepRule) -> dict[str, torch.nn.Module]:
    def chosen(name: str, module: torch.nn.Module) -> bool:
        return bool(rule(name, module)) if callable(rule) else isinstance(module, tuple(rule))

    kept: dict[str, torch.nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) not in inside and chosen(name, module):
            if module is model:
                raise ConfigurationError("keep_fp32: chooses the whole model; leave out param_dtype instead")
            kept[name] = module
            inside |= {id(m) for m in module.modules()}
    return kept


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts all floating tensors; the same object where there is none to cast, as it may be changed by its user."""
    leaves, shape = tree_flatten(value)
    cast = [v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for v in leaves]
    return value if all(new is old for new, old in zip(cast, leaves, strict=True)) else tree_unflatten(cast, shape)


def _cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _, args, kwargs: _cast((args, kwargs), dtype)


def _cast_outputs(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _, __, output: _cast(output, dtype)
