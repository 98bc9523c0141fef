"""mpidl: data parallelism, ZeRO and tensor parallelism for PyTorch over MPI.

import mpidl
comm = mpidl.init()
mesh = mpidl.Mesh(tp=2)                # optional: pairs of ranks hold parts of the same layers, the others are dp
mpidl.parallelize(model, mesh)
optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, mesh=mesh, lr=3e-4)
"""

from . import standalone as standalone  # before anything imports mpi4py

# isort: split
from . import activations, checkpoint, comm_hooks, data, memory, mesh, optim, tensor
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
from .gradients.loss import global_mean
from .gradients.nonfinite import NonfiniteWatch, find_nonfinite_gradients
from .gradients.nonfinite_guard import NonfiniteGuard
from .job.agreement import agree_or_exit
from .job.join import Join, Joinable, JoinHook
from .job.objects import all_gather_object, broadcast_object
from .job.runtime import init, pick_device
from .job.signals import STOPPED, StopSignal
from .mesh import Mesh
from .nn.sync_batch_norm import SyncBatchNorm
from .replicas.check import check_replicas
from .tensor import parallelize, unparallelize
from .version import __version__
from .zero import Offload, Precision, ZeroOptimizer, deferred_init

__all__ = [
    "STOPPED",
    "CheckpointError",
    "CheckpointMismatch",
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
