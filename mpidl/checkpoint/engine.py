"""Common view of plain, DDP and ZeRO training: the elements of each parameter that this rank holds and writes.

    plain, DDP     every rank holds all     rank 0 writes [##........] rank 1 [..##......] ... of a large one,
                                            one rank after another the small ones
    ZeRO           a rank holds and writes its slice; after loading, the engine spreads the new parameters
    over a mesh    the same of this rank's part of the model; `joining` says how the parts make the whole
    an averager    post-local SGD, DiLoCo: all ranks whose weights it averages, each of which writes its own weights

A checkpoint knows parameters by the plain model's names, and what a rank holds of one by a cut of the whole parameter
and a range of the flattened cut. So what one engine wrote on one mesh any other can read on any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from collectives import Communicator

from ..ddp.plain_model import plain_model
from ..errors import CheckpointError, ConfigurationError
from ..gradients.compression.hook import CompressedReduction
from ..job.agreement import run_everywhere
from ..job.objects import all_gather_object
from ..mesh import Mesh
from ..mesh.groups import checked_mesh, data_group, refuse_part
from ..mesh.placement import Cut, placement
from ..module_tensors import modules_with_extra_state
from ..optim.one_bit import OneBitOptimizer
from ..optim.post_local import PostLocalSGDOptimizer
from ..replicas.checksums import checksum, difference
from ..trained_by import trainer_of_model
from ..zero import ZeroOptimizer
from . import cuts
from .held_tensor import HeldTensor, inside
from .joining import DeclaredTensor, JoinedParts, PartContent, join_model_parts
from .parts import ModelPart, group_of, group_with, part_of


class Engine:
    """The training of a model.

    model: the plain one inside wrappers.
    kind: "plain", "ddp", "zero1", "zero2" or "zero3".
    replaces: the weights and the optimizer's state are replaced, and not read.

    Raises ConfigurationError for a model and an optimizer that do not belong together; unless `replaces`, TrainingError
    on every rank where each has weights of its own (`optim.ZeroOneAdam`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        process_group: Communicator | None,
        mesh: Mesh | None = None,
        needed: str = "mesh=",
        replaces: bool = False,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(f"model: got {type(model).__name__}; needs a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(f"optimizer: got {type(optimizer).__name__}; needs a torch.optim.Optimizer")
        self.ddp, self.model = plain_model(model)
        self.optimizer = optimizer
        self.averager: Any = None
        if isinstance(optimizer, PostLocalSGDOptimizer):
            _refuse_slices(optimizer)
            self.optimizer, self.averager = optimizer.optimizer, optimizer.averager
        self.zero = _zero_of(self.model, self.optimizer)
        self.owned = None if self.zero is None else self.zero.owned_state()
        if not replaces:
            self._refuse_unlike_weights()
            if isinstance(self.optimizer, OneBitOptimizer):
                self.optimizer.gather_errors()  # collective, as `owned_state` is
        averages = getattr(self.averager, "process_group", None)
        if self.owned is not None:
            self.comm = self.owned.comm
        elif averages is not None:
            wider = process_group if mesh is None else group_of(mesh, self.model)
            needs = [averages] if self.ddp is None else [averages, self.ddp.process_group]
            self.comm = group_with(needs, wider) or data_group("checkpoint", None, needed=needed)
        elif self.ddp is not None:
            self.comm = self.ddp.process_group
        elif mesh is not None:
            self.comm = group_of(mesh, self.model)
        else:
            self.comm = data_group("checkpoint", process_group, needed=needed)
        if mesh is None:
            refuse_part("checkpoint", self.comm, needed)
        self.part = ModelPart(self.comm, self.comm) if mesh is None else part_of(mesh, self.comm)
        self.kind = "plain" if self.ddp is None else "ddp"
        if self.zero is not None:
            self.kind = f"zero{self.zero.stage}"
        # After the warm-up of post-local SGD the ranks' weights differ between the averagings.
        averager = self.averager
        local_steps = -1 if averager is None else averager.steps - getattr(averager, "warmup_steps", 0)
        self.has_weights_per_rank = local_steps > 0
        self.gradients_differ = local_steps >= 0  # those of the step under way, which is a local one
        self._check_values()
        self.names: dict[torch.Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        self.tied = _tied(self.model)
        self.extra_states = modules_with_extra_state(self.model)
        self._check_optimizer()
        self.join: JoinedParts
        self.parameters: list[HeldTensor] = []
        self.buffers: list[HeldTensor] = []

    def join_parts(self) -> Engine:
        """Finds out how the parts of the model join to the whole one, and returns the engine. Collective."""
        sizes = dict(zip(self.part.sizes, self.part.coordinates, strict=True))
        if not sizes:
            self._set_join(
                run_everywhere(self.all_ranks, lambda: join_model_parts([self._content(sizes, self._declared)], 0))
            )
            return self
        content = run_everywhere(self.all_ranks, lambda: self._content(sizes, self._declared))
        everyone = all_gather_object(self.all_ranks, (self.part.number, content if self.comm.rank == 0 else None))
        by_number = {number: one for number, one in everyone if one is not None}
        self.part = replace(self.part, joined=True)
        self._set_join(join_model_parts([by_number[number] for number in sorted(by_number)], self.part.number))
        return self

    def hold_separately(self, reason: str | None = None) -> None:
        """Treats this rank's part as a model of its own. reason: why the parts do not join, for the index."""
        reason = reason or self.join.reason
        self.part = replace(self.part, joined=False)
        self._set_join(join_model_parts([self._content({}, _as_whole)], 0))
        self.join.reason = reason

    def _set_join(self, found: JoinedParts) -> None:
        self.join = found
        if found.reason is None:
            self.parameters, self.buffers = list(self._parameters()), list(self._buffers())

    def _content(
        self, coordinates: dict[str, int], declared: Callable[[str, torch.Tensor], DeclaredTensor]
    ) -> PartContent:
        """Lists what the part holds."""
        values = {name: p for p, name in self.names.items()}
        if self.owned is not None:
            values |= {self.names[part.parameter]: part.values for part in self.owned.slices()}
        parameters = {name: replace(declared(name, p), dtype=values[name].dtype) for p, name in self.names.items()}
        buffers = {name: declared(name, b) for name, b in self._kept_buffers()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        names = [[self.names[p] for p in group["params"]] for group in groups]
        return PartContent(coordinates, parameters, buffers, self.tied, [*self.extra_states], names)

    def _declared(self, name: str, tensor: torch.Tensor) -> DeclaredTensor:
        found, dtype = placement(tensor), tensor.dtype
        if found.cut is None:
            return DeclaredTensor(cuts.whole(tuple(tensor.shape)), dtype, found.axes, found.counted)
        problem = cuts.problem_of(found.cut)
        if problem is None and found.cut.part_shape != tuple(tensor.shape):
            problem = f"is of a part of shape {found.cut.part_shape}, and it has {tuple(tensor.shape)}"
        if problem is not None:
            raise ConfigurationError(f"place: cut: {name} {problem}")
        return DeclaredTensor(cuts.normalised_cut(found.cut), dtype, found.axes, found.counted, stated=True)

    @property
    def compressed(self) -> CompressedReduction | None:
        """The engine's reduction by `compress=`; None without."""
        if self.zero is not None:
            return self.zero.compressed
        return None if self.ddp is None else self.ddp.compressed

    @property
    def all_ranks(self) -> Communicator:
        """Communicator of the ranks of all parts of the model: `comm`, unless parts lie over other axes of a mesh."""
        return self.part.all_ranks

    @property
    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """Class of torch.optim that steps."""
        assert self.optimizer is not None
        return self.optimizer.inner_class if isinstance(self.optimizer, ZeroOptimizer) else type(self.optimizer)

    @property
    def optimizer_class(self) -> str:
        """Name of the optimizer's class."""
        return self.optimizer_type.__name__

    def _parameters(self) -> Iterator[HeldTensor]:
        own = {} if self.owned is None else {part.parameter: part for part in self.owned.slices()}
        ignored = frozenset() if self.ddp is None else self.ddp.parameters_to_ignore
        rank, size = self.comm.rank, self.comm.size
        for name, p in self.model.named_parameters():
            cut, alone = self._cut(name), self.join.shares(name)
            if p in own:
                part = own[p]
                writes = [*inside(alone, cut, part.start, part.stop)] if part.writes else []
                if cuts.element_count(cut) == 0:
                    writes = alone if rank == 0 else []
                yield HeldTensor(name, cut, part.values.detach(), part.start, part.stop, writes, writes, part.values, p)
                continue
            per_rank = size > 1 and (self.has_weights_per_rank or name in ignored)
            writes = alone if per_rank else self.join.shares(name, rank, size)
            shared = not per_rank and size > 1
            yield HeldTensor(name, cut, p.detach(), 0, p.numel(), writes, alone, p, p, per_rank, shared)

    def _buffers(self) -> Iterator[HeldTensor]:
        """Yields the buffers that a state_dict holds. Rank 0 writes them, as DDP broadcasts its own."""
        ignored = frozenset() if self.ddp is None else self.ddp.parameters_to_ignore
        for name, b in self._kept_buffers():
            unlike = self.ddp is not None and (name in ignored or not self.ddp.broadcast_buffers)
            per_rank = self.comm.size > 1 and (self.has_weights_per_rank or unlike)
            alone = self.join.shares(name)
            writes = alone if per_rank or self.comm.rank == 0 else []
            yield HeldTensor(name, self._cut(name), b.detach(), 0, b.numel(), writes, alone, per_rank=per_rank)

    def _cut(self, name: str) -> Cut:
        content = self.join.contents[self.join.number]
        return (content.parameters.get(name) or content.buffers[name]).cut

    def _kept_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        kept = _persistent(self.model)
        return [(name, b) for name, b in self.model.named_buffers() if name in kept]

    def _refuse_unlike_weights(self) -> None:
        hooked, *_ = self._hook()  # also where the model is given alone
        if isinstance(hooked, OneBitOptimizer):
            hooked.refuse_local_weights()
        if self.owned is not None:
            self.owned.refuse_local_weights()

    def _check_values(self) -> None:
        own = set() if self.owned is None else {part.parameter for part in self.owned.slices()}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if torch.nn.parameter.is_lazy(tensor):
                raise ConfigurationError(f"model: {name} has no shape yet; call the model, which is lazy, once before")
            if tensor.is_meta and tensor not in own:
                raise ConfigurationError(f"model: {name} is on the meta device, where it has no values")

    def steps_on_part(self, held: HeldTensor) -> bool:
        """Returns True if the optimizer steps on a part of a parameter as it is; ZeRO's keeps states of the whole."""
        return self.owned is None and held.cut != cuts.whole(held.shape)

    def comparison_label(self, held: HeldTensor, per_rank: bool) -> str | None:
        """Names the elements that this rank has to compare with those of other parts; None if no other holds them.

        Of equal replicas only the first rank compares; the replicas are compared with each other elsewhere.
        """
        same = self.join.parts_with_same(held.name)
        slices = self.owned is not None and held.key is not None
        if len(same) < 2 or not (slices or per_rank or self.comm.rank == 0):
            return None
        of = "" if len(same) == len(self.join.contents) else f" of parts {', '.join(map(str, same))}"
        complete = held.stop - held.start == cuts.element_count(held.cut)
        return of if complete else f"{of} from {held.start} to {held.stop}"

    def check_writable(self) -> None:
        """Raises ConfigurationError for a tensor whose elements share memory, as `expand` makes them."""
        for held in (*self.parameters, *self.buffers):
            sizes = zip(held.values.shape, held.values.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in sizes):
                raise ConfigurationError(f"model: several elements of {held.name} share memory; clone() it")

    def _check_optimizer(self) -> None:
        if self.optimizer is None or self.zero is not None:
            return
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                if p not in self.names:
                    raise ConfigurationError(
                        f"optimizer: a tensor of shape {tuple(p.shape)} in group {number} is no parameter of the model"
                    )

    def check_replicas(
        self, what: str, shared: Mapping[str, torch.Tensor], copied: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Raises CheckpointError on every rank unless the ranks hold equal values of `shared`. Collective.

        Each rank writes a part of these tensors. Buffers are rank 0's, or each rank's own, and need no comparison.
        copied: what other parts of the model may hold too, under the same name.
        """

        def compare(comm: Communicator, tensors: Mapping[str, torch.Tensor], partly: bool) -> None:
            sums = run_everywhere(comm, lambda: {name: checksum(values) for name, values in tensors.items()})
            found = difference(comm, sums, partly)
            if found is not None:
                raise CheckpointError(f"{what}: the ranks' replicas differ, of which each writes a part: {found}")

        if shared:  # on all ranks or on none
            self.part.everywhere(lambda: compare(self.comm, shared, False))
        if self.part.joined:
            compare(self.all_ranks, copied or {}, True)

    def writing(self, unpublished: Collection[str] = ()) -> AbstractContextManager[None]:
        """Context in which tensors are filled; at its end the engine spreads the new values. Collective.

        unpublished: names of parameters whose new values wait for the next step.
        """
        if self.owned is None:
            return nullcontext()
        return self.owned.written({p for p, name in self.names.items() if name in unpublished})  # type: ignore[misc]

    def forget(self) -> None:
        """Frees the pages of memory that hold values of tensors on a disk."""
        if self.owned is not None:
            self.owned.forget()

    # ---- gradients of micro-steps that no step has used yet ---------------------------------------------------

    @property
    def gradients_per_rank(self) -> bool:
        """True if passes under no_sync left each rank its own gradients."""
        return self.ddp is not None and bool(self.ddp.accumulated_under_no_sync)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns this rank's gradients by name of the parameter, each of the range of its values. Collective.

        Raises TrainingError for ZeRO's passes under no_sync, which have reduced nothing.
        """
        if self.owned is not None:
            return {self.names[p]: g for p, g in self.owned.gradients().items()}
        found = {}
        for p, name in self.names.items():
            if p.grad is not None:
                if p.grad.layout != torch.strided:
                    raise ConfigurationError(f"{name}: its gradient is sparse; save after the step, with micro_step=0")
                found[name] = p.grad
        return found

    def new_gradients(self, dtypes: dict[str, torch.dtype], per_rank: bool) -> dict[str, torch.Tensor]:
        """Replaces the gradients by new memory of these dtypes, to be filled. per_rank: see `gradients_per_rank`."""
        if self.owned is not None:
            by_parameter = {p: dtypes[name] for p, name in self.names.items() if name in dtypes}
            made = self.owned.new_gradients(cast("dict[torch.nn.Parameter, torch.dtype]", by_parameter))
            return {self.names[p]: g for p, g in made.items()}
        found = {}
        for p, name in self.names.items():
            p.grad = torch.zeros_like(p) if name in dtypes else None
            if p.grad is not None:
                found[name] = p.grad
        if self.ddp is not None:
            restored = dtypes.keys() - self.ddp.parameters_to_ignore if per_rank else set()
            self.ddp.accumulated_under_no_sync = {p for p, name in self.names.items() if name in restored}
        return found

    def saved_hook(self) -> Any:
        """Returns the state of the communication hook, or the hook itself, if it can be saved; else None.

        None with `compress=`, whose state does not belong to a rank.
        """
        for kept in self._hook() if self.compressed is None else ():
            # That of an optimizer that sends one bit is the optimizer, whose states are saved as such.
            fits = not isinstance(kept, OneBitOptimizer)
            if fits and hasattr(kept, "state_dict") and hasattr(kept, "load_state_dict"):
                return kept
        return None

    @property
    def unsaved_hook_type(self) -> str:
        """Type of a hook's state that cannot be saved, in words; empty if there is none."""
        state, *_ = self._hook()
        kept = state is None or isinstance(state, Communicator | OneBitOptimizer) or self.saved_hook() is not None
        return "" if kept else f"a {type(state).__name__}"

    def _hook(self) -> tuple[Any, Any, Any]:
        """Returns the hook's state, the hook, and the object of which it is a method."""
        engine = self.zero if self.zero is not None else self.ddp
        state, hook = (None, None) if engine is None or engine.comm_hook is None else engine.comm_hook
        return state, hook, getattr(hook, "__self__", None)


def engine_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    process_group: Communicator | None,
    mesh: Any,
    needed: str = "mesh=, so that every part is kept",
    replaces: bool = False,
) -> Engine:
    """Makes the view, also of a part of a model that lies over a mesh. Collective.

    needed: what to give instead of a group that has a part of the model alone.
    replaces: as of `Engine`.
    """
    mesh = checked_mesh("checkpoint", process_group, mesh)
    if mesh is None:
        return Engine(model, optimizer, process_group, needed=needed, replaces=replaces).join_parts()
    return run_everywhere(mesh.comm, lambda: Engine(model, optimizer, None, mesh, replaces=replaces)).join_parts()


def _zero_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> ZeroOptimizer | None:
    """Finds the ZeroOptimizer that trains the model; None if there is none."""
    found = trainer_of_model(model)
    trains = None if found is None else found.optimizer
    if found is not None and trains is None:
        raise ConfigurationError("model: the ZeroOptimizer that trained it is gone, and with it parts of the model")
    given = optimizer if isinstance(optimizer, ZeroOptimizer) else trains
    if given is not trains or (trains is not None and optimizer not in (None, trains)):
        raise ConfigurationError("optimizer: it is not the one that trains this model")
    return trains


def _refuse_slices(optimizer: PostLocalSGDOptimizer) -> None:
    """Raises ConfigurationError for a ZeroOptimizer inside, as a checkpoint has no slices that differ between nodes."""
    if isinstance(optimizer.optimizer, ZeroOptimizer):
        name = type(optimizer).__name__
        raise ConfigurationError(
            f"checkpoint: optimizer: got a {name} over a ZeroOptimizer, of which each node has other weights, in "
            "slices; save its .optimizer, the ZeroOptimizer, in a directory of each node, and its "
            ".averager.state_dict() on each rank, to be loaded on as many ranks"
        )


def _tied(model: torch.nn.Module) -> dict[str, str]:
    """Maps further names of shared parameters and buffers to the first name of each."""
    tied: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        first = {id(t): name for name, t in named()}
        tied |= {name: first[id(t)] for name, t in named(remove_duplicate=False) if first[id(t)] != name}
    return tied


def _persistent(model: torch.nn.Module) -> set[str]:
    """Lists the names of persistent buffers, without making a state_dict."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def _as_whole(name: str, tensor: torch.Tensor) -> DeclaredTensor:
    return DeclaredTensor(cuts.whole(tuple(tensor.shape)), tensor.dtype)
