"""ZeroOptimizer: any `torch.optim` class over shards, and with it the training of the model.

    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=3e-4)

The model is changed in place: autograd's gradients go to reduce-scattered buckets, and the inner optimizer steps on
this rank's slices. Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", sections 5 and 7.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from collectives import Communicator

from ..backward import BackwardWatch, goes_to, inside_backward, replacement_test
from ..buckets import MIB
from ..clip import check_norm_type, clamp_, local_norms, norm_over_shards, scale_
from ..consistency import (
    check_everywhere,
    check_models_agree,
    check_settings_agree,
    raise_everywhere,
    refuse_everywhere,
)
from ..ddp.arguments import communicator, flag
from ..errors import ConfigurationError, TrainingError
from ..mesh import Mesh
from ..mesh.groups import data_group
from ..mesh.norm import norm_over_mesh
from ..nonfinite import NonfiniteWatch, are_finite
from ..optim.trust import TrustRatioOptimizer, squared_norms_over
from ..place import place_of
from ..replicate import broadcast_states
from . import arguments, state
from .backward_steps import BackwardSteps
from .clearing import clears_alone, clears_with
from .construction.construct import Construction, Weights
from .construction.modules import InitFn
from .grad_attribute import GradAttributes
from .groups import ShardGroup
from .guard import WeightGuard
from .hooks import Hook, refuse_copy
from .node_shared import NodeSharedParameters, shared_arenas
from .offload import Offload, OffloadedOptimizer
from .optimizer_class import comparable, needs, prototype, try_group, without_parameters
from .own_storages import with_own_storages
from .precision import Conversion, Precision
from .replicated import ReplicatedParameters
from .sharded import ShardedParameters
from .shards import GradientShards, ParameterShard
from .slices import Slice
from .stateful import StatefulOptimizer
from .strategy import ParameterStrategy
from .traffic import Traffic
from .unfreeze import added_group
from .units import Unit, UnitRule, cut, flat_groups, warn_of_rest
from .unwrapping import make_whole
from .whole import WholeParameters
from .whole_steps import WholeSteps

_REQUIRED: Any = None  # the error for an argument that is not given says what to write
_COPIES = ("__deepcopy__", "__reduce_ex__")
_ENGINE = (
    *("_parameters", "_gradients", "_guard", "_whole", "_slices", "_shards", "_inner", "_offloaded", "_watch"),
    *("_grads", "_nonfinite", "_group", "_model", "_names", "_trained", "_hooks", "_dtypes"),
)


class ZeroOptimizer(StatefulOptimizer):
    """Trains `model` with its optimizer state (stage 1), gradients (2) and parameters (3) cut over the ranks.

    model: alike in structure on every rank; rank 0's parameters and buffers are broadcast.
    optimizer_class: a `torch.optim` class, LARS or LAMB of `mpidl.optim`, or one's own; `kwargs` are its settings.
        Classes that update every element by itself (AdamW, SGD, ...) step on slices. For others (Muon, Adafactor)
        each parameter has one rank that gets it whole for the step and keeps its state (`whole_steps`). Refused are
        those whose step depends on several parameters at once (LBFGS), or on sparse gradients.
    stage: 1, 2 or 3. To be given, as a program that reads or changes weights must know whether they are cut.
    params: as torch has it, parameters, or pairs with their names (which are not kept), or dictionaries of them with
        settings of their own; by default one group of all that require gradients. What trains must be in some group.
    process_group: the Communicator; by default the world.
    mesh: a `Mesh`, in place of process_group: state is cut over its dp x cp, and clip_grad_norm_ takes the norm of the
        whole model over pp and tp too.
    units: what stage 3 gathers at a time (`zero.units.cut`).
    precision: the dtypes of parameters and of the reduction, in place of the model's own (`zero.Precision`).
    bucket_cap_mb: size of the gradient buckets of stages 1 and 2, in MiB.
    share_in_node: if all ranks are on one node, stage 3 keeps one copy of the parameters in memory that they share, and
        gathers nothing. Weights then change in the step and inside `gathered` alone. False: as over several nodes.
    reshard_after_forward: where stage 3 gathers, let a unit go between its forward and its backward pass. False: it
        stays whole, for fewer bytes on the way and more in memory.
    shard_group: the ranks over which state is cut, when not over all: "node" for those of each node, or a Communicator
        from `split` for groups of one size. Ranks of other groups hold the same shards, and reduce their gradients.
    broadcast_buffers: rank 0's buffers (running statistics, ...) are broadcast in every step.
    offload: "cpu", "disk" or an `Offload`: where optimizer state and fp32 masters lie, and delayed updates.
    init_fn: gives values to a model on the meta device that is not from `deferred_init`: called with each module that
        has parameters or buffers of its own. By default the modules' `reset_parameters`. After an error in either the
        model must be built anew.
    weights: a safetensors file or directory, or `zero.Safetensors`, from which a rank reads its slices.
    step_in_backward: the backward pass makes the step: a bucket's, or a unit's, shard is updated when its gradient has
        been reduced, which is then forgotten, so that no rank holds more gradients than those of a few of them.
        `step()` has to follow as always, and only closes the books. What needs all gradients at once is refused:
        clipping, loss scaling, several reduced passes a step; so are offload, and classes whose step needs more than a
        slice, or counts steps by itself.
    device: where a model on the meta device gets its values, the host's memory by default. Any other one trains where
        it lies: in the host's memory or on one GPU.

    Every rank must make the same calls. `backward()` reduces gradients over the ranks (their mean) and adds them to
    those of earlier passes, until `zero_grad`; a parameter's `.grad` is then a `ShardedGradient`, which answers norms
    and the like over the ranks. `param_groups` holds the model's parameters, so that learning-rate schedulers work as
    always. 16-bit parameters get fp32 masters, made of the values before any rounding by `precision`; the inner
    optimizer steps on them with fp32 gradients.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer_class: type[torch.optim.Optimizer] = _REQUIRED,
        stage: int = _REQUIRED,
        params: arguments.Params = None,
        process_group: Communicator | None = None,
        units: UnitRule = None,
        bucket_cap_mb: float = 25.0,
        broadcast_buffers: bool = True,
        share_in_node: bool = True,
        reshard_after_forward: bool = True,
        shard_group: Communicator | str | None = None,
        precision: Precision | None = None,
        offload: Offload | str | None = None,
        init_fn: InitFn | None = None,
        weights: Weights = None,
        device: torch.device | str | None = None,
        step_in_backward: bool = False,
        mesh: Mesh | None = None,
        **kwargs: Any,
    ) -> None:
        self._comm = data_group("ZeroOptimizer", communicator(process_group), mesh)
        self._mesh = mesh
        model = arguments.plain(model)
        check_everywhere(self._comm, lambda: arguments.check(model, optimizer_class, stage, bucket_cap_mb))
        flags = {"share_in_node": share_in_node, "reshard_after_forward": reshard_after_forward}
        flags |= {"broadcast_buffers": broadcast_buffers, "step_in_backward": step_in_backward}
        check_everywhere(self._comm, lambda: [flag(name, value) for name, value in flags.items()])
        self._group = ShardGroup.of(self._comm, shard_group)
        self._model = model
        self.stage = stage
        groups = check_everywhere(self._comm, lambda: arguments.groups(model, params))
        elsewhere = check_everywhere(self._comm, lambda: Offload.of(offload))
        self._place = check_everywhere(self._comm, lambda: place_of("model", model, device=device))
        alike = {"optimizer_class": optimizer_class.__name__, "stage": stage, "bucket_cap_mb": bucket_cap_mb}
        alike |= {**flags, "offload": elsewhere is not None, "device": self._place.device.type}
        check_settings_agree(self._comm, "ZeroOptimizer", {**alike, **comparable(kwargs)})
        check_models_agree(self._comm, model)
        conversion = check_everywhere(self._comm, lambda: Conversion.of(model, precision))
        check_settings_agree(self._comm, "precision", conversion.settings())
        plan = check_everywhere(self._comm, lambda: Construction.of(model, init_fn, weights, self._place.device))
        chosen = check_everywhere(self._comm, lambda: cut(model, units))
        check_settings_agree(self._comm, "units", {"names": [unit.name for unit in chosen]})
        check_settings_agree(self._comm, "params", arguments.outline(model, groups))
        self._prototype = check_everywhere(self._comm, lambda: prototype(optimizer_class, groups, kwargs))
        away = elsewhere is not None
        self._needs = partial(
            needs, optimizer_class, settings=kwargs, offloaded=away, step_in_backward=step_in_backward
        )
        found = check_everywhere(self._comm, lambda: self._needs(groups))
        wholes = bool(found.wholes)
        check_everywhere(self._comm, lambda: arguments.refuse_placements(model, optimizer_class, mesh, wholes))
        halves = conversion.precision.param_dtype is not None
        self._offloaded = None
        if elsewhere is not None:
            self._offloaded = OffloadedOptimizer(
                self._group, elsewhere, optimizer_class, kwargs, groups, halves, self._place
            )
        self._names = state.StateNames.of(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._trained = trained
        self._watch = BackwardWatch()
        self._watch.concerns = partial(goes_to, trained)
        self._watch.are_replaced = replacement_test(model, set(model.parameters()))
        with_values = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
        plan.begin(self._comm)  # the last that refuses anything, and the first that changes the model
        broadcast_states(self._comm, with_values)
        self._watch.attach(model)
        originals, self._hooks = conversion.carry_out(model)
        self._dtypes = {p: values.dtype for p, values in originals.items()}
        reduce_dtype = conversion.precision.reduce_dtype
        bucket_bytes = bucket_cap_mb * MIB
        if reduce_dtype is not None and conversion.precision.param_dtype is not None:
            bucket_bytes *= conversion.precision.param_dtype.itemsize / reduce_dtype.itemsize
        if stage == 3:
            self._parameters: ParameterStrategy = self._cut_parameters(chosen, share_in_node, reshard_after_forward)
            rotating, lasting = 2, sum(group[0].requires_grad for group in flat_groups(chosen[-1:]))
        else:
            self._parameters = ReplicatedParameters(model, self._group.shards, self._place, bucket_bytes)
            rotating, lasting = 3, 0
        names = {p: name for name, p in model.named_parameters()}
        shards = [shard for shard in self._parameters.shards if shard.trains]
        self._gradients = GradientShards(
            [shard.parameters for shard in shards],
            self._group,
            self._watch,
            stage == 1 and not step_in_backward,
            names,
            reduce_dtype,
            wait=self._parameters.wait_for_reduction,
            end_pass=self._parameters.drain,
            rotating=rotating,
            lasting=lasting,
            place=self._place,
            keeps_shards=elsewhere is None and not step_in_backward,  # both are to save memory
        )
        self._grads = GradAttributes(self._gradients, self._group.shards, self._watch, names, self._parameters.release)
        self._shards, self._slices = [], {}
        self._slice(shards)
        if plan.finish(self._comm, self._group.rank, originals, self._parameters.shards, self._slices):
            self._parameters.publish()
        self._parameters.start()
        self._nonfinite: NonfiniteWatch | None = None
        inner_groups = [{**g, "params": [self._slices[p].values for p in g["params"]]} for g in groups]
        self._inner = self._offloaded
        if self._offloaded is not None:
            self._offloaded.add_param_groups(inner_groups)
        elif found.wholes:
            make = partial(optimizer_class, **kwargs)
            self._inner = WholeSteps(self._group, make, self._slices, found.together)
            self._inner.add_param_groups(inner_groups)
        else:
            self._inner = optimizer_class(inner_groups, **kwargs)
        if isinstance(self._inner, TrustRatioOptimizer):
            self._inner.squared_norms = partial(squared_norms_over, self._group.shards)
        self._broadcasts_buffers = broadcast_buffers
        self._hooks.append(model.register_state_dict_post_hook(Hook(with_own_storages)))
        for name in _COPIES:
            setattr(model, name, refuse_copy)
        clears_with(model, self)
        self._building = True
        pairs = zip(self._prototype.param_groups, groups, strict=True)
        super().__init__([{**without_parameters(made), **group} for made, group in pairs], self._prototype.defaults)
        self._building = False
        self.state = self._inner.state
        self._guard = WeightGuard(self, model, names, self._parameters)
        self._guard.watch(self._slices)
        self._whole = WholeParameters(self._comm, model, self._parameters, self._slices)
        self._backward_steps: BackwardSteps | None = None
        if step_in_backward:
            self._backward_steps = BackwardSteps(
                self._inner,
                self._parameters,
                self._shards,
                self._slices,
                self._guard,
                agree=self._agreement(),
                reached=self._gradients.reached,
            )
            self._gradients.stepper = self._backward_steps
        if stage == 3 and units is None and self._comm.rank == 0 and self._group.shards.size > 1:
            warn_of_rest(chosen, stacklevel=2)

    def _cut_parameters(
        self, units: list[Unit], share_in_node: bool, reshard_after_forward: bool
    ) -> NodeSharedParameters | ShardedParameters:
        comm = self._group.shards
        arenas = shared_arenas(units, comm, self._place) if share_in_node or comm.size == 1 else None
        if arenas is not None:
            return NodeSharedParameters(units, comm, arenas, self._place)
        return ShardedParameters(
            self._model,
            units,
            comm,
            self._watch,
            self._place,
            world=self._comm,
            share_in_node=share_in_node,
            reshard_after_forward=reshard_after_forward,
        )

    @property
    def process_group(self) -> Communicator:
        """The ranks that train together."""
        return self._comm

    def parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The names, in the plain model, of the parameters that are in groups."""
        return dict(zip(self._slices, self._names_of(self._slices), strict=True))

    def _slice(self, shards: Iterable[ParameterShard]) -> None:
        make = Slice if self._offloaded is None else self._offloaded.slice
        for number, shard in enumerate(shards, len(self._shards)):
            self._shards.append(shard)
            for p, piece in zip(shard.parameters, shard.layout.pieces(self._group.rank), strict=True):
                self._slices[p] = make(shard, number, piece)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Trains parameters of the model that were frozen until now, with settings of their own. Collective.

        Set their requires_grad first, on every rank. Stage 3 has cut the frozen parameters of a unit and of one dtype
        over the ranks as one piece, so they can only be unfrozen together. Masters begin with the values that the
        parameters have now, to which `precision` has rounded them. Not between a backward pass and its step.
        """
        if self._building:
            super().add_param_group(param_group)
            return
        group = check_everywhere(self._comm, lambda: added_group(self._model, self._slices, param_group))
        names = self._names_of(group["params"])
        check_settings_agree(self._comm, "add_param_group", {"params": names})
        # The class's own errors, before anything is changed.
        check_everywhere(self._comm, lambda: try_group(self._prototype, group))
        check_everywhere(self._comm, lambda: self._check_needs(group))
        self.flush()
        shards = self._parameters.add(group["params"], self._names_of)
        self._gradients.add([shard.parameters for shard in shards])
        self._trained += group["params"]
        self._slice(shards)
        self._guard.watch(self._slices)
        if self._nonfinite is not None:
            self.watch_nonfinite()
        super().add_param_group(group)
        self._inner.add_param_group({**group, "params": [self._slices[p].values for p in group["params"]]})

    def _check_needs(self, group: Mapping[str, Any]) -> None:
        if self._needs([group]).wholes and not isinstance(self._inner, WholeSteps):
            raise ConfigurationError(
                f"add_param_group: a step of {self.inner_class.__name__} with this group's settings needs whole "
                "parameters, and with the first groups' it did not: give a group like this one at construction"
            )

    def unwrap(self) -> torch.nn.Module:
        """Makes the model a plain one again and returns it: whole parameters on every rank, and no hooks. Collective.

        To go on with another optimizer, other settings or without any. Parameters get back the dtype that they had
        before `precision`, with the values of their masters. Gradients are forgotten. Ask for `state_dict` before:
        this optimizer cannot be used any more. Raises TrainingError on every rank, and changes nothing, inside
        `gathered` and for weights that were changed other than by a step, `gathered` or loading.
        """
        self.flush()
        refuse_everywhere(self._comm, self._guard.inside("unwrap") or self._guard.damage())
        self._parameters.release()
        self.zero_grad()
        for part in (self._guard, self._watch, self._gradients, self._parameters, self._nonfinite, *self._hooks):
            if part is not None:
                part.remove()
        model = self._model
        for name in _COPIES:
            delattr(model, name)
        clears_alone(model)
        make_whole(self._group, self._parameters.shards, self._slices, self._dtypes)
        for name in _ENGINE:
            delattr(self, name)
        self.state = defaultdict(dict)
        return model

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _ENGINE:
                raise TrainingError("this ZeroOptimizer was taken off its model by unwrap(); make a new one")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _names_of(self, parameters: Iterable[torch.nn.Parameter]) -> list[str]:
        names = {p: name for name, p in reversed(self._names.parameters.items())}
        return [names[p] for p in parameters]

    # ---- a training step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on this rank's slices; then every rank sees the new parameters. Collective.

        A parameter to which no rank gave a gradient since zero_grad is left alone, as by torch. Raises TrainingError,
        on every rank, before anything is changed, for parameters that were unfrozen and not added, and for weights that
        were changed other than by a step, inside `gathered` or by loading.
        """
        self._place.refuse_capture("ZeroOptimizer.step")
        if inside_backward():
            raise TrainingError("step() inside a backward pass, which has not reduced all gradients yet: step after it")
        problem = self._guard.problem(self._slices) or self._grads.foreign()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._backward_steps is not None:
            self._gradients.refuse_unsent()
            self._backward_steps.close()
            self._grads.take_changes()
            if self._broadcasts_buffers:
                broadcast_states(self._comm, self._model.buffers())
            return loss
        self._parameters.release()
        self._hand_settings_on()
        reached = self._attach_gradients(problem or self._grads.problem())
        if self._broadcasts_buffers:
            broadcast_states(self._comm, self._model.buffers())
        self._inner.step()
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({key: value for key, value in inner.items() if key != "params"})  # what it notes there
        for part in self._slices.values():
            part.write_back()
        self._parameters.publish()
        self._guard.stepped(reached)
        return loss

    def _hand_settings_on(self) -> None:
        for mine, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in mine.items() if key != "params"})

    def _agreement(self) -> Callable[[], None]:
        """Calls `_before_backward_steps`, and does not keep this optimizer, as the model's hooks lead to it."""
        method = weakref.WeakMethod(self._before_backward_steps)

        def agree() -> None:
            before = method()
            if before is None:
                raise TrainingError("step_in_backward: the ZeroOptimizer whose step the backward pass makes is gone")
            before()

        return agree

    @torch.no_grad()
    def _before_backward_steps(self) -> None:
        """What a step sees to before it changes anything."""
        problem = self._guard.problem(self._slices)
        self._parameters.wait_for_gathers()
        self._hand_settings_on()
        self._agreed(problem, [], arguments.settings_of(self.param_groups, self.defaults))

    def _refuse_gone(self, what: str) -> None:
        """TrainingError where the backward pass has used the gradients up."""
        if self._backward_steps is not None:
            raise TrainingError(
                f"{what}: with step_in_backward the backward pass has made the step, and no gradient is left that "
                f"{what} could see; make the ZeroOptimizer without it"
            )

    def _attach_gradients(self, problem: str | None) -> list[torch.nn.Parameter]:
        """Gives each slice its part of the reduced gradient, or None where no rank's passes reached the parameter.

        Returns the reached ones. problem: why this rank cannot step, for which all ranks raise TrainingError.
        """
        self._grads.update()
        counts = range(len(self._shards))
        flags = [r for number in counts for r in self._gradients.reached(number)]
        settings = arguments.settings_of(self.param_groups, self.defaults)  # not what somebody notes in them
        changes = self._grads.take_changes()
        if changes:
            settings["clipping since the last step"] = changes
        flag = iter(self._agreed(problem, flags, settings))
        reached = []
        for number, shard in enumerate(self._shards):
            gradient = self._gradients.shard(number)
            for p in shard.parameters:
                if next(flag):
                    reached.append(p)
                    self._slices[p].attach(gradient)
                else:
                    self._slices[p].attach(None)
        return reached

    def _agreed(self, problem: str | None, flags: list[bool], settings: dict[str, Any]) -> list[bool]:
        """Which of the flags any rank has set. Raises TrainingError for problems and for settings that differ."""
        agreed = np.array([problem is not None, *flags, *arguments.fingerprint(settings)], np.uint8)
        work = self._comm.all_reduce(agreed, "max", async_op=inside_backward())
        if work is not None:
            self._parameters.wait_for_reduction(work)  # others may still gather units
        if agreed[0]:
            raise_everywhere(self._comm, problem)
        if not arguments.same_fingerprints(agreed):
            check_settings_agree(self._comm, "step", settings)
        return [bool(flag) for flag in agreed[1 : 1 + len(flags)]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. With set_to_none=False they count as zero, so that a step still decays weights."""
        self._gradients.clear()
        self._grads.clear()
        if self._nonfinite is not None:
            self._nonfinite.clear()
        if not set_to_none:
            for number in range(len(self._shards)):
                flags = self._gradients.reached(number)
                flags[:] = [True] * len(flags)
        for part in self._slices.values():
            part.values.grad = None
        for p in self._model.parameters():
            p.grad = None
        if not set_to_none:
            self._grads.show()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scales the gradients so that the norm of the whole model's is at most `max_norm`; returns it. Collective.

        The arguments are those of mpidl.clip_grad_norm_; a step refuses what was not clipped alike on all ranks.
        """
        self._refuse_gone("clip_grad_norm_")
        self._parameters.release()
        self._gradients.widen()
        shards = self._reduced()
        if self._mesh is None or not self._mesh.layout.model_axes:
            norm = norm_over_shards(shards, norm_type, self._group.shards)
        else:
            power = check_norm_type(norm_type)
            norms = local_norms([part.of(shards[part.number]) for part in self._slices.values()], power)
            norm = norm_over_mesh(norms, self._slices, power, self._mesh, shards=True, counted=self._group.is_first)
        scale_(shards, max_norm, norm, error_if_nonfinite)
        self._grads.note(f"clip_grad_norm_(max_norm={float(max_norm)}, norm_type={float(norm_type)})")
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Brings every element of the gradients into -clip_value .. clip_value."""
        self._refuse_gone("clip_grad_value_")
        self._gradients.widen()
        clamp_(self._reduced(), clip_value)
        self._grads.note(f"clip_grad_value_({float(clip_value)})")

    def unscale_(self, inverse_scale: float) -> bool:
        """Multiplies the gradients, 16-bit ones from here on in fp32; whether one on this rank was not finite.

        For GradScaler, which lets all ranks agree on it. Not collective.
        """
        self._refuse_gone("unscale_")
        self._parameters.release()
        self._gradients.widen()
        shards = self._reduced()
        for shard in shards:
            shard.mul_(inverse_scale)
        return not all(are_finite(shards))

    def watch_nonfinite(self, on: bool = True) -> None:
        """From now on `find_nonfinite` also knows the rank. Costs one more reading of every gradient."""
        if self._nonfinite is not None:
            self._nonfinite.remove()
        named = {name: p for p, name in self.parameter_names().items()}
        self._nonfinite = NonfiniteWatch(named.items()) if on else None

    def find_nonfinite(self) -> list[tuple[str, int | None]] | None:
        """The parameters whose gradients since zero_grad are infinite or no number; None if there are none. Collective.

        With the rank from whose backward pass it came: each rank's first such gradient first. The rank is None where
        `watch_nonfinite` was off, as means over the ranks do not tell, or where it arose in the reduction. With
        `step_in_backward` only what that watches is found.
        """
        self._parameters.release()
        watched = None if self._nonfinite is None else self._nonfinite.find(self._comm)
        if watched is not None or self._backward_steps is not None:
            return None if watched is None else [*watched]
        reduced = self._reduced()
        fine = are_finite(part.of(reduced[part.number]) for part in self._slices.values())
        flags = np.array([not each for each in fine], np.uint8)
        self._comm.all_reduce(flags, "max")
        found = [p for p, flag in zip(self._slices, flags, strict=True) if flag]
        return [(name, None if self._comm.size > 1 else 0) for name in self._names_of(found)] or None

    def _reduced(self) -> list[torch.Tensor]:
        """This rank's shards of the reduced gradients."""
        self._grads.update()
        return [self._gradients.shard(number) for number in range(len(self._shards))]

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's own gradients; the next one outside reduces the sums.

        Saves communication when gradients are accumulated, at the price of whole gradients meanwhile.
        """
        return self._gradients.queue.no_sync()

    def __getstate__(self) -> dict[str, Any]:
        """Neither copied nor pickled."""
        return refuse_copy()

    def traffic(self) -> Traffic:
        """What this rank's collectives have moved so far for parameters and gradients."""
        return replace(self._parameters.traffic, **self._gradients.counted)

    @property
    def step_in_backward(self) -> bool:
        """Whether the backward pass makes the step."""
        return self._backward_steps is not None

    @property
    def inner_class(self) -> type[torch.optim.Optimizer]:
        """The class of the optimizer that steps on the slices."""
        return type(self._prototype)

    @property
    def model(self) -> torch.nn.Module:
        """The model that it trains."""
        return self._model
