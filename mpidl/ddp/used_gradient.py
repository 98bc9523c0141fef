"""The `.grad` that a step within the backward pass leaves: of the parameter's shape and dtype, without any values.

    backward()  p.grad = UsedGradient      step()  p.grad = None

Without it `torch.nn.utils.clip_grad_norm_` would find no gradient, return 0 and clip nothing, and nothing would tell.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import TrainingError

_ALLOWED = frozenset({"zero_", "_foreach_zero_"})  # by which a gradient is cleared


class UsedGradient(torch.Tensor):
    """A gradient without memory; reading or changing it raises TrainingError.

    parameter: whose it is.
    name: of the parameter.
    """

    _name_of_parameter: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> UsedGradient:
        """Makes one of the parameter's shape."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._name_of_parameter = name
        torch._C._set_throw_on_mutable_data_ptr(made)  # by which C++ would read address 0
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UsedGradient({self._name_of_parameter}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, _: Any) -> UsedGradient:
        raise self._refusal("a copy")

    def __reduce_ex__(self, _: Any) -> Any:
        raise self._refusal("pickling")

    def __dlpack__(self, **_: Any) -> Any:
        raise self._refusal("__dlpack__()")

    def __dlpack_device__(self) -> Any:
        raise self._refusal("__dlpack_device__()")

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Refuses to be read, and to be set."""
        raise self._refusal(".data")

    @data.setter
    def data(self, _: Any) -> None:
        raise self._refusal("an assignment to .data")

    def _refusal(self, what: str) -> TrainingError:
        return TrainingError(
            f"{self._name_of_parameter}: {what} of a gradient that is gone: with step_in_backward the backward pass "
            "has made the step; to clip, to scale or to look at gradients step after the pass, without step_in_backward"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, cls))
        name = function.overloadpacket.__name__
        if name in _ALLOWED:
            return args[0] if name == "zero_" else None
        raise first._refusal(f"{name}()")
