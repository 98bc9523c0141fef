"""A model under DDP in several buckets, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mpidl
from tests.mpidl.zero.reference import Several, made


def several(comm, **settings: Any) -> tuple[nn.Module, mpidl.DistributedDataParallel, torch.optim.SGD]:
    """The module, under DDP with a bucket for each parameter, and its optimizer."""
    model = made(Several)
    ddp = mpidl.DistributedDataParallel(model, process_group=comm, bucket_cap_mb=1e-5, **settings)
    return model, ddp, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
