"""Cuts a model over the ranks of tp, in place, by a plan, and makes it whole again.

model, mesh -> plan (given, ready or automatic) -> checks, the same on every rank -> each style cuts its module

Every rank of tp calls `parallelize` with the same arguments. What may fail on one rank runs inside `check_everywhere`,
so an error on one rank is an error on all, before a style communicates.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collectives import Communicator

from ..errors import ConfigurationError, UsageError
from ..job.agreement import check_everywhere
from ..job.objects import all_gather_object
from ..mesh import Mesh
from ..mesh.placement import Cut, cuts_over, join_parts, place, placement
from .assigned import keep_placements
from .automatic import automatic_plan
from .deferred import recorded_views
from .dropout import drop_by_index
from .input_check import refuse_different_arguments, refuse_different_models
from .plans import Plan, StyledModules, styled_modules
from .ready_plans import PLANS, plan_for
from .saving import refuse_to_save_parts, without_marks
from .source import methods_of
from .styles import SequenceBegins, SequenceEnds, Style
from .tensor_parallel import ATTRIBUTE, TensorParallel

if TYPE_CHECKING:  # at run time with plan="auto" alone
    from .trial import Trials


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan | str | None = None,
    *,
    sequence_parallel: bool = False,
    dropout: str = "streams",
    overlap: bool | str = "auto",
    leave_whole: Sequence[str] = (),
) -> nn.Module:
    """Cuts a model over the ranks of tp, in place, and returns it.

    model: whole, the same on all ranks of tp. One on the meta device stays there: `load_safetensors` or `materialize`
        give it values.
    plan: names of modules and their styles; by default the ready plan of the model's class; "auto" finds attentions,
        feed-forward networks and the vocabulary by structure, and prints on rank 0 what it does.
    sequence_parallel: in training mode each rank also computes norms, dropout and residuals on a piece of the
        sequences, which takes the memory of activations down by the number of ranks.
    dropout: "streams" for random numbers of each rank's own where ranks compute different things; "by_index" to drop
        the same elements for every tp, also 1, which takes more time and memory.
    overlap: with sequence_parallel, gathers the input of a column-parallel layer in chunks, each during the product of
        the chunk before, and in backward during the product that gives the input's gradient; "auto" does so if tp
        spans several nodes, or if each node has a core to spare. Sums of products then round differently.
    leave_whole: of plan="auto": modules that it does not cut, nor anything in them, by names as in a plan.

    "auto" checks what it cuts: it runs a copy of each kind of block cut and whole and compares. `parallelize` does so
    with the block's input alone, and leaves whole what differs. The first call of a block with other arguments
    repeats the check; a difference there is a ConfigurationError.

    Before training, give torch's default generator one seed on all ranks of tp, and different ones over dp.

    Parameters keep their identity, so layers stay tied and an optimizer that has them already has the parts. Raises
    ConfigurationError on every rank of tp for a plan that does not fit; the model is not to be used then.
    """
    if not isinstance(mesh, Mesh):
        raise ConfigurationError(f"parallelize: mesh: got {type(mesh).__name__}; needs a mpidl.Mesh")
    check_everywhere(mesh["tp"], lambda: _check_arguments(model, plan, dropout, overlap, leave_whole))
    compared: dict[str, Any] = {"plan": plan if plan is None or isinstance(plan, str) else "a dict"}
    compared |= {"sequence_parallel": bool(sequence_parallel), "dropout": dropout}
    compared |= {"overlap": overlap if overlap == "auto" else bool(overlap), "leave_whole": sorted(leave_whole)}
    refuse_different_arguments(mesh["tp"], compared)
    cuts, by_index = mesh.size("tp") > 1, dropout == "by_index"
    left_whole = check_everywhere(mesh["tp"], lambda: _reasons_to_leave_whole(leave_whole, model))
    report, styled = _make_plan(model, plan, mesh, left_whole, sequence_parallel=sequence_parallel)
    trials = None
    while plan == "auto" and cuts:
        trials = _trials(model, styled, mesh, trials, sequence_parallel=sequence_parallel)
        differing = trials.find_differing_regions()
        if not differing:
            break
        if sequence_parallel:
            name, how = next(iter(differing.items()))
            raise ConfigurationError(f"sequence_parallel: plan='auto': {name}: {how}; needs a plan by hand")
        left_whole |= differing
        report, styled = _make_plan(model, plan, mesh, left_whole, sequence_parallel=False)
    if not cuts and not by_index:
        return model
    overlaps = cuts and sequence_parallel and (gains_by_overlap(mesh) if overlap == "auto" else bool(overlap))
    tp = TensorParallel(mesh, sequence_parallel=sequence_parallel, by_index=by_index, overlaps=overlaps)
    tp.model = weakref.ref(model)
    if cuts:
        if report and mesh.comm.rank == 0:
            print("\n".join(report), flush=True)
        tp.recorded = check_everywhere(mesh["tp"], lambda: recorded_views(model))
        check_everywhere(mesh["tp"], lambda: apply_styles(model, styled, tp))
        refuse_to_save_parts(model, tp)
        keep_placements(model, tp)
        if trials is not None:
            trials.try_at_first_calls(tp)
    tp.end_passes_of(model)
    if by_index:
        drop_by_index(model, tp)
    setattr(model, ATTRIBUTE, tp)
    return model


def _check_arguments(
    model: nn.Module, plan: Plan | str | None, dropout: str, overlap: bool | str, leave_whole: Sequence[str]
) -> None:
    """Raises ConfigurationError or UsageError for arguments of `parallelize` that cannot work."""
    if dropout not in ("streams", "by_index"):
        raise ConfigurationError(f"parallelize: dropout: got {dropout!r}; needs 'streams' or 'by_index'")
    if overlap not in (True, False, "auto"):
        raise ConfigurationError(f"parallelize: overlap: got {overlap!r}; needs True, False or 'auto'")
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"parallelize: model: got {type(model).__name__}; needs a torch.nn.Module")
    if isinstance(leave_whole, str) or not all(isinstance(name, str) for name in leave_whole):
        raise ConfigurationError(f"parallelize: leave_whole: got {leave_whole!r}; needs a list of names of modules")
    if leave_whole and plan != "auto":
        raise ConfigurationError("parallelize: leave_whole: got names without plan='auto'; leave them out of the plan")
    if getattr(model, ATTRIBUTE, None) is not None or any(placement(p).cut is not None for p in model.parameters()):
        raise UsageError("parallelize: the model is cut already; needs a whole one")


def _reasons_to_leave_whole(leave_whole: Sequence[str], model: nn.Module) -> dict[str, str]:
    """Returns by name why modules stay whole: those of `leave_whole`, and all in them."""
    named = styled_modules({pattern: [] for pattern in leave_whole}, model) if leave_whole else []
    return {inner: "see leave_whole" for name, module, _ in named for inner, _ in module.named_modules(prefix=name)}


def _make_plan(
    model: nn.Module, plan: Plan | str | None, mesh: Mesh, leave_whole: Mapping[str, str], *, sequence_parallel: bool
) -> tuple[list[str], StyledModules]:
    """Makes the plan, the same on every rank of tp. Returns the lines of its report, and what it names. Collective."""
    ranks = mesh.size("tp")

    def planned() -> tuple[list[str], StyledModules]:
        chosen, report = chosen_plan(model, plan, ranks, sequence_parallel=sequence_parallel, leave_whole=leave_whole)
        return report, _checked_plan(chosen, model, in_pieces=sequence_parallel and ranks > 1)

    report, styled = check_everywhere(mesh["tp"], planned)
    refuse_different_models(mesh["tp"], model, [(name, _describe_style(style)) for name, _, s in styled for style in s])
    return report, styled


def _trials(
    model: nn.Module, styled: StyledModules, mesh: Mesh, before: Trials | None, *, sequence_parallel: bool
) -> Trials:
    """Makes the Trials of an automatic plan. before: those of the plan before it."""
    from .trial import Trials

    def apply(root: nn.Module, plan: Plan, tp: TensorParallel) -> None:
        apply_styles(root, _checked_plan(plan, root, in_pieces=tp.sequence_parallel), tp)

    return Trials(model, styled, mesh, apply, before, sequence_parallel=sequence_parallel)


def _describe_style(style: Style) -> str:
    """Describes a style, the same on all ranks: one of the program's own may print where it lies."""
    return repr(style) if type(style).__module__.startswith(f"{__package__}.") else type(style).__name__


