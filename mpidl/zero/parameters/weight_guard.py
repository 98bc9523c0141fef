"""Refuses changes of weights of which the optimizer does not know, by the parameter's name.

    step, gathered, load_model_state_dict   the ways to change weights; the guard is told
    p.mul_(2), nn.init.zeros_(p)            torch counts the writes to a tensor: more of them, at the next step
    p.data = x, model.to(torch.bfloat16)    another address, shape or dtype, at the next forward pass or step
    model.out = nn.Linear(7, 3)             a parameter that was not there at construction, at the next step
    model.load_state_dict(...)              at once, by a hook of each module

A forward pass and a step compare a few numbers of each parameter, and read no weight. The engine writes through views
of its own, whose writes torch counts separately. Torch counts writes through `p.data` separately too, so the guard does
not detect `p.data.mul_(2)`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import TrainingError
from ...module_tensors import parameters_in
from ...trained_by import Trainer, claim, release
from ..copy_guard import UnpicklableHook
from ..slices import Slice
from .strategy import ParameterStrategy

_HEALS = "optimizer.load_model_state_dict(...) sets the weights right"


@dataclass(eq=False)
class _ParameterMemory:
    """The layout of a parameter, as the engine has made it.

    values: what its data was then.
    address: where it lay.
    refuses_writes: whether writing to it in place is wrong.
    version: torch's count of writes to it, of which none was wrong.
    """

    values: torch.Tensor
    address: int
    refuses_writes: bool
    version: int


class WeightGuard:
    """Watches the parameters that `optimizer` has cut over the ranks. names: of all parameters of the model.

    replaced: whether other weights are in their place for a while, an average of them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        names: Mapping[torch.nn.Parameter, str],
        parameters: ParameterStrategy,
    ) -> None:
        self._model, self._names, self._parameters = model, names, parameters
        self._trainer = Trainer(optimizer)
        self._memory_of: dict[torch.nn.Parameter, _ParameterMemory] = {}
        self._writable: list[set[torch.nn.Parameter]] = []
        self.replaced = False
        # The hooks stay with the model and must not keep its optimizer. First, as later ones make parameters whole.
        self._handles = [model.register_forward_pre_hook(_call_if_alive(self._before_forward), prepend=True)]
        before_loading = UnpicklableHook(_call_if_alive(self._before_loading))
        for module in (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)):  # these take no hook
            self._handles.append(module._register_load_state_dict_pre_hook(before_loading, with_module=True))

    def watch(self, slices: Mapping[torch.nn.Parameter, Slice]) -> None:
        """Takes in the parameters that have come into shards, as they are laid out now."""
        keeps = self._parameters.keeps_equal_writes
        with torch._C.DisableTorchFunctionSubclass():
            for p in (p for shard in self._parameters.shards for p in shard.parameters if p not in self._memory_of):
                # A write that all ranks make lasts where no master overwrites it.
                self._memory_of[p] = _ParameterMemory(
                    p.data, p.data_ptr(), not keeps or slices[p].is_master, p._version
                )
                claim(p, self._trainer)

    def remove(self) -> None:
        """Takes the hooks off the model, and the notes of the optimizer off its parameters."""
        for handle in self._handles:
            handle.remove()
        for p in self._memory_of:
            release(p)

    # ---- what was done to the weights -------------------------------------------------------------------------------

    def step_problem(self, slices: Collection[torch.nn.Parameter]) -> str | None:
        """Tells why no step can be taken on this rank, None if one can. slices: the parameters that are in groups."""
        if self.replaced:
            return self.block_problem("step")
        forbidden = self._parameters.step_problem()
        if forbidden is not None:
            return forbidden
        present = list(parameters_in(self._model))
        if any(p not in self._names for p in present):
            later = next(name for name, p in self._model.named_parameters() if p not in self._names)
            return (
                f"{later}: it came into the model after the ZeroOptimizer was made, which does not train it; put "
                "modules and parameters in place first, and change values inside `with optimizer.gathered(...):`"
            )
        if any(p.requires_grad and p not in slices for p in present):
            unfrozen = [self._names[p] for p in self._model.parameters() if p.requires_grad and p not in slices]
            listed = ", ".join(unfrozen[:5])
            return f"{listed}: unfrozen since construction; add it by add_param_group, or freeze it again"
        return self.weight_problem()

    def block_problem(self, what: str) -> str | None:
        """Tells why `what` is not possible now, None if it is."""
        if self.replaced:
            return f"{what}: inside `with ema.averaged():` the weights are averages"
        return f"{what}: inside `with optimizer.gathered(...):` the parameters are copies" if self._writable else None

    def weight_problem(self, *, inside: bool = False) -> str | None:
        """Tells what is wrong with the weights of this rank, None if nothing is. inside: allow a block's writes."""
        return self._moved_problem() or self._described(
            [p for p in self._written() if not (inside and self._may_write(p))]
        )

    def refuse_moved(self) -> None:
        """Raises TrainingError, on this rank, for a parameter that is no longer where the engine has laid it."""
        problem = self._moved_problem()
        if problem is not None:
            raise TrainingError(problem)

    def _moved_problem(self) -> str | None:
        for p in self._misplaced():
            was = self._memory_of[p].values
            return (
                f"{self._names[p]}: other memory was put in its place, now {tuple(p.shape)} {p.dtype}, as "
                f"`p.data = ...` and `model.to(...)` do, but the ZeroOptimizer trains the {tuple(was.shape)} "
                f"{was.dtype} that it has laid out; copy values into it inside "
                f"`with optimizer.gathered(...):`; {_HEALS}"
            )
        return None

    def _misplaced(self) -> list[torch.nn.Parameter]:
        if self._writable:  # they are copies
            return []
        with torch._C.DisableTorchFunctionSubclass():
            return [
                p
                for p, memory in self._memory_of.items()
                if (p.data_ptr() != memory.address and p.data_ptr() != self._parameters.gathered_address(p))
                or (p.dtype, p.shape) != (memory.values.dtype, memory.values.shape)
            ]

    def _written(self) -> list[torch.nn.Parameter]:
        with torch._C.DisableTorchFunctionSubclass():
            return [
                p for p, memory in self._memory_of.items() if memory.refuses_writes and p._version != memory.version
            ]

    def _described(self, written: list[torch.nn.Parameter], where: str = "outside of") -> str | None:
        if not written:
            return None
        listed = ", ".join(self._names[p] for p in written[:5])
        effect = self._parameters.write_effect
        return f"{listed}: changed in place {where} `with optimizer.gathered(...):`; {effect}; {_HEALS}"

    # ---- the ways to change them ------------------------------------------------------------------------------------

    @contextmanager
    def gathered(self, module: torch.nn.Module | None, writable: bool) -> Iterator[None]:
        """Context around a `gathered` block. writable: the block may write to the parameters of `module`, or to all.

        Raises TrainingError for others that were written to.
        """
        before = set(self._written())
        allowed = set((self._model if module is None else module).parameters()) if writable else set()
        depth = len(self._writable)
        try:
            if writable:
                self._writable.append(allowed)
            yield
        finally:
            del self._writable[depth:]
            if writable:
                for p in allowed & self._memory_of.keys() - before:
                    self._memory_of[p].version = p._version
        wrong = [p for p in self._written() if p not in before and not self._may_write(p)]
        where = "outside of the module of" if writable and module else "without writable=True in"
        problem = self._described(wrong, where)
        if problem is not None:
            raise TrainingError(problem)

    def _may_write(self, parameter: torch.nn.Parameter) -> bool:
        return any(parameter in allowed for allowed in self._writable)

    def put_back(self) -> None:
        """Puts parameters that were moved back to their memory, before all weights are loaded."""
        with torch._C.DisableTorchFunctionSubclass():
            for p in self._misplaced():
                p.data = self._memory_of[p].values

    def stepped(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Notes a step's writes to these: backward through what was computed with them before is torch's error."""
        with torch._C.DisableTorchFunctionSubclass():
            for p in parameters:
                before = p._version
                torch.autograd.graph.increment_version(p)
                self._memory_of[p].version += p._version - before  # other writes still count

    def accept(self) -> None:
        """Accepts the weights as they are, after all were loaded: what was done to them before does not count."""
        with torch._C.DisableTorchFunctionSubclass():
            for p, memory in self._memory_of.items():
                memory.version = p._version

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.refuse_moved()

    def _before_loading(self, module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Raises TrainingError if a plain load_state_dict would write to the module's own parameters."""
        for key, p in module._parameters.items():
            if p is not None and p in self._memory_of and prefix + key in state_dict and not self._may_write(p):
                raise TrainingError(
                    f"model.load_state_dict(): a ZeroOptimizer trains {self._names[p]}; call "
                    "optimizer.load_model_state_dict(...) on every rank, with the state on rank 0, or "
                    "model.load_state_dict(...) inside `with optimizer.gathered():`"
                )


def _call_if_alive(method: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook that calls a method as long as its object is there."""
    where = weakref.WeakMethod(method)

    @torch.compiler.disable
    def hook(*args: Any) -> None:
        found = where()
        if found is not None:
            found(*args)

    return hook
