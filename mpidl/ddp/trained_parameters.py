"""Parameters that train, on which all ranks agree as a backward pass begins.

    forward pass        notes what trains: parameters may have been frozen, thawed or given another dtype
    the pass begins     a small all-reduce: does the same train on all ranks, and can every rank train it?
    where it is new     `take_up`; the buckets are then laid out for it

A forward pass sends nothing. The ranks compare one number made of what trains, and look for the parameter only where it
differs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
import torch

from collectives import Communicator

from ..digest import code
from ..errors import ModelMismatch
from ..job.agreement import raise_everywhere
from ..mesh.experts import problem_of_others
from ..replicas.start_check import check_models_agree, check_settings_agree
from .module_changes import ModuleChanges
from .sparse import sparse_parameters

_Training = tuple[torch.dtype, bool | tuple[int, ...]]  # a parameter's dtype, and its strides if not the usual ones


class TrainedParameters:
    """The parameters of a module that train.

    names, ignored, static_graph, divisor: as of `Reducer`.

    parameters: those for which the buckets are laid out.
    sparse: those of them whose gradients are sparse.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Mapping[torch.nn.Parameter, str],
        comm: Communicator,
        ignored: Container[str],
        *,
        static_graph: bool,
        divisor: int,
    ) -> None:
        self._module, self._names, self._comm, self._ignored = module, names, comm, ignored
        self._static_graph, self._divisor = static_graph, divisor
        self._changes = ModuleChanges(module, names, ignored)
        self._wanted: list[_Training | None] = []  # in the last synchronised forward pass
        self._choice: int | None = None  # by which ranks compare `_wanted`
        self._problem: str | None = None  # with what is in `_wanted`
        self._taken_up: list[_Training | None] = []  # as the buckets are laid out
        self.parameters: list[torch.nn.Parameter] = []
        self.sparse: set[torch.nn.Parameter] = set()
        self.note()

    def note(self) -> bool:
        """Notes what trains: dtypes, and orders in memory. Returns whether the buckets are laid out for others."""
        wanted: list[_Training | None] = [
            (p.dtype, p.is_contiguous() or p.stride()) if p.requires_grad else None for p in self._names
        ]
        if wanted != self._wanted:
            self._wanted, self._choice = wanted, None
            self._problem = problem_of_others(self._divisor, ((self._names[p], p) for p in self.wanted()))
        return self._wanted != self._taken_up

    def wanted(self) -> list[torch.nn.Parameter]:
        """The parameters that train, as they were last noted."""
        return [p for p, each in zip(self._names, self._wanted, strict=True) if each is not None]

    def set_static_graph(self) -> None:
        """Sets `static_graph`, on which the ranks agree as well."""
        self._static_graph, self._choice = True, None

    def agree(self, problem: str | None) -> bool:
        """Compares what trains on all ranks. Returns whether the buckets are laid out for others. Collective.

        problem: why this rank cannot begin a pass. Raises on every rank ModelMismatch where what trains differs, and
        TrainingError where any has a problem, parameters that were replaced, resized or added, or others than experts
        that train in an engine of experts.
        """
        if self._choice is None:
            self._choice = code(repr((self._wanted, self._static_graph)))
        found = self._changes.problem() or self._problem
        problem = found if problem is None else problem
        told = np.array([self._choice, -self._choice, problem is not None])
        self._comm.all_reduce(told, "max")
        if told[2]:
            raise_everywhere(self._comm, problem)
        if told[0] != -told[1]:
            check_models_agree(self._comm, self._module, self._ignored)
            check_settings_agree(self._comm, "DistributedDataParallel", {"static_graph": self._static_graph})
            raise ModelMismatch(
                "DistributedDataParallel: the ranks' last forward passes found different parameters that train, or "
                "different dtypes; freeze, unfreeze or convert them on all ranks before the same forward pass"
            )
        return self._wanted != self._taken_up

    def take_up(self) -> None:
        """Takes up what was noted: for that the buckets are laid out next."""
        self._taken_up, self.parameters = self._wanted, self.wanted()
        self.sparse = sparse_parameters(self._module).intersection(self.parameters)