def gains_by_overlap(mesh: Mesh) -> bool:
    """Returns whether a progress thread that gathers has a wire to wait for, or a core of its own. Collective over tp.

    Where ranks and their threads fill the cores of a node, it would take time of the cores that compute.
    """
    busy = len(mesh.comm.node_ranks) * torch.get_num_threads()
    spare = mesh.comm.node_cores > busy
    return mesh["tp"].nodes > 1 or all(all_gather_object(mesh["tp"], spare))


def chosen_plan(
    model: nn.Module,
    plan: Plan | str | None,
    ranks: int,
    *,
    sequence_parallel: bool,
    leave_whole: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Plan, list[str]]:
    """Returns the plan that an argument of `parallelize` stands for, and the lines of a report to print.

    leave_whole: see `automatic_plan`.
    """
    if plan is None:
        ready = plan_for(model)
        if ready is None:
            known = ", ".join(sorted({name for _, name in PLANS}))
            raise ConfigurationError(
                f"parallelize: there is no ready plan for {type(model).__name__} (there are for {known}); needs plan="
            )
        return ready, []
    if plan == "auto":
        in_pieces = sequence_parallel and ranks > 1
        made = automatic_plan(model, ranks, sequence_parallel=in_pieces, leave_whole=leave_whole)
        return made.plan, made.lines
    if isinstance(plan, str) or not (isinstance(plan, Mapping) and all(isinstance(name, str) for name in plan)):
        got = repr(plan) if isinstance(plan, str) else type(plan).__name__
        raise ConfigurationError(f"parallelize: plan: got {got}; needs a dict of names and styles, or 'auto'")
    return plan, []


