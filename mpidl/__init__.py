"""mpidl: data parallelism, ZeRO and tensor parallelism for PyTorch over MPI.

import mpidl
comm = mpidl.init()
mesh = mpidl.Mesh(tp=2)                # optional: pairs of ranks hold parts of the same layers, the others are dp
mpidl.parallelize(model, mesh)
optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, mesh=mesh, lr=3e-4)
"""

from . import standalone as standalone  # before anything imports mpi4py

# isort: split
from typing import TYPE_CHECKING

from . import comm_hooks, mesh
from .ddp import DistributedDataParallel
from .errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigurationConflict,
    ConfigurationError,
    ConfigurationTypeError,
    ModelMismatch,
    MpidlError,
    TrainingError,
    UsageError,
)
from .gradients.amp import GradScaler
from .gradients.clip import clip_grad_norm_, clip_grad_value_
from .gradients.compression import COMPRESSORS, Compression
from .gradients.global_mean import global_mean
from .gradients.nonfinite import NonfiniteWatch, find_nonfinite_gradients
from .gradients.nonfinite_guard import NonfiniteGuard
from .job.agreement import agree_or_exit
from .job.objects import all_gather_object, broadcast_object
from .job.runtime import init, pick_device
from .job.signals import STOPPED, StopSignal
from .job.uneven_inputs import Join, Joinable, JoinHook
from .lazy_names import lazily
from .mesh import Mesh
from .nn.sync_batch_norm import SyncBatchNorm
from .replicas.replica_check import check_replicas
from .version import __version__
from .zero import Offload, Precision, ZeroOptimizer, deferred_init

if TYPE_CHECKING:
    from . import activations, checkpoint, data, memory, optim, tensor
    from .tensor.parallelize import parallelize, unparallelize
else:  # a program pays for what it uses
    _MODULES = ("activations", "checkpoint", "data", "memory", "optim", "tensor")
    __getattr__, __dir__ = lazily(
        __name__, {**dict(zip(_MODULES, _MODULES, strict=True)), "parallelize": "tensor", "unparallelize": "tensor"}
    )

__all__ = [
    "COMPRESSORS",
    "STOPPED",
    "CheckpointError",
    "CheckpointMismatch",
    "Compression",
    "ConfigurationConflict",
    "ConfigurationError",
    "ConfigurationTypeError",
    "DistributedDataParallel",
    "GradScaler",
    "Join",
    "JoinHook",
    "Joinable",
    "Mesh",
    "ModelMismatch",
    "MpidlError",
    "NonfiniteGuard",
    "NonfiniteWatch",
    "Offload",
    "Precision",
    "StopSignal",
    "SyncBatchNorm",
    "TrainingError",
    "UsageError",
    "ZeroOptimizer",
    "__version__",
    "activations",
    "agree_or_exit",
    "all_gather_object",
    "broadcast_object",
    "check_replicas",
    "checkpoint",
    "clip_grad_norm_",
    "clip_grad_value_",
    "comm_hooks",
    "data",
    "deferred_init",
    "find_nonfinite_gradients",
    "global_mean",
    "init",
    "memory",
    "mesh",
    "optim",
    "parallelize",
    "pick_device",
    "tensor",
    "unparallelize",
]
