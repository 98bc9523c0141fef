"""Base class of the 1-bit optimizers: their communication hook, their buckets, and the order of a step.

    backward     `one_bit_hook`: the mean over the ranks while the optimizer asks for it; later each rank's own
                 gradients (or the mean of a node's, where only nodes exchange)
    step         for each bucket: what is to be sent, in its flat array -> start its exchange
                 for each bucket: wait for its exchange -> update the weights, on every rank the same

Every rank holds whole states, as it updates all weights by what it receives, and makes the same steps. A step is
collective once gradients are no longer averaged; the first step always is.

The exchange, with Communicators of its own, is made while an engine of ZeRO is built, so that backward passes of
several engines may begin in another order on each rank; over DDP at the first step, or in the pass that needs it first.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from collectives import Communicator

from ...errors import ConfigurationError, TrainingError
from ...gradients.buckets import MIB, BucketLayout, assign, layout_of
from ...gradients.compression.pipeline import PipelinedReduction
from ...gradients.compression.ranks import split_by_node
from ...gradients.grad_bucket import ChainedWork, GradBucket, Handle, average_some, completed
from ...job.agreement import check_everywhere, is_anywhere
from ...mesh.groups import data_group
from ...optimizer_trial import StepNeeds
from ...replicas.start_check import check_settings_agree
from ...setting_checks import require
from ..elementwise_state import restore_wide
from .exchange import WHERE, MessageErrors, OneBitExchange, RangeCallback
from .flat import FlatBucket
from .group_settings import check_betas_and_eps, check_groups, is_number
from .left_out import LeftOutParameters

ERROR = "error"  # the key of a parameter's error in its state
Buckets = Sequence[tuple[Sequence[torch.nn.Parameter], BucketLayout]]


class OneBitOptimizer(torch.optim.Optimizer):
    """Base of the optimizers, which say what is sent when.

    process_group: the Communicator of the ranks whose gradients are averaged; by default the world.
    where: "between_nodes": gradients are averaged inside each node in full precision, and only nodes exchange bits;
        "everywhere"; None: between nodes if there are several, with as many ranks each, numbered node by node.
    error_feedback: adds what an exchange did not send to the next one. False is worse, and there to be compared.
    bucket_cap_mb: MiB of parameters in a bucket; one is compressed while others are sent.

    progress: dict; the counters of the method, kept in the first group's "progress", the same on every rank.
    """

    step_needs: ClassVar = StepNeeds(wholes=True, together=True, averages="gradients")
    needs_every_rank: ClassVar[bool] = True  # as the state of a hook: of a rank without batches no zeros stand in
    leaves_gradients_local: ClassVar[bool] = True  # as the state of a hook
    keys: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")  # of states with an element for each of the parameter's
    wide_states: ClassVar[bool] = True  # in fp32 also of 16-bit parameters

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        progress: dict[str, Any],
        process_group: Communicator | None,
        where: str | None,
        error_feedback: bool,
        bucket_cap_mb: float,
    ) -> None:
        check_betas_and_eps(defaults)
        require("where", where, where is None or where in WHERE, f"one of {', '.join(WHERE)}, or None")
        require("error_feedback", error_feedback, isinstance(error_feedback, bool), "True or False")
        require("bucket_cap_mb", bucket_cap_mb, is_number(bucket_cap_mb) and bucket_cap_mb > 0, "a number above 0")
        if process_group is not None and not isinstance(process_group, Communicator):
            raise ConfigurationError(f"process_group: got {type(process_group).__name__}; needs a Communicator")
        self._process_group, self._where, self._has_error_feedback = process_group, where, error_feedback
        self._cap = bucket_cap_mb * MIB
        self._buckets: list[FlatBucket] = []
        self._errors: dict[FlatBucket, MessageErrors] = {}
        self._left_out = LeftOutParameters()
        self._own_parameters: set[torch.Tensor] = set()  # the parameters of all groups, once they are asked for
        # Entries of `state` as they were laid out; any other entry was loaded since.
        self._laid_out_states: dict[torch.Tensor, dict[str, Any]] = {}
        self._exchange: OneBitExchange | None = None
        self._engine_ranks_and_buckets: tuple[Communicator, Buckets] | None = None
        self._is_hooked = self._has_errors = self._has_gathered = False
        super().__init__(params, defaults)
        self.param_groups[0]["progress"] = progress

    # ---- what a method defines --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def averages_gradients(self) -> bool:
        """True if the next step needs the gradients' means over the ranks, in full precision."""

    @abstractmethod
    def _update(self) -> None:
        """Makes a step: `self._buckets` have states, and their parameters gradients."""

    @property
    def is_synchronised(self) -> bool:
        """True where the weights are the same on all ranks."""
        return True

    def refuse_local_weights(self) -> None:
        """Raises TrainingError where the weights are not the same on all ranks, so that no state can be kept."""

    def _is_left_out(self, p: torch.nn.Parameter) -> bool:
        """Tells if the next step is to leave a parameter as it is: it does not train."""
        return not p.requires_grad

    def _settings_that_must_agree(self) -> dict[str, Any]:
        """The settings that decide when something else is sent; ranks that differ would wait for each other."""
        return {}

    # ---- settings ---------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> dict[str, Any]:
        """The counters of the method."""
        found: dict[str, Any] = self.param_groups[0]["progress"]
        return found

    def _set_progress(self, **changed: Any) -> None:
        """Changes counters. A new dictionary, as states refer to the former one."""
        self.param_groups[0]["progress"] = {**self.progress, **changed}

    @property
    def _betas(self) -> tuple[float, float]:
        """The betas of all groups, which a schedule may change from step to step."""
        beta1, beta2 = self.param_groups[0]["betas"]
        return beta1, beta2

    @property
    def _eps(self) -> float:
        """The eps of all groups."""
        found: float = self.param_groups[0]["eps"]
        return found

    @property
    def _beta2_of_v(self) -> float:
        """The beta2 by which v last changed. States saved by earlier versions lack it: then that of the groups."""
        kept: float | None = self.progress.get("beta2_of_v")
        return self._betas[1] if kept is None else kept

    def _check_groups(self) -> None:
        check_groups(type(self).__name__, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at construction only. Its betas and eps are those of all groups."""
        if self._buckets:
            raise ConfigurationError("add_param_group: the buckets are laid out; make the optimizer anew")
        settings = {**self.defaults, **param_group}
        for name in ("lr", "weight_decay"):
            value = settings[name]
            fits = (is_number(value) or isinstance(value, torch.Tensor)) and bool(value >= 0)
            require(name, value, fits, "a number of at least 0")
        for name in ("betas", "eps"):
            own = self.defaults[name]
            require(name, settings[name], settings[name] == own, f"{own!r}, as all groups, which are sent together")
        super().add_param_group(param_group)
        self._own_parameters = set()
        for p in self.param_groups[-1]["params"]:
            if not p.dtype.is_floating_point or p.dtype == torch.float64:
                raise ConfigurationError(f"params: got {p.dtype}; needs parameters of 32 or 16 bits, floating-point")

    # ---- gradients --------------------------------------------------------------------------------------------------

    def reduce_gradients(self, bucket: GradBucket) -> Handle:
        """Starts the reduction of a bucket that the next step asks for.

        Gradients of parameters that this optimizer does not have are averaged in any case.
        """
        if not self._is_hooked and self._engine_ranks_and_buckets is None:
            bucket.refuse_other_ranks(type(self).__name__, self._group())
        self._is_hooked = True
        flat = bucket.buffer()
        if self.averages_gradients:
            if bucket.needed() == slice(0, flat.numel()):
                return bucket.reduce(process_group=self._group())
            comm = self._ready_exchange().averaging
        else:
            inside, foreign = self._ready_exchange().inside, self._foreign(bucket)
            if foreign:
                return self._reduce_foreign(flat, foreign, inside)
            if inside is None:
                return completed()
            comm = inside
        work = comm.all_reduce(flat, "avg", async_op=True)
        assert work is not None
        return ChainedWork(work, lambda: None)

    def _foreign(self, bucket: GradBucket) -> list[torch.Tensor]:
        """The gradients of a bucket whose parameters another optimizer has."""
        if self._engine_ranks_and_buckets is not None:
            return []
        if not self._own_parameters:
            self._own_parameters = {p for group in self.param_groups for p in group["params"]}
        return [
            g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True) if p not in self._own_parameters
        ]

    def _reduce_foreign(self, flat: torch.Tensor, foreign: list[torch.Tensor], inside: Communicator | None) -> Handle:
        """Averages these gradients over all ranks, and the others of the bucket inside nodes alone."""
        averaged = average_some(foreign, self._ready_exchange().averaging)
        if inside is None:
            return averaged
        within = inside.all_reduce(flat, "avg", async_op=True)
        assert within is not None
        return ChainedWork(within, averaged.wait)

    def refuse_nodes(self, world: Communicator) -> None:
        """Raises ConfigurationError on every rank where `where` does not fit the nodes. Collective."""
        if self._where == "between_nodes":
            split_by_node(world, self._where)

    def bind_to_engine(self, world: Communicator, buckets: Buckets) -> None:
        """Takes an engine's ranks and buckets, and makes the exchange. Collective.

        buckets: of the optimizer's parameters; their shards are the owners' chunks.
        """
        self._engine_ranks_and_buckets = world, buckets
        self._ready_exchange()

    def _group(self) -> Communicator:
        if self._engine_ranks_and_buckets is not None:
            return self._engine_ranks_and_buckets[0]
        return data_group(type(self).__name__, self._process_group, needed="process_group=")

    def _ready_exchange(self) -> OneBitExchange:
        """Makes the exchange, at its first use. Collective then."""
        if self._exchange is None:
            world = self._group()
            check_everywhere(world, self._check_groups)
            settings = {key: value for key, value in self.defaults.items() if key not in ("lr", "weight_decay")}
            settings |= {"betas": self._betas, "eps": self._eps}
            settings |= {
                "where": self._where,
                "error_feedback": self._has_error_feedback,
                "bucket_cap_mb": self._cap / MIB,
            }
            settings |= self._settings_that_must_agree() | self.progress
            settings["shapes of params"] = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
            check_settings_agree(world, type(self).__name__, settings)
            self._exchange = OneBitExchange(world, self._where, self._has_error_feedback)
        return self._exchange

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent in exchanges of bits so far, without headers of messages."""
        return 0.0 if self._exchange is None else self._exchange.sent_bytes

    @property
    def computing_seconds(self) -> float:
        """Seconds that this thread has computed in exchanges of bits so far, steps of the states among it."""
        return 0.0 if self._exchange is None else self._exchange.computing_seconds

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """The states' arrays and the errors, as "optimizer", and memory for messages, as "buckets"."""
        arrays = [array for bucket in self._buckets for array in bucket.arrays.values()]
        errors = [each for errors in self._errors.values() for each in errors.held_tensors()]
        buffers = [] if self._exchange is None else self._exchange.message_buffers()
        return {"optimizer": arrays + errors, "buckets": buffers}

    # ---- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes one step; returns the result of `closure`, called with gradients enabled. Collective.

        Which parameters train is the same on all ranks; it may change from step to step.

        Raises TrainingError on every rank unless the engine calls `one_bit_hook`; ConfigurationError for groups whose
        betas or eps differ.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare_step()
        if any(p.grad is not None and p.grad.is_sparse for bucket in self._buckets for p in bucket.parameters):
            raise ConfigurationError(f"{type(self).__name__}: got a sparse gradient; needs dense ones")
        self._update()
        return loss

    def _prepare_step(self) -> None:
        """Lays out the states and copies loaded ones into them. Collective at the first step."""
        exchange = self._ready_exchange()
        self._check_groups()
        if not self._is_hooked and exchange.world.size > 1:
            raise TrainingError(
                f"{type(self).__name__}: no engine calls its hook; needs register_comm_hook(optimizer, "
                "mpidl.optim.one_bit_hook) of DistributedDataParallel, or to be ZeroOptimizer's class"
            )
        if not self._buckets:
            self._lay_out(exchange)
        if not self._laid_out_states or self._is_loaded():
            self._adopt_loaded_states(exchange)
        self._note_left_out()
        self.forget_errors()

    def _is_loaded(self) -> bool:
        """Returns whether states were loaded since the last step, in place of those that are views of the arrays."""
        key, entries = self.keys[0], self.state
        held = (pair for bucket in self._buckets for pair in zip(bucket.parameters, bucket.views[key], strict=True))
        return any(
            entries.get(p) is not self._laid_out_states.get(p) or entries[p].get(key) is not view for p, view in held
        )

    def _lay_out(self, exchange: OneBitExchange) -> None:
        if self._engine_ranks_and_buckets is not None:
            buckets = self._engine_ranks_and_buckets[1]
        else:
            parameters = [p for group in self.param_groups for p in group["params"]]
            cut = assign(reversed(parameters), self._cap)
            buckets = [(group, layout_of(group, exchange.world.size)) for group in cut]
        self._buckets = [FlatBucket(parameters, layout, self.keys) for parameters, layout in buckets]
        self._errors = {bucket: exchange.errors_of(bucket.layout, bucket.device) for bucket in self._buckets}

    def _adopt_loaded_states(self, exchange: OneBitExchange) -> None:
        """Copies loaded states into the arrays, of which each parameter's state is a view from then on."""
        self._left_out.clear()
        self._has_errors = self._has_error_feedback and any(ERROR in entry for entry in self.state.values())
        for bucket in self._buckets:
            mean = torch.zeros(bucket.layout.padded, dtype=torch.float32, device=bucket.device)
            for number, (p, error) in enumerate(zip(bucket.parameters, bucket.views_of(mean), strict=True)):
                loaded = self.state.get(p, {})
                for key in self.keys:
                    view = bucket.views[key][number]
                    if key not in loaded:
                        view.zero_()
                    elif loaded[key] is not view:
                        view.copy_(loaded[key])
                if ERROR in loaded:
                    error.copy_(loaded[ERROR])
                self.state[p] = self._laid_out_states[p] = {key: bucket.views[key][number] for key in self.keys}
            exchange.set_errors_from_mean(self._errors[bucket], mean)
            self._errors[bucket].mask(None)

    def _note_left_out(self) -> None:
        for bucket, errors in self._errors.items():
            if self._left_out.update(bucket, [self._is_left_out(p) for p in bucket.parameters], self.keys):
                errors.mask(None)

    def _mask_errors(self) -> None:
        """Leaves elements out of exchanges: those of `_left_out`, and those that never had a gradient.

        The mean square of the latter is zero.
        """
        for bucket, errors in self._errors.items():
            if errors.masked is None:
                errors.mask(bucket.zero_elements(bucket.arrays["exp_avg_sq"], self._left_out.flags[bucket]))

    def _start_exchange(
        self,
        bucket: FlatBucket,
        array: torch.Tensor,
        advance: RangeCallback | None = None,
        on_mean: RangeCallback | None = None,
    ) -> PipelinedReduction:
        """Starts to exchange an array of a bucket. advance, on_mean: as of `OneBitExchange.start`."""
        assert self._exchange is not None
        self._has_errors = self._has_error_feedback
        return self._exchange.start(array, self._errors[bucket], advance, on_mean)

    def _all_agree(self, on: bool) -> bool:
        """Tells if all ranks say yes. Collective."""
        return not is_anywhere(self._ready_exchange().averaging, not on)

    # ---- states -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_errors(self) -> None:
        """Puts the mean errors into the parameters' states, as "error", until the next step. Collective.

        Each rank keeps its own errors for its steps. mpidl.checkpoint.save does this by itself.
        """
        self.refuse_local_weights()
        self._has_gathered = True
        if self._exchange is None or not self._has_errors or self._is_loaded():
            return  # the states' own, if any, are those that were loaded
        for bucket in self._buckets:
            whole = self._exchange.mean_errors(self._errors[bucket], bucket.layout.padded)
            for p, error in zip(bucket.parameters, bucket.views_of(whole), strict=True):
                if p in self.state:
                    self.state[p][ERROR] = error

    def forget_errors(self) -> None:
        """Takes the mean errors out of the states, once they are saved."""
        self._has_gathered = False
        if self._has_errors:
            for entry in self.state.values():
                entry.pop(ERROR, None)

    def state_dict(self) -> dict[str, Any]:
        """The states, and each parameter's mean error, as "error". The same on every rank; may be called on one alone.

        Fits any number of ranks, which take over the mean of the errors. Raises TrainingError where ranks have errors
        since the last `gather_errors`, which is collective.
        """
        self.refuse_local_weights()
        if self._has_errors and not self._has_gathered:
            if self._ready_exchange().world.size > 1:
                raise TrainingError(
                    f"{type(self).__name__}: state_dict() while each rank has errors of its own; needs gather_errors() "
                    "on every rank after the last step, or mpidl.checkpoint.save"
                )
            self.gather_errors()
        found = super().state_dict()
        found["state"] = {number: dict(entry) for number, entry in found["state"].items()}
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` gave, on every rank the same. Raises ConfigurationError for another optimizer's."""
        self.refuse_foreign_state(state_dict)
        super().load_state_dict(dict(state_dict))
        self._has_errors = False
        restore_wide(self, state_dict, (*self.keys, ERROR))

    def refuse_foreign_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for the state of another optimizer, as Adam's: it has no counters of the method."""
        if not any("progress" in group for group in state_dict["param_groups"]):
            raise ConfigurationError(
                f"load_state_dict: got the state of another optimizer, without progress; needs {type(self).__name__}'s"
            )


def one_bit_hook(optimizer: OneBitOptimizer, bucket: GradBucket) -> Handle:
    """DDP's communication hook: averages gradients as long as the optimizer asks for it; its state is the optimizer.

    ddp.register_comm_hook(optimizer, mpidl.optim.one_bit_hook)
    """
    return optimizer.reduce_gradients(bucket)