def apply_styles(model: nn.Module, styled: StyledModules, tp: TensorParallel) -> None:
    """Cuts the modules that a plan names. Raises ConfigurationError for what would compute wrongly with them."""
    for name, module, styles in styled:
        for style in styles:
            if tp.sequence_parallel or not style.sequential:
                style.apply(name, module, tp)
    if tp.refused:  # at the end: the styles' collectives are of all ranks
        raise ConfigurationError(tp.refused[0])
    _refuse_ties(model, styled)
    _refuse_unsummed(model, styled, tp)


def _checked_plan(plan: Plan, model: nn.Module, *, in_pieces: bool) -> StyledModules:
    """Lists what a plan names. Raises ConfigurationError for one that would do nothing, or begin what nothing ends.

    in_pieces: whether sequences are to be cut.
    """
    styled = styled_modules(plan, model)
    if not styled:
        raise ConfigurationError("plan: got {}, which cuts nothing; needs names of modules and their styles")
    begins, ends = (
        [name for name, _, styles in styled if any(isinstance(style, kind) for style in styles)]
        for kind in (SequenceBegins, SequenceEnds)
    )
    if in_pieces and not begins:
        raise ConfigurationError(
            "parallelize: sequence_parallel: got True with a plan that cuts no sequences; needs SequenceBegins() at "
            "the first block, SequenceParallel() at the norms and SequenceEnds() at the last module on pieces"
        )
    if in_pieces:
        _refuse_layerdrop(model)
    if in_pieces and not ends:
        raise ConfigurationError(
            f"plan: {begins[0]} has SequenceBegins() and no module has SequenceEnds(), so outputs would be pieces of "
            "sequences; needs it at the last module on pieces"
        )
    return styled


