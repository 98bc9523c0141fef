"""DistributedDataParallel: every rank holds the whole model and trains on its part of the batch.

    forward, which sends nothing -> backward fills buckets -> each full bucket is averaged over the ranks while backward
    goes on -> rank 0's buffers are broadcast -> the same gradients everywhere -> the same step everywhere

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", algorithm 1.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from collectives import Communicator
from collectives.diagnostics import label

from ..compiling import uncompiled
from ..engine_arguments import communicator, flag
from ..errors import ConfigurationConflict
from ..gradients.backward import BackwardWatch, inside_backward
from ..gradients.buckets import MIB, bucket_stats
from ..gradients.compression import Compression, Compressor
from ..gradients.compression.settings import compression
from ..gradients.grad_bucket import Hook
from ..gradients.hook_check import check_hook
from ..job import communicator_pool
from ..job.agreement import check_everywhere
from ..job.model_device import place_of_model
from ..mesh import Mesh
from ..mesh.experts import divide_contributions, gradient_group, note_engine
from ..mesh.groups import data_group
from ..nn.sync_batch_norm import SyncBatchNorm
from ..replicas.start_check import check_models_agree, check_settings_agree
from . import arguments, optimizer_class
from .first_pass import FirstPass, check_copies_agree
from .forward_signature import ForwardSignature
from .join_hook import WrapperJoinHook
from .module_states import ModuleStates
from .reducer import Reducer
from .retirement import Retirement, remove_with
from .uneven_inputs import Join, Joinable

if TYPE_CHECKING:  # at run time with compress= alone: few programs need it
    from ..gradients.compression.hook import CompressedReduction


class DistributedDataParallel(torch.nn.Module, Joinable):
    """Wraps a module so that backward leaves every rank with the mean of all ranks' gradients.

    The arguments have the names, order and meaning of `torch.nn.parallel.DistributedDataParallel`:

    module: the model, of one structure on every rank, in the host's memory or on one GPU. Forward passes, backward
        passes and steps may be on any streams that the program has ordered after each other.
    device_ids, output_device: None, or the one device on which the module lies, to which inputs are then moved.
    dim, check_reduction: for the order of PyTorch's arguments; dim must be 0, and check_reduction has no effect.
    forward_sync_buffers: rank 0's buffers (running statistics, ...) are broadcast at the end of each synchronised
        backward pass, and at the end of `join`; by default on.
    broadcast_buffers: sets forward_sync_buffers, and whether `init_sync` sends buffers too; by default both on.
    init_sync: rank 0's parameters and buffers are broadcast now.
    process_group: the Communicator; by default the world.
    bucket_cap_mb: size of the gradient buckets in MiB, by default 25, with `compress` mostly 4; the first at most 1.
    find_unused_parameters: a pass need not reach every parameter. One that no rank reaches keeps its `.grad` as it was;
        one that some ranks reach gets the sum of theirs divided by the number of all ranks. Without it, an unreached
        parameter is an error on every rank; the error names it.
    gradient_as_bucket_view: gradients are views of the buckets, so that nothing is copied back; by default on.
    static_graph: every pass reaches the same parameters equally often as the first. Allows unused parameters and
        re-entrant checkpoints that share parameters, at full overlap; a graph that does change is an error.
    parameters_to_ignore: names of parameters and buffers of the module to leave alone on every rank.
    mesh: a `Mesh`, in place of process_group: gradients are averaged over its dp x cp. Those of a module whose
        parameters are all placed on ep are averaged over its edp and divided by ep.
    compress: how gradients are sent with fewer bytes: "int8", "powersgd:4" (`mpidl.COMPRESSORS`), a `Compression` with
        more settings; by default in full precision. It is a communication hook, so that no other can be registered.

    Every rank must run the same number of backward passes; see `join` where they cannot. A forward pass communicates
    nothing: one that no backward pass follows may be on any ranks. Buckets are reduced in the same order on all ranks,
    the order in which gradients arrived in the first synchronised pass (not under find_unused_parameters), and
    contributions are added in the order of ranks: gradients are bitwise equal on all ranks and do not depend on the
    bucket size. Parameters may be frozen and unfrozen between passes, the same ones on all ranks. A copy.deepcopy or a
    pickled copy begins anew with its first synchronised backward pass; parameters that differ over the ranks are an
    error there, if `init_sync` is set. A pickled copy has no communication hook, and averages over the world: set its
    `process_group` before that pass.

    Raises ConfigurationError for wrong arguments, ModelMismatch where the ranks' models or settings differ.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Communicator | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool | None = None,
        parameters_to_ignore: Iterable[str] = (),
        mesh: Mesh | None = None,
        compress: Compression | Compressor | str | None = None,
    ) -> None:
        super().__init__()
        comm = communicator(process_group)
        self.process_group, self._divisor = gradient_group("DistributedDataParallel", comm, mesh, module)

        def check() -> None:
            arguments.module(module, DistributedDataParallel)
            arguments.dimension(dim)
            synced = arguments.synchronised_buffers(broadcast_buffers, forward_sync_buffers)
            self._init_sync_buffers, self.forward_sync_buffers = synced
            self.find_unused_parameters = flag("find_unused_parameters", find_unused_parameters)
            self.gradient_as_bucket_view = flag("gradient_as_bucket_view", gradient_as_bucket_view)
            self.static_graph = flag("static_graph", static_graph)
            self._init_sync = flag("init_sync", init_sync)
            self._compression = None if compress is None else compression(compress)
            self.bucket_bytes_cap = arguments.megabytes(bucket_cap_mb, self._compression) * MIB
            self._chooses_cap = bucket_cap_mb is None and self._compression is not None and self._compression.is_auto
            self.parameters_to_ignore = arguments.ignored(module, parameters_to_ignore)
            self.device_ids, self.output_device = arguments.devices(module, device_ids, output_device)
            self._place = place_of_model("module", module, self.parameters_to_ignore)
            self.module = module
            arguments.refuse_parameters(self._states.names(), mesh, self._divisor, self._compression)

        check_everywhere(self.process_group, check)
        note_engine(mesh, self._divisor)
        self._hook: tuple[Any, Hook] | None = None
        self.compressed: CompressedReduction | None = None
        self._reducer: Reducer | None = None
        self._retirement: Retirement | None = None
        self._in_no_sync = False
        self._watch = BackwardWatch()
        self._first_pass: FirstPass | None = None
        self._divide_contributions()
        self._set_up()

    @property
    def _states(self) -> ModuleStates:
        return ModuleStates(self.module, self.parameters_to_ignore)

    def _divide_contributions(self) -> None:
        remove_with(self, divide_contributions(self._states.names(), self._divisor))

    def _set_up(self, accumulated: Set[torch.Tensor] = frozenset()) -> None:
        """Compares the ranks' models, makes them equal, and allocates the buckets. Collective.

        accumulated: the parameters with gradients that no pass has averaged, of a copy.
        """
        self._compare()
        if self._init_sync:
            self._states.broadcast(self.process_group, 0, self._init_sync_buffers)
        self._make_reducer(accumulated)

    def _set_up_in_backward(self) -> Reducer | None:
        """Sets up a copy, whose forward pass has used what the ranks would have had to make equal before. Collective.

        None, and not collective, in a pass that is not synchronised.
        """
        if self._reducer is not None or self._in_no_sync:
            return None
        try:
            self._compare()
            if self._init_sync:
                check_copies_agree(self.process_group, self._states.names())
            self._make_reducer(self.accumulated_under_no_sync)
        except BaseException:
            self._forget_first_pass()  # the program may wrap the module anew
            raise
        return self._reducer

    def _compare(self) -> None:
        settings = {
            "compress": self._compression,  # before the size of buckets, which depends on it
            "bucket_cap_mb": self.bucket_bytes_cap / MIB,
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "forward_sync_buffers": self.forward_sync_buffers,
            "init_sync": (self._init_sync, self._init_sync_buffers),
            "device": self._place.device.type,
        }
        check_settings_agree(self.process_group, "DistributedDataParallel", settings)
        check_models_agree(self.process_group, self.module, self.parameters_to_ignore)

    def _compress(self, settings: Compression) -> None:
        from ..gradients.compression.hook import CompressedReduction

        self.compressed = CompressedReduction(settings, self.process_group, self._states.names())
        if not self.compressed.chooses_none:
            self.register_comm_hook(None, self.compressed)

    def _bucket_cap(self) -> Callable[[], float]:
        """Returns a function that gives a bucket's cap in bytes: the given one, or that of the method "auto" uses."""
        cap, compressed = self.bucket_bytes_cap, self.compressed if self._chooses_cap else None
        return lambda: cap if compressed is None else compressed.compressor.bucket_cap_mb * MIB

    def _make_reducer(self, accumulated: Set[torch.Tensor]) -> None:
        self._forget_first_pass()
        if self._compression is not None:
            self._compress(self._compression)
        states, pooled = self._states, communicator_pool.take(self.process_group)
        retirement = Retirement(pooled)
        self._reducer = retirement.reducer = Reducer(
            self.module,
            states.names(),
            pooled.comm,
            self._watch,
            place=self._place,
            bucket_cap=self._bucket_cap(),
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            as_views=self.gradient_as_bucket_view,
            buffers=states.buffers if self.forward_sync_buffers else list,
            group=self.process_group,
            ignored=self.parameters_to_ignore,
            divisor=self._divisor,
        )
        self._reducer.means.hook = self._hook
        self._retirement = retirement
        self.accumulated_under_no_sync = accumulated
        if self.compressed is not None:
            self.compressed.claim_compressor()

    # ---- training ---------------------------------------------------------------------------------------------

    @ForwardSignature
    @uncompiled(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with its signature."""
        with label("DistributedDataParallel.forward"):  # as PyTorch's is called
            self._before_forward()
            if self.device_ids is not None:
                args, kwargs = tree_map_only(
                    torch.Tensor, lambda t: t.to(self.device, non_blocking=True), (args, kwargs)
                )
            output = self.module(*args, **kwargs)
            self._after_forward(output)
            return output

    @uncompiled
    def _before_forward(self) -> None:
        self._watch.before_forward()
        if torch.is_grad_enabled() and not self._in_no_sync and not inside_backward():
            self._place.refuse_capture("DistributedDataParallel")
            if self._reducer is not None:
                self._reducer.before_forward(self.module.training)
            elif self._first_pass is None:
                set_up = weakref.WeakMethod(self._set_up_in_backward)
                self._first_pass = FirstPass(self._watch, self.module, self._states.trained(), set_up)

    def _forget_first_pass(self) -> None:
        if self._first_pass is not None:
            self._first_pass.remove()
            self._first_pass = None

    @uncompiled
    def _after_forward(self, output: Any) -> None:
        self._watch.after_forward(output)
        if self._reducer is not None:
            self._reducer.unused.after_forward(output)

    # ---- names of PyTorch's DistributedDataParallel -----------------------------------------------------------

    @property
    def broadcast_buffers(self) -> bool:
        """PyTorch's name for `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return self._place.device

    @property
    def device_type(self) -> str:
        """The type of `device`: "cpu" or "cuda"."""
        return self.device.type

    def will_sync_module_buffers(self) -> bool:
        """Tells if the next synchronised backward pass sends buffers."""
        return self.forward_sync_buffers and bool(self._states.buffers())

    def _set_static_graph(self) -> None:
        """Sets `static_graph` after construction, on all ranks, before the first backward pass."""
        if self.static_graph:
            return
        if self._reducer is not None:
            if self._reducer.order.has_ended_pass:
                raise ConfigurationConflict("_set_static_graph: training has begun; set it before")
            self._reducer.set_static_graph()
        self.static_graph = True

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: torch.nn.Module, names: Iterable[str]) -> None:
        """Sets `parameters_to_ignore` before the module is wrapped."""
        module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]

    # ---- synchronisation --------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients; the first one outside averages the sums.

        The forward pass must be inside too.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Returns whether backward passes communicate; may be set before the forward pass instead of `no_sync`."""
        return not self._in_no_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronise: bool) -> None:
        self._in_no_sync = not synchronise
        if self._reducer is not None:
            self._reducer.queue.synchronise = bool(synchronise)

    @property
    def accumulated_under_no_sync(self) -> Set[torch.Tensor]:
        """The parameters with gradients of passes under `no_sync`, not averaged yet; loading a checkpoint sets them.

        Of a copy before its first synchronised pass these are all that train and have gradients.
        """
        if self._reducer is None:
            return {p for p in self._states.trained() if p.grad is not None}
        return self._reducer.reached.accumulated_under_no_sync

    @accumulated_under_no_sync.setter
    def accumulated_under_no_sync(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._reducer is not None:
            self._reducer.reached.accumulated_under_no_sync = set(parameters)

    def register_comm_hook(self, state: Any, hook: Hook) -> None:
        """Registers `hook(state, bucket)` to communicate instead of the all-reduce; see `mpidl.comm_hooks`.

        To be registered once, before the first backward pass, on all ranks. Sparse gradients are reduced without it.
        """
        check_hook(hook)
        if self._hook is not None:
            raise ConfigurationConflict("register_comm_hook: this DistributedDataParallel has a hook already")
        if self._reducer is not None and self._reducer.order.has_ended_pass:
            raise ConfigurationConflict("register_comm_hook: training has begun; register it before")
        self._hook = (state, hook)
        if self._reducer is not None:
            self._reducer.means.hook = self._hook

    @property
    def comm_hook(self) -> tuple[Any, Hook] | None:
        """The state and the hook that communicate in place of the all-reduce; None without."""
        return self._hook

    def step_in_backward(self, *optimizers: torch.optim.Optimizer) -> None:
        """Has backward passes make the optimizers' steps; without optimizers they step no more. Collective.

        optimizers: over some or all of the module's parameters, each in one of them; those of torch.optim, mpidl.optim
            and others whose step on a parameter depends on no other parameter.

        When a bucket's gradients are averaged, its parameters are stepped and their gradients released: gradients take
        about three buckets of `bucket_cap_mb` instead of a model's worth, and weights and states have the bits of the
        step after the pass. `optimizer.step()` must follow each pass all the same; it only closes the pass, and a pass
        that begins before this call is an error. Until then `.grad` has a shape, and what reads it raises
        TrainingError: clipping, GradScaler and the like need all gradients before the step. Gradients are accumulated
        under `no_sync`. Parameters that none of the optimizers has keep their averaged gradients. Raises
        ConfigurationError on every rank.
        """
        comm, names = self.process_group, self._states.names()

        def check() -> None:
            if inside_backward() or (self._reducer is not None and self._reducer.join.joining is not None):
                raise ConfigurationConflict("step_in_backward: got called in a backward pass or a join; call it before")
            optimizer_class.check(optimizers, names, set(self.module.parameters()).difference(names))

        check_everywhere(comm, check)
        check_settings_agree(comm, "step_in_backward", optimizer_class.settings_to_compare(optimizers, names))
        if self._reducer is None:
            self._set_up(self.accumulated_under_no_sync)
        assert self._reducer is not None
        self._reducer.step_in_backward(optimizers)

    @property
    def steps_in_backward(self) -> bool:
        """Returns whether backward passes make the step."""
        return self._reducer is not None and self._reducer.steps is not None

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Trains ranks with different numbers of batches: `with wrapped.join(): for batch in mine: ...`. Collective.

        A rank that leaves the block takes part with zeros until the last one has ended; then all take over the
        parameters and buffers of a rank that ended last. Several wrappers go together into a `mpidl.Join`. What else is
        collective, such as `global_mean` or SyncBatchNorm, cannot be in the block, as the ranks do not come to it
        equally often, unless the first rank that ends is an error.

        divide_by_initial_world_size: the sum of gradients is divided by the number of all ranks, else by that of the
            ranks that still have batches.
        throw_on_early_termination: as soon as one rank has ended, TrainingError on every rank, in the next forward pass
            in training mode with gradients, which is collective then, or in the next backward pass.
        """
        given = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **given)

    def join_hook(self, **kwargs: Any) -> WrapperJoinHook:
        """Makes the hook that a `Join` calls on a rank whose batches have run out. Collective where a copy begins."""
        if self.steps_in_backward:
            raise ConfigurationConflict(
                "join: got a wrapper with step_in_backward, whose buckets the ranks reduce one by one, and a rank "
                "without batches only all at once; needs passes without step_in_backward"
            )
        if self._hook is not None and getattr(self._hook[0], "needs_every_rank", False):
            name = type(self._hook[0]).__name__
            raise ConfigurationConflict(
                f"join: got a hook with {name}, which needs all ranks in every step; give every rank as many batches"
            )
        if self._reducer is None:
            self._set_up(self.accumulated_under_no_sync)
        assert self._reducer is not None
        return WrapperJoinHook(
            self._reducer,
            lambda root: self._states.broadcast(self.process_group, root, self.forward_sync_buffers),
            synchronised_norms=any(isinstance(m, SyncBatchNorm) for m in self.module.modules()),
            undoes_by_itself=self._hook is not None and getattr(self._hook[1], "undoes_by_itself", False),
            divide_by_active=not kwargs.get("divide_by_initial_world_size", True),
        )

    @property
    def join_process_group(self) -> Communicator:
        """The ranks of a `Join`."""
        return self.process_group

    @property
    def join_device(self) -> torch.device:
        """PyTorch's name for `device`."""
        return self.device

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The memory of the buckets, in which the gradients lie; of which a copy has none before its first pass."""
        return {"gradients": [] if self._reducer is None else self._reducer.bucket_tensors}

    def stats(self) -> dict[str, Any]:
        """Describes how gradients are reduced now, as JSON values for a log. Not collective.

        buckets: the names of each bucket's parameters, in the order in which buckets are reduced; of a copy none before
            its first pass.
        bucket_bytes: of each.
        reduces_at_end: True where the ranks fill the cores of one node, and reduce together when they wait at the end
            of the pass; False where a thread, or a communication hook, reduces meanwhile.
        """
        reducer = self._reducer
        names = self._states.names()
        found = bucket_stats([] if reducer is None else reducer.queue.buckets, names)
        return {**found, "reduces_at_end": reducer is not None and reducer.means.reduces_at_end}

    # ---- copies -----------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        not_copied = ("_reducer", "_retirement", "_watch", "_first_pass", "_hook", "compressed")
        for name in ("process_group", "_place", *not_copied):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reducer = self._first_pass = self._retirement = None
        self._watch = BackwardWatch()
        self._place = place_of_model("module", self.module, self.parameters_to_ignore)
        self.__dict__.setdefault("_hook", None)
        self.__dict__.setdefault("compressed", None)
        self.__dict__.setdefault("_divisor", 1)
        self._divide_contributions()
        if "process_group" not in self.__dict__:
            self.process_group = data_group("DistributedDataParallel", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        compresses = self._hook is not None and self._hook[1] is self.compressed  # as the copy will by itself
        shared = {"process_group": self.process_group, "_hook": None if compresses else self._hook}
        made.__setstate__({**shared, **copy.deepcopy(self.__getstate__(), memo)})
        return made
