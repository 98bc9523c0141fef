"""Gives memory to tensors on the meta device, in place, where ZeRO and `tensor` fill models built without values."""

from __future__ import annotations

import torch


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Makes `tensor` what `other` is, in place: for all that refer to it. Its attributes stay."""
    other.__class__ = tensor.__class__
    other.__dict__.update(tensor.__dict__)
    # The core of torch.utils.swap_tensors. That refuses a tensor with weak references, as a recurrent layer has to its
    # weights; here they are to follow.
    torch._C._swap_tensor_impl(tensor, other)
