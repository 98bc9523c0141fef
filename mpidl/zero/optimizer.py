"""ZeroOptimizer: any `torch.optim` class over shards, and with it the training of the model.

    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, lr=3e-4)

The model is changed in place: autograd's gradients go to reduce-scattered buckets, and the inner optimizer steps on
this rank's slices. Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", sections 5 and 7.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from collectives import Communicator

from ..errors import ConfigurationConflict, ConfigurationError, TrainingError
from ..gradients.buckets import bucket_stats
from ..gradients.compression import Compression, Compressor
from ..gradients.grad_bucket import Hook
from ..gradients.hook_check import check_hook
from ..gradients.nonfinite import NonfiniteWatch
from ..mesh import Mesh
from ..optimizer_trial import without_parameters
from .construction import arguments
from .construction.build import build
from .construction.initial_values import Weights
from .construction.module_values import InitFn
from .construction.options import ZeroOptions
from .copy_guard import refuse_copy
from .gradients.zero_grad import install_zero_grad
from .methods import clip_and_unscale, states, step
from .methods.loading import load_safetensors
from .methods.unfreeze import add_group
from .methods.unwrapping import unwrap
from .offload import Offload
from .optimizer_parts import Parts
from .parameters.units import UnitRule
from .states.owned_state import OwnedState
from .states.owned_weights import OwnedWeights
from .stepping.precision import Precision
from .traffic import ZeroTraffic

if TYPE_CHECKING:  # at run time where they are asked for: few programs need them
    from ..gradients.compression.hook import CompressedReduction
    from ..model_files import Rename

_REQUIRED: Any = None  # the error for an argument that is not given says what to write


class ZeroOptimizer(torch.optim.Optimizer):
    """Trains `model` with its optimizer state (stage 1), gradients (2) and parameters (3) cut over the ranks.

    model: of the same structure on every rank; rank 0's parameters and buffers are broadcast.
    optimizer_class: a `torch.optim` class, one of those of `mpidl.optim` that docs/zero.md lists, or one's own;
        `kwargs` are its settings. Classes that update every element by itself (AdamW, SGD, ...) step on slices. For
        others (Muon, Adafactor) each parameter has one rank that gets it whole for the step and keeps its state
        (`whole_steps`). Refused are those whose step depends on several parameters at once (LBFGS), or on sparse
        gradients.
    stage: 1, 2 or 3. It has no default, as a program that reads or changes weights must know whether they are cut.
    params: as torch has it, parameters, or pairs with their names (which are not kept), or dictionaries of them with
        settings of their own; by default one group of all that require gradients. What trains must be in some group.
    process_group: the Communicator; by default the world.
    mesh: a `Mesh`, in place of process_group: state is cut over its dp x cp, and clip_grad_norm_ takes the norm of the
        whole model over pp and tp too.
    units: what stage 3 gathers at a time (`zero.parameters.units.cut_into_units`).
    precision: the dtypes of parameters and of the reduction, in place of the model's own (`zero.Precision`).
    bucket_cap_mb: size of the gradient buckets of stages 1 and 2, in MiB.
    share_in_node: if all ranks are on one node, on CPUs or on one GPU, stage 3 keeps one copy of the parameters in
        memory that they share, and gathers nothing. Weights then change in the step and inside `gathered` alone. False:
        as over several nodes. Ranks with GPUs of their own gather in any case.
    reshard_after_forward: where stage 3 gathers, release a unit between its forward and its backward pass. False: it
        stays whole, for fewer bytes sent and more in memory.
    prefetch: where stage 3 gathers, how many units may be gathered ahead of the one that computes, for slow networks;
        they are whole besides it and the model's own. The last prefetch + 1 units of a forward pass stay whole for its
        backward pass. From 2 on the first units of a pass are gathered as soon as the step before it is done.
    shard_group: the ranks over which state is cut, when not over all: "node" for those of each node, or a Communicator
        from `split` for groups of one size. Ranks of other groups hold the same shards, and reduce their gradients.
    broadcast_buffers: rank 0's buffers (running statistics, ...) are broadcast in every step.
    offload: "cpu", "disk" or an `Offload`: where optimizer state and fp32 masters lie, and delayed updates.
    init_fn: gives values to a model on the meta device that is not from `deferred_init`: called with each module that
        has parameters or buffers of its own. By default the modules' `reset_parameters`. After an error in either the
        model must be built anew.
    weights: a safetensors file or directory, or `zero.Safetensors`, from which a rank reads its slices; of a model that
        is cut over tp, those of its part.
    step_in_backward: the backward pass makes the step: a bucket's, or a unit's, shard is updated when its gradient has
        been reduced, which is then forgotten, so that no rank holds more gradients than those of a few of them.
        `step()` has to follow as always, and only ends the step. What needs all gradients at once is refused:
        clipping, loss scaling, several reduced passes a step; so are offload, and classes whose step needs more than a
        slice, or counts steps by itself.
    compress: how gradients are sent with fewer bytes: "int8", "powersgd:4" (`mpidl.COMPRESSORS`), a `Compression` with
        more settings; by default in full precision. It is a communication hook, so that no other can be registered.
    compress_parameters: how stage 3, where it gathers, gathers parameters with fewer bytes: "int8", "bf16" or "fp16".
        Passes compute with the rounded values, the same on all ranks; steps, states and `gathered` have full precision.
    device: where a model on the meta device gets its values, the host's memory by default. A model that is not on
        the meta device trains where it lies: in the host's memory or on one GPU.

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
        compress: Compression | Compressor | str | None = None,
        prefetch: int = 1,
        compress_parameters: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.stage = stage
        self._nonfinite: NonfiniteWatch | None = None
        self._broadcasts_buffers, self._steps_in_backward = broadcast_buffers, step_in_backward
        options = ZeroOptions(
            stage=stage,
            params=params,
            process_group=process_group,
            units=units,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            share_in_node=share_in_node,
            reshard_after_forward=reshard_after_forward,
            prefetch=prefetch,
            shard_group=shard_group,
            precision=precision,
            offload=offload,
            init_fn=init_fn,
            weights=weights,
            device=device,
            step_in_backward=step_in_backward,
            mesh=mesh,
            compress=compress,
            compress_parameters=compress_parameters,
        )
        self._installed: Parts | None = None
        parts = build(self, model, optimizer_class, options, kwargs, _call_or_raise(self._before_backward_steps))
        install_zero_grad(parts.model, self)
        self._comm, self._prototype = parts.comm, parts.prototype
        self._is_built = False
        pairs = zip(parts.prototype.param_groups, parts.param_groups, strict=True)
        super().__init__([{**without_parameters(made), **group} for made, group in pairs], parts.prototype.defaults)
        self._is_built, self._installed = True, parts
        state: Any = parts.inner.state
        self.state = state

    @property
    def _parts(self) -> Parts:
        if self._installed is None:
            raise TrainingError("this ZeroOptimizer was taken off its model by unwrap(); make a new one")
        return self._installed

    # ---- a training step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the inner optimizer on this rank's slices; then every rank sees the new parameters. Collective.

        A parameter to which no rank gave a gradient since zero_grad is left alone, as by torch. Raises TrainingError,
        on every rank, before anything is changed, for parameters that were unfrozen and not added, and for weights that
        were changed other than by a step, inside `gathered` or by loading.
        """
        return step.make_step(self._parts, self, self._broadcasts_buffers, closure)

    @torch.no_grad()
    def _before_backward_steps(self) -> None:
        step.before_backward_steps(self._parts, self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. With set_to_none=False they become zeros, as torch's: a step still decays weights.

        A parameter without a gradient keeps none.
        """
        clip_and_unscale.clear(self._parts, self._nonfinite, set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only add to this rank's own gradients; the next one outside reduces the sums.

        Saves communication when gradients are accumulated, at the price of whole gradients meanwhile.
        """
        return self._parts.shard_reducer.queue.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scales the gradients so that the norm of the whole model's is at most `max_norm`; returns it. Collective.

        The arguments are those of mpidl.clip_grad_norm_; a step refuses gradients that the ranks have clipped
        differently. Where experts and the rest of the model have an engine each it is refused, for
        mpidl.clip_grad_norm_ over the parameters of both.
        """
        return clip_and_unscale.clip_norm(self._parts, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Brings every element of the gradients into -clip_value .. clip_value."""
        clip_and_unscale.clip_value(self._parts, clip_value)

    def unscale_(self, inverse_scale: float) -> bool:
        """Multiplies the gradients, 16-bit ones from here on in fp32; returns True if one on this rank was not finite.

        For GradScaler, which lets all ranks agree on it. Every rank calls it: stage 3 over nodes sends rounds.
        """
        return clip_and_unscale.unscale(self._parts, inverse_scale)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Registers `hook(state, bucket)` to communicate in place of the reduce-scatter; see `mpidl.comm_hooks`.

        To be registered once, before the first backward pass, the same on all ranks. A hook that reduces the whole
        bucket, as one for DistributedDataParallel, is right, too: this rank's shard of the result is taken. Over
        several nodes, stage 3 needs handles that are a Work or come from `bucket.reduce`, if the ranks do not all run
        the same modules; so do several optimizers in one backward pass, if ranks come to their models in another order.
        Those that leave some ranks' gradients as they are, for DistributedDataParallel alone, are refused.
        """
        check_hook(hook)
        if getattr(state, "leaves_gradients_local", False):
            raise ConfigurationError(
                f"register_comm_hook: a hook with {type(state).__name__} leaves gradients on ranks as they are, and "
                "ZeroOptimizer would take them for the mean; needs DistributedDataParallel, or a hook that averages"
            )
        reducer = self._parts.shard_reducer
        if reducer.hook is not None:
            raise ConfigurationConflict("register_comm_hook: this ZeroOptimizer has a hook already")
        if reducer.counted["reductions"]:
            raise ConfigurationConflict("register_comm_hook: training has begun; register it before")
        reducer.hook = state, hook

    @property
    def comm_hook(self) -> tuple[Any, Hook] | None:
        """The state and the hook that communicate in place of the reduce-scatter; None without."""
        return self._parts.shard_reducer.hook

    @property
    def compressed(self) -> CompressedReduction | None:
        """The reduction by `compress=`; None without."""
        return self._parts.compressed

    def watch_nonfinite(self, on: bool = True) -> None:
        """Has `find_nonfinite` also tell the rank. Costs one more reading of every gradient."""
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
        return clip_and_unscale.find_nonfinite(self._parts, self._nonfinite)

    # ---- the model that is trained ----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Trains parameters of the model that were frozen until now, with settings of their own. Collective.

        Set their requires_grad first, on every rank. Stage 3 has cut the frozen parameters of a unit and of one dtype
        over the ranks as one piece, so they can only be unfrozen together. Masters begin with the values that the
        parameters have now, to which `precision` has rounded them. Not between a backward pass and its step.
        """
        if self._is_built:
            param_group = add_group(self._parts, param_group)
            if self._nonfinite is not None:
                self.watch_nonfinite()
        super().add_param_group(param_group)
        if self._is_built:
            slices = [self._parts.slices[p].values for p in param_group["params"]]
            self._parts.inner.add_param_group({**param_group, "params": slices})

    def unwrap(self) -> torch.nn.Module:
        """Makes the model a plain one again and returns it: whole parameters on every rank, and no hooks. Collective.

        To go on with another optimizer, other settings or without any. Parameters get back the dtype that they had
        before `precision`, with the values of their masters. Gradients are forgotten. Ask for `state_dict` before:
        this optimizer cannot be used any more. Raises TrainingError on every rank, and changes nothing, inside a
        writable `gathered`, in stage 3 over nodes inside any, inside `EMA.averaged`, and for weights that were changed
        other than by a step, `gathered` or loading.
        """
        model = unwrap(self._parts, self._nonfinite)
        self._installed = self._nonfinite = None
        self.state = defaultdict(dict)
        return model

    @torch.no_grad()
    def flush(self) -> None:
        """Shows the values of a delayed update that is under way, as before an evaluation. Collective.

        Returns when no rank needs another one to gather a unit. States and `gathered` do it by themselves.
        """
        states.flush(self._parts)

    def gathered(
        self, module: torch.nn.Module | None = None, writable: bool = True, from_rank: int | None = None
    ) -> AbstractContextManager[None]:
        """Context in which every rank holds the parameters of `module` (default: the model) whole. Collective.

        writable: they may be changed if every rank makes the same change. The model may be run without gradients on
            some ranks only, to sample from it, say; not to change them saves a copy.
        from_rank: the changes of this rank alone count, and go to all.

        A block may be inside another; a writable one begins with what the outer ones have made by then, which the ranks
        agree on as at their end. Raises TrainingError on every rank at the end of the block, or the start of an inner
        one, for parameters that the ranks have changed otherwise than one another.
        """
        return states.gathered(self._parts, module, writable, from_rank)

    # ---- states -----------------------------------------------------------------------------------------------------

    def model_state_dict(self, masters: bool = True) -> dict[str, Any]:
        """The plain model's state_dict, on rank 0; a mark that it is there on the others. Collective.

        The mark is a dictionary with one entry, which `load_model_state_dict` refuses. Of a model that is cut over tp
        it is whole on rank 0 of dp at each rank of tp, and collective over tp as well. Extra states of modules are that
        rank's.

        masters: parameters that have fp32 masters are given in fp32, so that training can go on from them to the bit;
            frozen ones in the dtype that they have. False: all as the forward pass sees them.

        Raises TrainingError on every rank for weights that were changed other than by a step, `gathered` or loading.
        """
        return states.model_state(self._parts, masters)

    def load_model_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads what `model_state_dict` or the plain model's state_dict gave, from rank 0. Collective.

        Rank 0 gives the whole, in any dtype, and over tp rank 0 of dp at each rank of tp; what the others give is
        ignored. Masters take the values before they are rounded; every rank's modules get the extra states. Raises
        ConfigurationError on every rank for missing or unexpected names, other shapes, and errors of `set_extra_state`.
        """
        states.load_model_state(self._parts, state_dict)

    def load_safetensors(
        self, path: str | Path, rename: Rename | None = None, missing: Callable[[str], bool] | None = None
    ) -> None:
        """Loads the model's weights from safetensors, of which each rank reads its slices. Collective.

        The arguments are those of `zero.Safetensors`. Masters take the values before they are rounded. Raises, on every
        rank and before anything is changed, ConfigurationError for names and shapes that do not fit, and TrainingError
        where the files lack some and weights were changed other than by a step, inside `gathered` or by loading.
        """
        load_safetensors(self._parts, path, rename, missing)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as the plain torch optimizer would have it, on rank 0. Collective.

        Of a model that is cut over tp, the state of this rank's parts; `mpidl.checkpoint.save` joins them.

        On others a dictionary of one entry, which tells that the state is on rank 0, and which rank 0 refuses to load.
        """
        return states.optimizer_state(self._parts, self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` or the plain torch optimizer gave, whatever the ranks, from rank 0. Collective."""
        states.load_optimizer_state(self._parts, self, state_dict)

    def gradients(self) -> dict[str, Any]:
        """The reduced gradients by the parameters' names, whole, on rank 0; a mark on the others. Collective.

        What a plain model's `.grad` would be: the mean over the ranks, scaled and clipped as they are now. Those that
        no rank's passes reached since zero_grad are left out. Of a model that is cut over tp they are whole on rank 0
        of dp at each rank of tp, and collective over tp as well. Raises ConfigurationError for a part without a `cut`.
        """
        return states.gradients(self._parts)

    def owned_state(self) -> OwnedState:
        """This rank's slices of the parameters and gradients; the state of a slice is in `state`.

        Waits for a delayed update that is under way, and leaves it unpublished. Collective.
        """
        return states.owned_state(self._parts)

    def owned_weights(self) -> OwnedWeights:
        """This rank's slices of the weights that train: `EMA` averages them, and `DiLoCo` steps from them."""
        return states.owned_weights(self._parts)

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """All tensors of model state on this rank, by category; views of one storage may appear several times."""
        return states.held_tensors(self._parts)

    def offloaded_bytes(self) -> int:
        """Bytes of this rank's optimizer state and masters that are offloaded: see `Offload`."""
        offloaded = self._parts.offloaded
        return 0 if offloaded is None else offloaded.offloaded_bytes()

    def __getstate__(self) -> dict[str, Any]:
        """Neither copied nor pickled."""
        return refuse_copy()

    # ---- what there is ----------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> Communicator:
        """The ranks that train together."""
        return self._comm

    @property
    def model(self) -> torch.nn.Module:
        """The model that it trains."""
        return self._parts.model

    @property
    def inner_class(self) -> type[torch.optim.Optimizer]:
        """The class of the optimizer that steps on the slices."""
        return type(self._prototype)

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of that class which makes this rank's steps, to read what is its own, as `is_synchronised`.

        Its parameters are this rank's slices, or what it steps on in their place, and its state is not to be changed.
        None with `offload`, which has several.
        """
        return self._parts.inner.optimizer

    @property
    def step_in_backward(self) -> bool:
        """True if the backward pass makes the step."""
        return self._steps_in_backward

    def parameter_names(self) -> dict[torch.nn.Parameter, str]:
        """The names, in the plain model, of the parameters that are in groups."""
        slices = self._parts.slices
        return dict(zip(slices, self._parts.names_of(slices), strict=True))

    def traffic(self) -> ZeroTraffic:
        """Counts of what this rank's collectives have moved so far for parameters and gradients."""
        return replace(self._parts.parameters.traffic, **self._parts.shard_reducer.counted)

    def stats(self) -> dict[str, Any]:
        """Describes how training is laid out now, as JSON values for a log. Not collective.

        buckets: the names of the parameters whose gradients are reduced together, in the order in which they are; in
            stage 3 those of one unit.
        bucket_bytes: of each, whole.
        shard_ranks, replicas: the ranks over which state is cut, and those that hold the same shard.
        steps_on: "slices"; "wholes" for classes whose step needs whole parameters, each on one rank; or "replicated"
            for those that update whole parameters on every rank.
        pending_update: whether a delayed update is under way that `flush` would show.
        gradient_buffers: how many buffers the buckets take turns in.
        whole_units: of stage 3 where ranks gather, as over several nodes, the names of the units that are whole on this
            rank; the model's own is "".
        rounds_under_way: there, how many gatherings this rank has asked for to which others have still to come.
        """
        parts = self._parts
        inner, replica_comm = parts.inner, parts.shard_group.replica_comm
        return {
            **bucket_stats(parts.shard_reducer.queue.buckets, self.parameter_names()),
            "shard_ranks": parts.shard_group.size,
            "replicas": 1 if replica_comm is None else replica_comm.size,
            "steps_on": "wholes" if inner.needs_wholes else "replicated" if inner.updates_wholes else "slices",
            "pending_update": parts.offloaded is not None and parts.offloaded.pending,
            "gradient_buffers": parts.shard_reducer.buffer_count,
            **parts.parameters.stats(),
        }


def _call_or_raise(method: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls a ZeroOptimizer's method, and raises once the optimizer is gone.

    It does not keep the optimizer, as the model's hooks lead here.
    """
    where = weakref.WeakMethod(method)

    def call() -> None:
        alive = where()
        if alive is None:
            raise TrainingError("step_in_backward: the ZeroOptimizer whose step the backward pass makes is gone")
        alive()

    return call
