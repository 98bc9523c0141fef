"""Parameters and buffers of a module that its wrapper takes care of: all but those in `parameters_to_ignore`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from collectives import Communicator

from ..module_tensors import buffers_in
from ..replicas.broadcast import broadcast_states


@dataclass(frozen=True)
class ModuleStates:
    """The parameters and buffers of a module as they are now. ignored: names of those to leave out."""

    module: torch.nn.Module
    ignored: frozenset[str]

    def names(self) -> dict[torch.nn.Parameter, str]:
        """The parameters, trained or not, and their names."""
        return {p: name for name, p in self.module.named_parameters() if name not in self.ignored}

    def trained(self) -> dict[torch.nn.Parameter, str]:
        """The parameters that train, and their names."""
        return {p: name for p, name in self.names().items() if p.requires_grad}

    def buffers(self) -> list[torch.Tensor]:
        """The buffers."""
        if not self.ignored:
            return list(buffers_in(self.module))
        return [b for name, b in self.module.named_buffers() if name not in self.ignored]

    def broadcast(self, comm: Communicator, root: int, buffers: bool) -> None:
        """Overwrites the parameters, and with `buffers` these, with the root's. Collective."""
        states: list[torch.Tensor] = list(self.names())
        states += self.buffers() if buffers else []
        broadcast_states(comm, states, root)
