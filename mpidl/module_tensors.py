"""Parameters and buffers of a module: found anew in every step, and put in place of those on the meta device.

`Module.parameters()` and `Module.buffers()` make each one's name and hash it: 0.3 ms for the 149 modules of GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def parameters_in(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields the parameters, also shared ones once for each module that has them; on every rank in the same order."""
    return (p for each in _modules_in(module) for p in each._parameters.values() if p is not None)


def buffers_in(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the buffers, also shared ones once for each module that has them; on every rank in the same order."""
    return (b for each in _modules_in(module) for b in each._buffers.values() if b is not None)


def _modules_in(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the module and all inside it, each once."""
    seen: set[int] = set()
    pending = [module]
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending += [child for child in current._modules.values() if child is not None]


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Makes `tensor` what `other` is, in place: for all that refer to it. Its attributes stay."""
    other.__class__ = tensor.__class__
    other.__dict__.update(tensor.__dict__)
    # The core of torch.utils.swap_tensors. That refuses a tensor with weak references, as a recurrent layer has to its
    # weights; here they are to follow.
    torch._C._swap_tensor_impl(tensor, other)
