"""Activation checkpointing, and where the checkpoints lie: cut over ranks, in one piece of memory, or on disk.

    mpidl.activations.checkpoint_modules(model)                      each block keeps its input alone

    checkpoint     one checkpointed call: what runs again in backward
    modules        `checkpoint_modules`: checkpoints in a model that is not written for them
    store          moves a checkpoint into memory, over the ranks of a group or to disk, and back
    arena, disk    the memory and the file that a store uses
    first_fit      allocates slots in either

Here "checkpoint" is a saved input, and `mpidl.checkpoint` saves a training. Models of mpidl have checkpoints of their
own, without a store (`models.segments`).

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 6
(ZeRO-R); Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from .checkpoint import checkpoint
from .modules import CheckpointedModules, checkpoint_modules
from .store import CheckpointStore

__all__ = ["CheckpointStore", "CheckpointedModules", "checkpoint", "checkpoint_modules"]
