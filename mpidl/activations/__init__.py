"""Activation checkpointing, and where the checkpoints lie: cut over ranks, in one piece of memory, or on disk.

    mpidl.activations.checkpoint_modules(model)                      each block keeps its input alone

    checkpoint     what runs again in backward
    modules        checkpoints in a model that knows nothing of them
    store          a checkpoint's way into memory, over the ranks of a group, to disk, and back
    arena, disk    the memory and the file
    space          places in them

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 6
(ZeRO-R); Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from .checkpoint import checkpoint
from .modules import CheckpointedModules, checkpoint_modules
from .store import CheckpointStore

__all__ = ["CheckpointStore", "CheckpointedModules", "checkpoint", "checkpoint_modules"]
