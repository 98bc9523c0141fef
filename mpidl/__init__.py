"""mpidl: data parallelism, ZeRO and tensor parallelism for PyTorch over MPI.

    import mpidl
    comm = mpidl.init()
    mesh = mpidl.Mesh(tp=2)                # optional: pairs of ranks hold parts of the same layers, the others are dp
    mpidl.parallelize(model, mesh)
    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, mesh=mesh, lr=3e-4)

Engines, which train a model:

    ddp/               DistributedDataParallel: the whole model on every rank
    zero/              ZeroOptimizer: optimizer state, gradients and parameters sharded over the ranks (stages 1 to 3)
    tensor/            tensor and sequence parallelism: layers cut over ranks, under either engine or none

What they share:

    gradients/         phases of a backward pass, buckets, clipping, search for NaN; compression/
    comm_hooks         communication hooks: functions that reduce a bucket in place of the engine
    replicas/          rank 0's values to all ranks, and the comparison of what must be equal
    engine_arguments   checks of arguments that DDP and ZeRO both take
    optimizer_trial    what an optimizer's step needs: slices, or whole parameters
    partial_steps      steps of an optimizer on some of its parameters
    setting_checks     checks of an optimizer's or a sampler's settings
    trained_by         the ZeroOptimizer that trains a parameter
    absent_state       the mark that ranks get instead of a whole state that they do not hold
    compiling          torch.compile: functions that it leaves out, the model inside what it returns

The ranks, and the job that they are:

    job/               start and end of the job, agreements of all ranks, objects, signals
    mesh/              named axes over the ranks. pp, cp and ep have groups there, and no layers or schedules yet
    launch/            python -m mpidl.launch: starts a failed job again
    doctor/            python -m mpidl.doctor: looks at the machine, and at how the job's ranks lie on it

For training programs:

    models/, data/     GPT-2, BERT, ResNet; texts, images, tokenizers, samplers, loaders
    training/          loss scaling, a guard against NaN, replicas that must stay equal, over any engine
    nn/, optim/        SyncBatchNorm; LARS, LAMB, 8-bit and 1-bit Adam, DiLoCo, Dion, EMA, schedules
    activations/       activation checkpointing, with checkpoints sharded, in one arena, or on disk
    checkpoint/        saves and loads a training, on any number of ranks
    memory/            bytes a rank needs, by formula, and bytes it holds
    resuming, cli      when a program saves, stops and goes on; options and errors of every command
    optional_packages  imports a package that mpidl does not depend on, or says how to install it

Helpers of the above: errors; weight_files (safetensors files of a path); model_files (those that fit a model);
module_tensors (finds a module's tensors, fills those on the meta device); scratch_file (a file without a name, for
offload and activations); regular_files (opens no pipe or device instead of a file); digest (8 bytes of a text);
lazy_names (imports a module at its first use); standalone (commands that must not initialise MPI); version.

docs/architecture.md follows a gradient through each engine, and lists threads and collectives.
"""

from . import standalone as standalone  # before anything imports mpi4py

# isort: split
from typing import TYPE_CHECKING

from . import comm_hooks, mesh
from .ddp import DistributedDataParallel
from .ddp.uneven_inputs import Join, Joinable, JoinHook
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
from .gradients.clip import clip_grad_norm_, clip_grad_value_
from .gradients.compression import COMPRESSORS, Compression
from .gradients.global_mean import global_mean
from .gradients.nonfinite import NonfiniteWatch
from .job.agreement import agree_or_exit
from .job.objects import all_gather_object, broadcast_object
from .job.runtime import init, pick_device
from .job.signals import STOPPED, StopSignal
from .lazy_names import lazily
from .mesh import Mesh
from .nn.sync_batch_norm import SyncBatchNorm
from .version import __version__
from .zero import Offload, Precision, ZeroOptimizer, deferred_init

if TYPE_CHECKING:
    from . import activations, checkpoint, data, memory, optim, tensor
    from .tensor.parallelize import parallelize, unparallelize
    from .training.loss_scaling import GradScaler
    from .training.nonfinite_gradients import find_nonfinite_gradients
    from .training.nonfinite_guard import NonfiniteGuard
    from .training.replica_check import check_replicas
else:  # a program pays for what it uses
    __getattr__, __dir__ = lazily(
        __name__,
        {
            **{name: name for name in ("activations", "checkpoint", "data", "memory", "optim", "tensor")},
            **{"parallelize": "tensor", "unparallelize": "tensor"},
            "GradScaler": "training.loss_scaling",
            "NonfiniteGuard": "training.nonfinite_guard",
            "check_replicas": "training.replica_check",
            "find_nonfinite_gradients": "training.nonfinite_gradients",
        },
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