def _refuse_layerdrop(model: nn.Module) -> None:
    """Raises ConfigurationError for a model that may leave out blocks: each rank of tp others, and they would wait."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        text = "".join(method.text for method in methods_of(module)) if hasattr(config, "__dict__") else ""
        asked = {key: value for key, value in vars(config).items() if f"config.{key}" in text} if text else {}
        for key, rate in (*vars(module).items(), *asked.items()):
            if "layerdrop" in key and isinstance(rate, int | float) and rate > 0.0:
                raise ConfigurationError(
                    f"parallelize: sequence_parallel: {name or type(model).__name__} has {key}={rate}, by which each "
                    "rank of tp would leave out other blocks; needs 0"
                )


def _refuse_ties(model: nn.Module, styled: StyledModules) -> None:
    """Raises ConfigurationError for a layer that no style knows, and whose weight another one has cut."""
    known = {id(inner) for _, module, _ in styled for inner in module.modules()}
    for name, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and id(module) not in known and placement(weight).cut is not None:
            raise ConfigurationError(
                f"plan: {name}: its weight is that of a layer which is cut over tp; needs a style of its own, such as "
                "VocabParallel()"
            )


def _refuse_unsummed(model: nn.Module, styled: StyledModules, tp: TensorParallel) -> None:
    """Raises ConfigurationError for a parameter that computes on pieces of sequences and that no style sums.

    It looks at the list of blocks, and at the last module on pieces, such as a norm.
    """
    begins = {
        name.rpartition(".")[0] for name, _, styles in styled if any(isinstance(s, SequenceBegins) for s in styles)
    }
    lists = [at for at in begins if isinstance(model.get_submodule(at), nn.ModuleList | nn.Sequential)]
    last = [name for name, _, styles in styled if any(isinstance(s, SequenceEnds) for s in styles)]
    for name, module in model.named_modules() if tp.sequence_parallel else ():
        own = dict(module.named_parameters(recurse=False))
        inside = any(name.startswith(f"{at}.") for at in lists) or name in last
        if inside and all(placement(p).cut is None for p in own.values()):
            left = next((key for key, p in own.items() if p not in tp.summed), None)
            if left is not None:
                raise ConfigurationError(
                    f"plan: {name}.{left} computes on pieces of sequences, and its gradients would not be summed; "
                    "needs a style of its module, such as SequenceParallel()"
                )


def unparallelize(model: nn.Module) -> nn.Module:
    """Makes a model whole again that `parallelize` has cut, in place, and returns it. Collective over tp.

    Of a DistributedDataParallel it is the model inside, which is to be wrapped anew. Raises UsageError for a copy of a
    model, and for one of layers such as ColumnParallelLinear, which are never whole.
    """
    model = _without_engine(model)
    inner = next((module for module in model.modules() if getattr(module, ATTRIBUTE, None) is not None), model)
    tp = getattr(inner, ATTRIBUTE, None)
    if tp is None:
        if any(placement(p).cut is not None for p in model.parameters()):
            raise UsageError(
                "unparallelize: the model is cut, and not by parallelize; needs one that parallelize has returned"
            )
        return model
    if tp.model() is not inner:
        raise UsageError("unparallelize: the model is a copy of one that was cut; needs that one, or model_state_dict")
    wholes = {p: join_parts(tp.comm, p.data, cuts) for _, p, cuts in _cut_parameters(inner, tp.comm)}
    for undo in reversed(tp.changes):
        undo()
    for p, whole in wholes.items():
        p.data = whole
        p.grad = None
        place(p)
    setattr(inner, ATTRIBUTE, None)
    return model


def model_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state_dict of the plain model, with whole tensors on every rank. Collective over tp.

    To be saved by one of them, as by torch.save, or a model's save_pretrained(path, state_dict=...).

    model: one that `parallelize` has returned, a module around it, its DistributedDataParallel, or a model of layers
    such as ColumnParallelLinear. Raises UsageError for a part of a cut model.
    """
    model = _without_engine(model)
    states = model.state_dict()
    if not any(placement(p).cut is not None for p in model.parameters()):
        return states
    found = tensor_parallels(model)
    if len({id(tp.comm) for tp in found}) != 1:
        raise UsageError(
            f"model_state_dict: the {type(model).__name__} has parameters that are cut over tp, and its layers tell of "
            f"{len({id(tp.comm) for tp in found})} groups of ranks; needs one: a model that parallelize has returned"
        )
    comm = found[0].comm
    kept: dict[int, torch.Tensor] = {}  # of tied layers, one tensor
    for names, p, cuts in _cut_parameters(model, comm):
        kept[id(p)] = join_parts(comm, p.detach(), cuts)
        for name in names:
            states[name] = kept[id(p)]
    return without_marks(states)


def _without_engine(model: nn.Module) -> nn.Module:
    """Returns the model inside a DistributedDataParallel, of mpidl or torch."""
    inner = getattr(model, "module", None)
    if type(model).__name__ == "DistributedDataParallel" and isinstance(inner, nn.Module):
        return _without_engine(inner)
    return model


def tensor_parallels(model: nn.Module) -> list[TensorParallel]:
    """Lists what the cut layers in a model share: one for each model in it that was cut."""
    found = (vars(module).get(name) for module in model.modules() for name in (ATTRIBUTE, "_tensor_parallel"))
    return list({id(tp): tp for tp in found if isinstance(tp, TensorParallel)}.values())


def _cut_parameters(model: nn.Module, comm: Communicator) -> list[tuple[list[str], nn.Parameter, list[Cut]]]:
    """Lists the parameters that are cut over tp, with their names and the ranks' cuts. Collective over tp."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if placement(p).cut is not None:
            names.setdefault(p, []).append(name)
    return [(some, p, cuts) for (p, some), cuts in zip(names.items(), cuts_over(comm, names), strict=True)]
