"""Builds a ZeroOptimizer: checks what it was given, changes the model, and returns the parts that train it.

    check       arguments, settings, models and plans, agreed on by all ranks; an error changes nothing
    parameters  rank 0's values go to all; the model takes on `precision`; a strategy cuts its parameters into shards
    gradients   buckets of the same layouts, hooks of autograd, `.grad` attributes
    values      what had none (meta device, files) is filled into shards and masters
    inner       an optimizer of slices, or one that replaces it: offloaded, or on whole parameters
    guards      hooks that refuse copies, foreign weights and moved memory; steps in backward

Every rank makes the same collectives in the order of this file. The model's hooks keep `watch`, and by it the gradients
and the strategy, but not the optimizer: only weak references lead back to that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import TYPE_CHECKING, Any

import torch

from collectives import Communicator
from collectives.devices import Place

from ...compiling import unwrap_compiled
from ...engine_arguments import communicator, flag
from ...gradients.backward import BackwardWatch, PassPhases, reaches_any, replacement_test
from ...gradients.buckets import MIB
from ...gradients.compression import OwnedCompressor
from ...gradients.compression.refusals import refuse_complex, refuse_mesh, refuse_momentum
from ...gradients.compression.settings import compression
from ...job.agreement import check_everywhere
from ...job.model_device import place_of_model
from ...mesh import Mesh, placement
from ...mesh.experts import divide_contributions, gradient_group, note_engine
from ...optim.elementwise_state import note_whole_size
from ...optim.trust_ratio import TrustRatioOptimizer, squared_norms_over
from ...optimizer_trial import StepNeeds, comparable, exchanges_gradients
from ...replicas.broadcast import broadcast_states
from ...replicas.start_check import check_models_agree, check_settings_agree
from ..copy_guard import UnpicklableHook, refuse_copies
from ..forward_label import label_forward
from ..gradients.buffer_pool import ROTATING
from ..gradients.grad_attribute import GradAttributes
from ..gradients.shard_reducer import ShardReducer
from ..offload import Offload
from ..optimizer_parts import Parts
from ..parameter_shard import ParameterShard
from ..parameters.gathered_block import GatheredBlocks
from ..parameters.node_shared import NodeSharedParameters, shared_arenas
from ..parameters.replicated import ReplicatedParameters
from ..parameters.strategy import ParameterStrategy
from ..parameters.units import Unit, UnitLayout, cut_into_units, lay_out, warn_of_large_root_unit
from ..parameters.weight_guard import WeightGuard
from ..shard_group import ShardGroup
from ..slices import Slice
from ..states.separate_storages import with_own_storages
from ..states.whole_states import StateNames
from ..stepping.backward_steps import BackwardShardSteps
from ..stepping.inner import InnerOptimizer, SliceSteps
from ..stepping.optimizer_class import find_needs, prototype
from ..stepping.precision import Conversion
from ..stepping.whole_steps import WholeSteps
from . import arguments
from .initial_values import InitialValues
from .options import ZeroOptions

if TYPE_CHECKING:  # at run time with compress=, or offload=, alone: few programs need them
    from ...gradients.compression.hook import CompressedReduction
    from ..offload import OffloadedOptimizer


@dataclass(frozen=True, eq=False)
class _AgreedPlan:
    """The plan on which the ranks have agreed before anything is changed."""

    groups: list[dict[str, Any]]
    place: Place
    conversion: Conversion
    initial_values: InitialValues
    units: list[Unit]
    prototype: torch.optim.Optimizer
    find_needs: Callable[[Iterable[Mapping[str, Any]]], StepNeeds]
    needs: StepNeeds
    offloaded: OffloadedOptimizer | None
    compressed: CompressedReduction | None
    of_parameters: OwnedCompressor | None


def build(
    owner: torch.optim.Optimizer,
    model: torch.nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    options: ZeroOptions,
    kwargs: Mapping[str, Any],
    before_backward_steps: Callable[[], None],
) -> Parts:
    """Changes `model` in place and returns the parts that train it for `owner`. Collective.

    before_backward_steps: called at the start of each pass that makes steps; must not keep `owner`.

    Raises ConfigurationError and ModelMismatch on every rank, and changes nothing, for arguments that cannot work.
    """
    model = unwrap_compiled(model)
    world, divisor = gradient_group(
        "ZeroOptimizer", communicator(options.process_group), options.mesh, model, needed="mesh="
    )
    over_tp = options.mesh if options.mesh is not None and options.mesh.size("tp") > 1 else None
    with_tp = world
    if over_tp is not None:  # those of experts average over edp
        with_tp = over_tp.along("dp", "cp", "tp") if divisor == 1 else over_tp.along("edp", "tp")
    group, plan = _check(world, with_tp, divisor, model, optimizer_class, options, kwargs)
    note_engine(options.mesh, divisor)
    state_names = StateNames.of(model)
    watch, trained = _watch(model)
    with_values = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    plan.initial_values.begin(world)  # the first that changes the model
    broadcast_states(world, with_values)
    watch.attach(model)
    originals, hooks = plan.conversion.carry_out(model)
    dtypes = {p: values.dtype for p, values in originals.items()}
    names = {p: name for name, p in model.named_parameters()}

    block = lcm(plan.needs.block, 1 if plan.of_parameters is None else plan.of_parameters.block)
    layouts = lay_out(plan.units, group.size, block) if options.stage == 3 else []
    parameters = _cut_parameters(model, plan, layouts, group, watch, options)
    trains = [shard for shard in parameters.shards if shard.trains]
    shard_reducer = _make_shard_reducer(parameters, trains, plan, layouts, group, watch, names, options)
    if plan.compressed is not None and not plan.compressed.chooses_none:
        shard_reducer.hook, reducer = (None, plan.compressed), weakref.proxy(shard_reducer)
        plan.compressed.buckets = lambda: reducer.buckets_without_storage()
    tp = same_gradients = None
    if over_tp is not None:
        from ..gradients.same_gradients import SameGradients  # which few programs need

        tp, same_gradients = over_tp["tp"], SameGradients(over_tp, group.has_root)
    reduced = shard_reducer.reduced_gradients
    grad_attributes = GradAttributes(reduced, group.shard_comm, watch, names, parameters.release, tp)
    watch.phases = _phases(parameters, shard_reducer, grad_attributes)
    shards: list[ParameterShard] = []
    slices: dict[torch.nn.Parameter, Slice] = {}
    slice_shards(group, plan.offloaded, trains, shards, slices)
    if plan.initial_values.finish(world, with_tp, group.rank, originals, parameters.shards, slices):
        parameters.publish()
    parameters.start()

    inner: InnerOptimizer
    if exchanges_gradients(optimizer_class):
        from ..stepping.replicated_steps import ReplicatedSteps  # which few programs need

        wholes = parameters.held_tensors()["parameters"]
        inner = ReplicatedSteps(optimizer_class, kwargs, plan.groups, group, shards, wholes, slices, reduced)
        reduced.sums_whole, shard_reducer.hook = True, (inner.optimizer, inner.hook)
    else:
        inner = _inner(plan, group, slices, optimizer_class, kwargs, options.mesh)
    hooks.append(model.register_state_dict_post_hook(UnpicklableHook(with_own_storages)))
    hooks += divide_contributions(model.parameters(), divisor)
    refuse_copies(model)
    guard = WeightGuard(owner, model, names, parameters)
    guard.watch(slices)
    hooks += label_forward(model)
    gathered_blocks = GatheredBlocks(world, model, parameters, slices, guard.refuse_moved)
    backward_steps = None
    if options.step_in_backward:
        assert isinstance(inner, SliceSteps)  # `find_needs` refuses what steps otherwise
        backward_steps = BackwardShardSteps(
            inner.partial(),
            parameters,
            shards,
            slices,
            guard,
            agree=before_backward_steps,
            reached=reduced.reached,
        )
        shard_reducer.stepper = backward_steps
    if options.stage == 3 and options.units is None and world.rank == 0 and group.shard_comm.size > 1:
        warn_of_large_root_unit(plan.units, stacklevel=3)
    if plan.compressed is not None:
        plan.compressed.claim_compressor()
    return Parts(
        shard_group=group,
        tp=tp,
        with_tp=with_tp,
        mesh=options.mesh,
        divisor=divisor,
        model=model,
        place=plan.place,
        names=state_names,
        param_groups=plan.groups,
        prototype=plan.prototype,
        find_needs=plan.find_needs,
        trained=trained,
        watch=watch,
        parameters=parameters,
        shards=shards,
        slices=slices,
        shard_reducer=shard_reducer,
        reduced_gradients=reduced,
        grad_attributes=grad_attributes,
        same_gradients=same_gradients,
        inner=inner,
        offloaded=plan.offloaded,
        guard=guard,
        gathered_blocks=gathered_blocks,
        backward_steps=backward_steps,
        compressed=plan.compressed,
        hooks=hooks,
        dtypes=dtypes,
    )


def slice_shards(
    group: ShardGroup,
    offloaded: OffloadedOptimizer | None,
    added: Iterable[ParameterShard],
    shards: list[ParameterShard],
    slices: dict[torch.nn.Parameter, Slice],
) -> None:
    """Appends shards that train to `shards`, and this rank's slices of their parameters to `slices`."""
    make = Slice if offloaded is None else offloaded.slice
    for number, shard in enumerate(added, len(shards)):
        shards.append(shard)
        pieces = zip(shard.parameters, shard.layout.pieces(group.rank), shard.layout.sizes, strict=True)
        for p, piece, size in pieces:
            slices[p] = make(shard, number, piece)
            note_whole_size(slices[p].values, size)


