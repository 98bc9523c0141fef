"""Shard of a flat group of parameters on one rank: the group, its layout and the shard's values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gradients.buckets import BucketLayout


@dataclass(eq=False)
class ParameterShard:
    """This rank's shard of a group of parameters of one dtype.

    values: `layout.shard_size` elements.
    trains: whether its parameters do.
    """

    parameters: list[torch.nn.Parameter]
    layout: BucketLayout
    values: torch.Tensor
    trains: bool = True
