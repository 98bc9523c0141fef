"""Checkpoints: saved by any engine on any number of ranks, loaded by any other.

    what a user calls    saving, loading; importing, exporting: plain weights in and out;
                         __main__: python -m mpidl.checkpoint, which inspects, verifies and exports
    state in memory      engine: what this rank holds and writes; held_tensor: a tensor of it;
                         collect: all that is saved, with the names of the tensors; random_states; compression_state:
                         remainders of `compress=`
    on the disk          folder: directories and the commit of a new one; directory_lock; writing: files, in the
                         foreground or behind the training; tensorfile: safetensors; index: where every element lies;
                         json_encoding: nested values as JSON
    what is valid        schema: an index; json_checks: single values
    back into memory     matching: makes a plan by names and shapes; reading: ranges of tensors;
                         saved_state_check: whether the optimizer understands its states; stateful_checks: whether a
                         scheduler, a scaler or a sampler can go on with its state
    over a mesh          cuts: elements that two cuts have in common; joining: parts that make whole tensors;
                         parts: where they do not, a checkpoint of each part

To store something more: `collect` writes it, tensors under a prefix of their own; `schema` checks it; `loading` (JSON)
or `matching` (tensors) reads it.
States of an optimizer are stored without that. CONTRIBUTING.md has the steps and the tests.

docs/checkpoint.md describes the format.
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