def _check(
    world: Communicator,
    with_tp: Communicator,
    divisor: int,
    model: Any,
    optimizer_class: type[torch.optim.Optimizer],
    options: ZeroOptions,
    kwargs: Mapping[str, Any],
) -> tuple[ShardGroup, _AgreedPlan]:
    """Checks all arguments, on all ranks, and plans what is to be done. Collective; the model stays as it is.

    with_tp: as in Parts. All of these ranks raise what one of them finds, as they wait for each other over tp.
    """

    def of_world(action: Callable[[], Any]) -> Any:
        """Returns `action()`, which is collective over `world` and raises on all of it, and then on all of with_tp."""
        return action() if with_tp is world else check_everywhere(with_tp, action)

    stage, cap = options.stage, options.bucket_cap_mb
    check_everywhere(with_tp, lambda: arguments.check(model, optimizer_class, stage, cap, options.prefetch))
    check_everywhere(with_tp, lambda: [flag(name, value) for name, value in options.flags().items()])
    group: ShardGroup = of_world(lambda: ShardGroup.from_argument(world, options.shard_group))
    groups = check_everywhere(with_tp, lambda: arguments.checked_groups(model, options.params))
    offload = check_everywhere(with_tp, lambda: Offload.of(options.offload))
    place = check_everywhere(with_tp, lambda: place_of_model("model", model, device=options.device))
    check_everywhere(with_tp, lambda: _refuse_combinations(model, optimizer_class, options))
    compared = {"optimizer_class": optimizer_class.__name__, "stage": stage, "bucket_cap_mb": cap}
    compress = check_everywhere(with_tp, lambda: None if options.compress is None else compression(options.compress))
    compared |= {**options.flags(), "offload": offload is not None, "device": place.device.type, "compress": compress}
    given = options.compress_parameters
    compared |= {"prefetch": options.prefetch, "compress_parameters": given}
    check_settings_agree(with_tp, "ZeroOptimizer", {**compared, **comparable(kwargs)})
    of_world(lambda: check_models_agree(world, model))
    of_parameters = check_everywhere(with_tp, lambda: arguments.compressor_of_parameters(model, stage, given))
    conversion = check_everywhere(with_tp, lambda: Conversion.of(model, options.precision))
    check_settings_agree(with_tp, "precision", conversion.settings())
    initial_values = check_everywhere(
        with_tp, lambda: InitialValues.of(model, options.init_fn, options.weights, place.device)
    )
    compressed = None
    if compress is not None:
        from ...gradients.compression.hook import CompressedReduction

        names = {p: name for name, p in model.named_parameters()}
        settings = compress
        mesh = options.mesh
        if mesh is not None:
            check_everywhere(with_tp, lambda: refuse_mesh(settings, mesh))
        trained = {p: name for p, name in names.items() if p.requires_grad}
        check_everywhere(with_tp, lambda: refuse_complex(trained))
        dtype = conversion.precision.reduce_dtype or conversion.precision.param_dtype
        compressed = check_everywhere(
            with_tp, lambda: CompressedReduction(settings, world, names, group.shard_comm, group.replica_comm, dtype)
        )
    units = check_everywhere(with_tp, lambda: cut_into_units(model, options.units))
    check_settings_agree(with_tp, "units", {"names": [unit.name for unit in units]})
    check_settings_agree(with_tp, "params", arguments.groups_to_compare(model, groups))
    made = check_everywhere(with_tp, lambda: prototype(optimizer_class, groups, kwargs))
    if exchanges_gradients(optimizer_class):
        one_bit: Any = made
        check_everywhere(with_tp, lambda: one_bit.refuse_nodes(world))
    if compressed is not None:
        compressor = compressed.compressor
        check_everywhere(with_tp, lambda: refuse_momentum(compressor, made))
    needs_of = partial(
        find_needs,
        optimizer_class,
        settings=kwargs,
        offloaded=offload is not None,
        step_in_backward=options.step_in_backward,
    )
    needs = check_everywhere(with_tp, lambda: needs_of(groups))
    check_everywhere(with_tp, lambda: arguments.refuse_placements(model, options.mesh, divisor))
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    check_everywhere(
        with_tp,
        lambda: arguments.refuse_trained_placements(
            named, optimizer_class, options.mesh, offload is not None, needs.wholes, divisor
        ),
    )
    offloaded = None
    if offload is not None:
        from ..offload import OffloadedOptimizer

        halves = conversion.precision.param_dtype is not None
        settings_of_offload = offload
        offloaded = of_world(
            lambda: OffloadedOptimizer(group, settings_of_offload, optimizer_class, kwargs, groups, halves, place)
        )
    of_world(lambda: initial_values.check(world, with_tp))
    return group, _AgreedPlan(
        groups=groups,
        place=place,
        conversion=conversion,
        initial_values=initial_values,
        units=units,
        prototype=made,
        find_needs=needs_of,
        needs=needs,
        offloaded=offloaded,
        compressed=compressed,
        of_parameters=of_parameters,
    )


