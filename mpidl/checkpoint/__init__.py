"""Checkpoints: saved by any engine on any number of ranks, loaded by any other.

    state in memory   each rank's slices of logical tensors, named as in the plain model      engine, collect
    on the disk       safetensors files and an index that says where every element lies       tensorfile, index, folder
    back              matched by name, checked, and read: each rank what it holds              matching, reading
    over a mesh       cuts of whole tensors, so that any other mesh can load them               joining, cuts
                      or, if it is not known how parts join, a checkpoint of each of them       parts

`saving` and `loading` are what a user calls; `exporting` makes plain weights of a model or of a checkpoint, `importing`
takes them in. docs/checkpoint.md describes the format.
"""

from .exporting import export_checkpoint, export_safetensors
from .folder import find, named, newest
from .importing import import_safetensors
from .loading import Loaded, load
from .reading import verify
from .saving import claim, save, wait
from .writing import Saving

__all__ = [
    "Loaded",
    "Saving",
    "claim",
    "export_checkpoint",
    "export_safetensors",
    "find",
    "import_safetensors",
    "load",
    "named",
    "newest",
    "save",
    "verify",
    "wait",
]
