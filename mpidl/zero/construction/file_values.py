"""Initial values from safetensors files, of which a rank reads the rows that hold its slices.

Of a parameter that is cut over tp, a slice is one of this rank's part of it, which is in several ranges of the file:

    file    q0 q1 q2 q3 k0 k1 k2 k3      rank 0 of tp has q0 q1 k0 k1, and of these its second rank of dp reads the
            q4 q5 q6 q7 k4 k5 k6 k7      second row: q4 q5 k4 k5
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from collectives import Communicator

from ...errors import ConfigurationError
from ...job.agreement import check_everywhere
from ...model_files import ModelFiles, Rename, elements
from ...replicas.start_check import check_settings_agree
from .value_targets import Targets, wanted


class WeightFiles:
    """Opened and compared with a model, whose tensors they fit. tensors: those of which they have the values.

    path, rename, missing: as `zero.Safetensors` has them.
    names: the model's, several for a tied one; one of them must be in the files, or all may be missing.

    Raises ConfigurationError as ModelFiles, and for arguments that are none.
    """

    def __init__(
        self,
        path: str | Path,
        rename: Rename | None,
        missing: Callable[[str], bool] | None,
        names: Mapping[str, torch.Tensor],
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"weights: got {path!r}; needs a path, or a zero.Safetensors with one")
        for argument, function in (("rename", rename), ("missing", missing)):
            if not (function is None or callable(function)):
                raise ConfigurationError(f"{argument}: got {function!r}; needs a function of a name")
        self._files = ModelFiles(path, names, rename, missing or (lambda _: False))
        self.tensors = self._files.tensors

    def check(self, comm: Communicator, with_tp: Communicator) -> None:
        """Raises on every rank if the ranks' files lack other names, or a tied tensor has several values. Collective.

        ModelMismatch, and ConfigurationError. Of a tensor under several names each rank compares an even part.

        with_tp: the ranks of `comm` and all ranks of tp of each; names are compared over these.
        """
        lacking = [names[0] for tensor, names in self._files.names.items() if tensor not in self.tensors]
        check_settings_agree(with_tp, "weights", {"missing names": lacking})
        check_everywhere(comm, lambda: self._files.check_ties(comm.rank, comm.size))

    def fill(self, targets: Targets) -> None:
        """Reads what the targets want."""
        with self._files.opened() as read:
            for tensor, ranges in targets.items():
                if wanted(ranges):
                    stored = read(self._files.names_in_files(tensor)[0])
                    for target in ranges:
                        target.write(elements(stored, tensor, target.start, target.stop))