def _refuse_combinations(
    model: torch.nn.Module, optimizer_class: type[torch.optim.Optimizer], options: ZeroOptions
) -> None:
    """Refuses what an optimizer that averages gradients itself cannot be combined with."""
    if exchanges_gradients(optimizer_class):
        from .one_bit_checks import refuse_combinations  # which few programs need

        refuse_combinations(model, optimizer_class, options)


def _watch(model: torch.nn.Module) -> tuple[BackwardWatch, list[torch.nn.Parameter]]:
    """Makes the model's BackwardWatch, and the list of parameters that train.

    A pass that reaches one of them belongs to the engine.
    """
    watch, trained = BackwardWatch(), [p for p in model.parameters() if p.requires_grad]
    watch.is_training_backward = partial(reaches_any, trained)
    watch.are_replaced = replacement_test(model, set(model.parameters()))
    return watch, trained


def _cut_parameters(
    model: torch.nn.Module,
    plan: _AgreedPlan,
    layouts: list[UnitLayout],
    group: ShardGroup,
    watch: BackwardWatch,
    options: ZeroOptions,
) -> ParameterStrategy:
    """Cuts the model's parameters over the ranks by the strategy that stage and ranks call for.

    layouts: of the units, for stage 3.
    """
    comm = group.shard_comm
    if options.stage < 3:
        precision = plan.conversion.precision
        bucket_bytes = options.bucket_cap_mb * MIB
        if precision.reduce_dtype is not None and precision.param_dtype is not None:
            bucket_bytes *= precision.param_dtype.itemsize / precision.reduce_dtype.itemsize
        return ReplicatedParameters(model, comm, plan.place, bucket_bytes, plan.needs.block)
    in_node = options.share_in_node or comm.size == 1
    arenas = shared_arenas(layouts, comm, plan.place) if in_node else None
    if arenas is not None:
        return NodeSharedParameters(layouts, comm, arenas, plan.place)
    from ..parameters.sharded import ShardedParameters  # which programs on one node do not need

    return ShardedParameters(
        model,
        layouts,
        comm,
        watch,
        plan.place,
        worlds=(group.world,) if options.mesh is None else (group.world, options.mesh.comm),
        share_in_node=options.share_in_node,
        reshard_after_forward=options.reshard_after_forward,
        prefetch=options.prefetch,
        compressor=plan.of_parameters,
    )


