"""Adam and AdamW whose moments take 8 bits an element in place of 32: 2.03 bytes a parameter in place of 8.

    a step, 32768 elements at a time    codes -> m, v in fp32 -> Adam's step of the weights -> codes

Moments lie in blocks of 256 elements (`blockwise`), counted from the parameter's first. Under ZeRO each parameter, and
each rank's slice of one, begins with a block (`StepNeeds.block`), so that any number of ranks has the same blocks, with
the same scales, as a single process. Saved states are those of Adam, fp32, and are encoded to the same bits again.

Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar

import torch

from ..errors import ConfigurationError
from ..optimizer_trial import StepNeeds
from ..setting_checks import require, require_betas, require_not_negative
from .blockwise import BLOCK, blocks, decode, encode
from .elementwise_state import EIGHT_BIT_LEAST, whole_size

_CHUNK = 1 << 15  # elements of a parameter on a CPU at a time, so that they stay in its caches
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # by name: signed
_SCALE = "_scale"


class Adam8bit(torch.optim.Optimizer):
    """Adam with moments in 8 bits. For each parameter w with gradient g, at its step t

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g;         m' = m / (1 - beta1^t)
        v = beta2 * v + (1 - beta2) * g * g;     v' = v / (1 - beta2^t)
        w = w - lr * m' / (sqrt(v') + eps)

    in fp32, of which m and v are then rounded to 8 bits, v above 0 to a value above 0, unlike in the source (see
    `blockwise`). Those of parameters of fewer than 4096 elements stay in fp32.

    params: parameters or groups of them.
    maximize: goes up the gradient.

    The state of a parameter is `step`, `exp_avg` and `exp_avg_sq`, uint8 of its shape, and the scales of their blocks.
    state_dict() holds Adam's own state, fp32, from which `load_state_dict` makes the same bits; so states go from Adam
    and to it. Sharded by ZeroOptimizer, also offloaded, as well as plain.
    """

    step_needs = StepNeeds(wholes=False, block=BLOCK)
    wide_states = True  # in fp32, as they are saved, also of 16-bit parameters
    _decoupled: ClassVar = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, settings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after a check of its settings; settings that it lacks are the optimizer's."""
        settings = {**self.defaults, **param_group}
        require_not_negative(settings, "lr", "weight_decay", "eps")
        require_betas(settings["betas"])
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            require("params", p.dtype, p.dtype.is_floating_point, "floating-point tensors")

    # ---- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns the result of `closure`, called with gradients on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for group in self.param_groups for p in group["params"]):
            raise ConfigurationError(f"{type(self).__name__}: got a sparse gradient; needs dense ones")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(self._encoded(p, _zeros(p)))
                state["step"] += 1
                self._step(p, state, group)
        return loss

    def _step(self, p: torch.Tensor, entry: dict[str, Any], group: dict[str, Any]) -> None:
        """Steps on a parameter, a chunk at a time."""
        flat = p.detach().reshape(-1)
        grad = p.grad.detach().reshape(-1)  # type: ignore[union-attr]
        moments = {name: entry[name].view(-1) for name in _MOMENTS}
        if moments["exp_avg"].dtype != torch.uint8:
            self._update(flat, grad, moments["exp_avg"], moments["exp_avg_sq"], entry, group)
        else:
            size = flat.numel()
            chunk = min(_CHUNK, size) if p.device.type == "cpu" else size
            fp32_buffers = {name: torch.empty(blocks(chunk) * BLOCK, device=p.device) for name in _MOMENTS}
            for first in range(0, size, max(chunk, 1)):  # a rank may have nothing of a parameter
                part = slice(first, min(first + chunk, size))
                block_range = slice(first // BLOCK, blocks(part.stop))
                count = part.stop - first
                wide = {name: values[: blocks(count) * BLOCK] for name, values in fp32_buffers.items()}
                for name, signed in _MOMENTS.items():
                    decode(moments[name][part], entry[name + _SCALE][block_range], signed, wide[name])
                m, v = wide["exp_avg"][:count], wide["exp_avg_sq"][:count]
                self._update(flat[part], grad[part], m, v, entry, group)
                for name, signed in _MOMENTS.items():
                    encode(wide[name], moments[name][part], entry[name + _SCALE][block_range], signed)
        if flat.data_ptr() != p.data_ptr():  # a copy, in the order of elements
            p.detach().copy_(flat.view(p.shape))

    def _update(
        self,
        w: torch.Tensor,
        grad: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        entry: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """Adam's step on a flat part of a parameter, in the dtype of the moments."""
        beta1, beta2 = group["betas"]
        lr, decay, step = float(group["lr"]), float(group["weight_decay"]), float(entry["step"])
        weights, g = w.to(m.dtype), grad.to(m.dtype)
        if group["maximize"]:
            g = -g
        if decay and self._decoupled:
            weights.mul_(1 - lr * decay)
        elif decay:
            g = g.add(weights, alpha=decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        scale = v.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        weights.addcdiv_(m, scale, value=-lr / (1 - beta1**step))
        if weights.data_ptr() != w.data_ptr():
            w.copy_(weights)

    # ---- state -----------------------------------------------------------------------------------------------

    @property
    def saved_state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:
        """The state as it is saved and loaded: that of Adam, decoded when it is read, encoded when it is set."""
        return _SavedState(self)

    def to_fp32(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Returns Adam's state of a parameter: the moments in fp32."""
        found = {key: value for key, value in entry.items() if not key.endswith(_SCALE)}
        for name, signed in _MOMENTS.items():
            if name + _SCALE in entry:
                codes, scales = entry[name], entry[name + _SCALE]
                fp32_buffers = torch.empty(scales.numel() * BLOCK, device=codes.device)
                decode(codes.reshape(-1), scales.to(codes.device), signed, fp32_buffers)
                found[name] = fp32_buffers[: codes.numel()].view(codes.shape)
        return found

    @torch.no_grad()
    def _encoded(self, p: torch.Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Encodes Adam's state of a parameter or slice, if the whole parameter has at least 4096 elements."""
        encoded = dict(entry)
        if not torch.is_tensor(encoded.get("step")):
            encoded["step"] = torch.tensor(float(encoded.get("step", 0)))
        if whole_size(p) < EIGHT_BIT_LEAST:
            return encoded
        for name, signed in _MOMENTS.items():
            given = encoded[name].detach().reshape(-1)
            padded = torch.zeros(blocks(given.numel()) * BLOCK, device=given.device)
            padded[: given.numel()] = given
            encoded[name] = torch.empty(given.numel(), dtype=torch.uint8, device=given.device)
            encoded[name + _SCALE] = torch.empty(blocks(given.numel()), 1, device=given.device)
            encode(padded, encoded[name], encoded[name + _SCALE], signed)
            encoded[name] = encoded[name].view(entry[name].shape)
        return encoded

    def to_8bit(self, p: torch.Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this optimizer's state of a parameter or slice from Adam's, whose tensors it may take over."""
        return self._encoded(p, entry) if set(_MOMENTS) <= entry.keys() else dict(entry)

    def state_dict(self) -> dict[str, Any]:
        """Returns Adam's state_dict, with moments in fp32."""
        packed = super().state_dict()
        packed["state"] = {number: self.to_fp32(entry) for number, entry in packed["state"].items()}
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Loads the state_dict of this class, of Adam or of AdamW. Raises what torch's own does for other groups."""
        super().load_state_dict({**state_dict, "state": {}})
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(saved, own, strict=True):
            entry = state_dict["state"].get(number)
            if entry is not None:
                copied = {key: _own_copy(p, key, value) for key, value in entry.items()}
                self.state[p] = self.to_8bit(p, copied)


class AdamW8bit(Adam8bit):
    """AdamW with moments in 8 bits: Adam8bit, but w = (1 - lr * weight_decay) * w in place of the change of g.

    Source of the decay: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
    """

    step_needs = StepNeeds(wholes=False, block=BLOCK)
    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)


class _SavedState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Mapping of parameters to Adam's state, kept in 8 bits."""

    def __init__(self, optimizer: Adam8bit) -> None:
        self._optimizer = optimizer

    def __getitem__(self, p: torch.Tensor) -> dict[str, Any]:
        if p not in self._optimizer.state:
            raise KeyError("no state yet")
        return self._optimizer.to_fp32(self._optimizer.state[p])

    def __setitem__(self, p: torch.Tensor, entry: Mapping[str, Any]) -> None:
        self._optimizer.state[p] = self._optimizer.to_8bit(p, entry)

    def __delitem__(self, p: torch.Tensor) -> None:
        del self._optimizer.state[p]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._optimizer.state)

    def __len__(self) -> int:
        return len(self._optimizer.state)


def _zeros(p: torch.Tensor) -> dict[str, Any]:
    wide = torch.promote_types(p.dtype, torch.float32)
    moments = {name: torch.zeros(p.shape, dtype=wide, device=p.device) for name in _MOMENTS}
    return {"step": torch.zeros(()), **moments}


def _own_copy(p: torch.Tensor, key: str, value: Any) -> Any:
    if not torch.is_tensor(value) or key == "step":
        return value.clone() if torch.is_tensor(value) else value
    wide = torch.promote_types(p.dtype, torch.float32)
    return value.detach().to(p.device, wide if value.is_floating_point() else value.dtype, copy=True)
