"""Hooks of a model by which each unit is gathered before it is used, in forward and backward, and released after it.

    before a unit's forward pass          gathered
    after it                              released; hooks on outputs and inputs follow its backward pass (`unit_call`)
    a gradient comes to a module in it    gathered, where the gradient has come by another way than the unit's outputs
    the gradient of a parameter           released with its unit's last one

A part of the model that is called without it, as an encoder is, has a forward pass of its own (`forward_passes`).

Who runs what: torch calls the hooks, in the thread of the program or of backward. Those of the model's modules keep the
engine. Those that autograd's graph keeps do not, as a graph may be there longer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...compiling import uncompiled
from ...errors import TrainingError
from ...gradients.backward import BackwardWatch, inside_backward, inside_transform
from ...module_tensors import tensors_in, tensors_with_gradient
from .forward_passes import ForwardPasses
from .gathered_unit import GatheredUnit
from .held_units import HeldUnits
from .unit_call import UnitCall


class UnitHooks:
    """The hooks of a model and its modules, for its units.

    modules: of the units, by their numbers; the last one is the model.
    units: by their numbers.
    held: gathers and releases them.
    watch: of the model's backward passes.
    forwards: its forward passes, which the hooks note.
    names: of the parameters.
    reshards: whether units are released between their forward and their backward pass.
    end_backward: called at the end of a forward pass after which no backward pass comes, to release all units.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        units: Sequence[GatheredUnit],
        held: HeldUnits,
        watch: BackwardWatch,
        forwards: ForwardPasses,
        names: Mapping[torch.nn.Parameter, str],
        reshards: bool,
        end_backward: Callable[[], None],
    ) -> None:
        self._root, self._held = units[-1], held
        self._watch, self._forwards, self._names = watch, forwards, names
        self._reshards, self._end_backward = reshards, end_backward
        self._leaf_hooks: list[torch.utils.hooks.RemovableHandle] = []
        # Trained from the beginning; a unit does not wait for the gradients of what is unfrozen later.
        of_units = ((p, unit) for unit in units for flat in unit.flats for p in flat.shard.parameters)
        self._awaited = {p: unit for p, unit in of_units if p.requires_grad}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for unit, module in zip(units, modules, strict=True):
            self._hook(unit, module)
        for part in self._modules_called_alone(modules):
            self._handles += [
                part.register_forward_pre_hook(self._before_part),
                part.register_forward_hook(self._after_part, always_call=True),
            ]

    def _hook(self, unit: GatheredUnit, module: torch.nn.Module) -> None:
        # The model's own unit is gathered after the watch has cleared away what an exception left.
        first = unit is not self._root
        self._handles += [
            module.register_forward_pre_hook(self._before_forward(unit), prepend=first, with_kwargs=True),
            module.register_forward_hook(self._after_forward(unit), always_call=True, with_kwargs=True),
        ]
        own = {p for flat in unit.flats for p in flat.shard.parameters}
        for part in module.modules() if first else ():
            if part is not module and any(p in own for p in part.parameters(recurse=False)):
                self._handles.append(part.register_forward_hook(self._after_part_of(unit)))

    def _modules_called_alone(self, modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Modules that may be called without the model, as encoders are: with units, or the model's own weights."""
        model, units = modules[-1], set(modules)
        own = {p for flat in self._root.flats for p in flat.shard.parameters}
        parts = [m for m in model.modules() if any(child in units for child in m.modules() if child is not m)]
        parts += [m for m in model.modules() if any(p in own for p in m.parameters(recurse=False))]
        return [part for part in dict.fromkeys(parts) if part not in units]

    def end_pass(self) -> None:
        """Takes the hooks off tensors that outlive the pass."""
        for handle in self._leaf_hooks:
            handle.remove()
        self._leaf_hooks.clear()

    def remove(self) -> None:
        """Takes the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    # ---- forward passes ---------------------------------------------------------------------------------------------

    def _abandon_interrupted_pass(self) -> None:
        """Abandons a backward pass that an exception has cut short, where a forward pass may begin."""
        if not self._forwards.any_runs():
            self._watch.before_forward()

    @uncompiled
    def _before_part(self, part: torch.nn.Module, *_: Any) -> None:
        self._abandon_interrupted_pass()
        self._forwards.begin(part)

    @uncompiled
    def _after_part(self, part: torch.nn.Module, *_: Any) -> None:
        self._forwards.end(part)
        if not (self._forwards.any_runs() or torch.is_grad_enabled() or self._watch.active or inside_backward()):
            self._end_backward()

    def _before_forward(self, unit: GatheredUnit) -> Callable[..., None]:
        @torch.compiler.disable
        def hook(module: torch.nn.Module, *_: Any) -> None:
            self._abandon_interrupted_pass()
            if unit is self._root:
                self._forwards.begin(module)
            self._held.unshard_and_prefetch(unit)

        return hook

    def _after_forward(self, unit: GatheredUnit) -> Callable[..., None]:
        where = weakref.ref(self._held)

        def use() -> None:
            alive = where()
            if alive is not None:
                alive.unshard_and_prefetch(unit)

        def ended() -> None:
            alive = where()
            if alive is not None:
                alive.reshard_if_backward_done(unit)

        @torch.compiler.disable
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            training = torch.is_grad_enabled()
            if unit is self._root:
                self._forwards.end(module)
            if training:
                call = UnitCall(unit, use, ended)
                for tensor in tensors_with_gradient((args, kwargs)) if unit.frozen else ():
                    call.watch_input(tensor)
                for tensor in tensors_with_gradient(output):
                    call.watch_output(tensor)
                self._leaf_hooks += call.leaves
            # Tensors inside a transform have no memory.
            if not inside_transform() and any(unit.shares(tensor) for tensor in tensors_in(output)):
                unit.hold_to_end()
            if self._watch.active or inside_backward():
                return
            if unit is self._root and not training:
                self._end_backward()
            elif unit is not self._root and (self._reshards or not training):
                self._held.reshard_if_unused(unit)

        return hook

    # ---- backward passes --------------------------------------------------------------------------------------------

    def _after_part_of(self, unit: GatheredUnit) -> Callable[..., None]:
        """Makes a hook that unshards the unit where a gradient comes to a module in it by another way than its outputs.

        As by attributes, other modules' hooks and containers, or an output that is a view and was written into.
        """
        where, which = weakref.ref(self._held), weakref.ref(unit)

        def gradient_arrives(_: torch.Tensor) -> None:
            alive, of = where(), which()
            if alive is not None and of is not None and not of.is_held:
                alive.unshard_and_prefetch(of)
                if of.frozen:  # nothing tells when the pass has read its frozen weights for the last time
                    of.hold_to_end()

        def hook(part: torch.nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compiled parts are one step of backward
                for tensor in tensors_with_gradient(output):
                    if tensor.grad_fn is not None:
                        tensor.register_hook(gradient_arrives)

        return hook

    def gradient_arrived(self, parameter: torch.nn.Parameter) -> None:
        """Releases a unit when its parameters' gradients are complete."""
        unit = self._awaited.get(parameter)
        if unit is not None:
            self._check_held(unit, parameter)
            unit.arrived.add(parameter)
            self._held.reshard_if_backward_done(unit)

    def _check_held(self, unit: GatheredUnit, parameter: torch.nn.Parameter) -> None:
        """Raises TrainingError if a gradient was computed while the unit's weights were not there."""
        if not unit.is_held:
            whose = unit.name or "the model"
            raise TrainingError(
                f"{self._names[parameter]}: its gradient comes from a result of {whose} that neither it "
                "nor a module in it has returned, so that its weights were not gathered for it; return the result, "
                "compute it in a module of its own, or set reshard_after_forward=False"
            )