def _make_shard_reducer(
    parameters: ParameterStrategy,
    trains: list[ParameterShard],
    plan: _AgreedPlan,
    layouts: list[UnitLayout],
    group: ShardGroup,
    watch: BackwardWatch,
    names: Mapping[torch.nn.Parameter, str],
    options: ZeroOptions,
) -> ShardReducer:
    """Makes the buckets of the shards that train, and the hooks that fill and reduce them."""
    shared, dedicated = ROTATING, 0
    if options.stage == 3:
        shared, dedicated = ROTATING - 1, sum(flat.trains for flat in layouts[-1].groups)
    return ShardReducer(
        trains,
        group,
        watch,
        options.stage == 1 and not options.step_in_backward,
        names,
        plan.conversion.precision.reduce_dtype,
        wait=parameters.wait_for_reduction,
        num_shared_buffers=shared,
        num_dedicated_buffers=dedicated,
        place=plan.place,
        keeps_shard_memory=plan.offloaded is None and not options.step_in_backward,  # both are to save memory
    )


def _phases(parameters: ParameterStrategy, shard_reducer: ShardReducer, grad_attributes: GradAttributes) -> PassPhases:
    """The order of what happens in a backward pass."""
    queue = shard_reducer.queue
    return PassPhases(
        begun=(shard_reducer.begin_pass, grad_attributes.begin_pass),
        reached=(*parameters.on_gradient, queue.arrive),
        filled=(parameters.end_backward,),
        reduced=(queue.launch_rest, queue.finish, parameters.drain),
        finished=(shard_reducer.end_pass, queue.end, grad_attributes.show_gradients),
        abandoned=(parameters.end_backward, queue.reset, shard_reducer.abandon_pass),
        communicates=lambda: queue.synchronise,
    )


def _inner(
    plan: _AgreedPlan,
    group: ShardGroup,
    slices: Mapping[torch.nn.Parameter, Slice],
    optimizer_class: type[torch.optim.Optimizer],
    kwargs: Mapping[str, Any],
    mesh: Mesh | None,
) -> InnerOptimizer:
    """Makes what steps on the slices."""
    groups = [{**given, "params": [slices[p].values for p in given["params"]]} for given in plan.groups]
    if plan.offloaded is not None:
        plan.offloaded.add_param_groups(groups)
        return plan.offloaded
    if plan.needs.wholes:
        inner = WholeSteps(group, partial(optimizer_class, **kwargs), slices, plan.needs.together, mesh)
        inner.add_param_groups(groups)
        return inner
    optimizer = optimizer_class(groups, **kwargs)
    if isinstance(optimizer, TrustRatioOptimizer):
        optimizer.squared_norms = lambda tensors, of: squared_norms_over(
            group.shard_comm, mesh, {part.values: placement(p) for p, part in slices.items()}, tensors, of
        )
    return SliceSteps(optimizer, slices)
