"""EMA: an exponential moving average of the weights, to evaluate and to ship instead of the last ones.

    average  <-  decay * average + (1 - decay) * weights        after each step

Under ZeRO every rank averages its own slices, the fp32 masters where there are any; under DDP, and of a plain model,
every rank averages all, in fp32 where parameters have 16 bits. Ranks communicate only to show or to gather the average.
Of a model that is cut over tp each rank averages its parts, which states have joined to whole tensors.

    ema = mpidl.optim.EMA(model, decay=0.999)

        optimizer.step()
        ema.update()
    with ema.averaged():
        evaluate(model)

Source: Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; the exponential form as of
`torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch

from collectives import Communicator

from ..absent_state import absent_state, refusal
from ..ddp.plain_model import plain_model
from ..errors import ConfigurationError, TrainingError, listed
from ..job.agreement import check_everywhere, kept_on_rank_0
from ..job.objects import all_gather_object
from ..mesh import whole_tensors
from ..replicas.checksums import checksum, difference
from ..replicas.start_check import check_settings_agree
from ..setting_checks import integer, require
from ..trained_by import trainer_of, trainer_of_model

Tensors = dict[str, torch.Tensor]
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Weights(Protocol):
    """The trained weights of a model as this rank holds them, whole or as slices, by the plain model's names."""

    @property
    def is_root(self) -> bool:
        """True on a rank that gathers and scatters whole tensors."""

    def values(self) -> Tensors:
        """Returns this rank's weights, to read."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole tensors."""

    def forget(self) -> None:
        """Drops from this process's memory the pages of weights on a disk, which keeps them."""

    def replaced(self, averages: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Context in which the model computes with the averages. Its end raises if they were changed. Collective."""

    def gather(self, averages: Mapping[str, torch.Tensor]) -> Tensors:
        """Returns whole tensors, on a root. Collective."""

    def scatter(self, given: Mapping[str, torch.Tensor], names: Iterable[str]) -> Tensors:
        """Returns this rank's part of whole tensors. Collective."""

    def from_root(self, value: Any) -> Any:
        """Returns the root's value. Collective."""


class EMA:
    """Keeps an average of a model's weights.

    model: plain, in a DistributedDataParallel, or trained by a ZeroOptimizer, which is to be made before.
    decay: of the average at an update, 0 to 1.
    warmup: after n updates the decay is at most (1 + n) / (10 + n), so that the first weights are soon forgotten.
    interval: calls of `update` from one that averages to the next.
    use_buffers: average floating-point buffers too, such as running statistics, each rank its own; whole numbers are
        taken as they are. Without it a model keeps its buffers when its weights are replaced.

    Where ranks step by themselves for a while, each would average its own weights: update when all have the same ones
    (`is_synchronised` of ZeroOneAdam, of PeriodicAverager and of DiLoCo's `averager`).

    The first update copies the weights; until then the average is the weights with which the EMA was made. Frozen
    parameters have no average; unfrozen ones take part from the next update on. The arguments must be the same on
    every rank.

    steps: calls of `update`.
    updates: those that averaged.
    averages, buffers: what this rank keeps, by the plain model's names: whole tensors, or flat slices under ZeRO.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decay: float = 0.999,
        *,
        warmup: bool = False,
        interval: int = 1,
        use_buffers: bool = False,
    ) -> None:
        require("model", type(model).__name__, isinstance(model, torch.nn.Module), "a torch.nn.Module")
        fits = isinstance(decay, Real) and not isinstance(decay, bool) and 0 <= decay <= 1
        require("decay", decay, fits, "a number from 0 to 1")
        for name, flag in (("warmup", warmup), ("use_buffers", use_buffers)):
            require(name, flag, isinstance(flag, bool), "True or False")
        self.decay, self.warmup, self.use_buffers = float(decay), warmup, use_buffers
        self.interval = integer("interval", interval, 1)
        self.steps = self.updates = 0
        self.averages: Tensors = {}
        self.buffers: Tensors = {}
        self._is_averaged_now = False
        wrapper, self._model = plain_model(model)
        self._comm = comm = None if wrapper is None else wrapper.process_group
        trainer = trainer_of_model(self._model)
        self._optimizer = None if trainer is None else trainer.optimizer
        if self._optimizer is not None:
            self._comm = comm = self._optimizer.process_group
            if self._optimizer.owned_weights().delays:
                raise ConfigurationError("EMA: got a ZeroOptimizer with delayed_update; needs one without")
        if comm is not None:
            settings = {"decay": self.decay, "warmup": warmup, "interval": self.interval, "use_buffers": use_buffers}
            check_settings_agree(comm, "EMA", settings)
        self._copy_weights()

    def _weights(self) -> Weights:
        if self._optimizer is not None:
            weights: Weights = self._optimizer.owned_weights()
            return weights
        claimed = next((name for name, p in self._model.named_parameters() if trainer_of(p) is not None), None)
        if claimed is not None:
            raise ConfigurationError(
                f"EMA: a ZeroOptimizer trains {claimed}; make the EMA after it, of the model that it was given"
            )
        return _WholeWeights(self._model, self.averages)

    def _model_buffers(self) -> Tensors:
        return {name: b.detach() for name, b in self._model.named_buffers()} if self.use_buffers else {}

    @torch.no_grad()
    def update(self) -> bool:
        """Counts a step, and at every `interval`-th one averages the weights. Returns True if it did.

        To be called after `optimizer.step()`, on every rank.
        """
        if self._is_averaged_now:
            raise TrainingError("EMA.update: inside `with ema.averaged():` the weights are the average itself")
        self.steps += 1
        if self.steps % self.interval:
            return False
        if self.updates == 0:
            self._copy_weights()
        else:
            limit = (1 + self.updates) / (10 + self.updates) if self.warmup else 1.0
            weight = 1.0 - min(self.decay, limit)
            weights = self._weights()
            _average(self.averages, weights.values(), weight)
            weights.forget()
            _average(self.buffers, self._model_buffers(), weight)
        self.updates += 1
        return True

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Copies the model's present weights and buffers into the average."""
        weights = self._weights()
        for name, values in weights.values().items():
            self.averages[name] = _wide(values)
            weights.forget()
        self.buffers = {name: _wide(b) for name, b in self._model_buffers().items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has the averaged weights and buffers: to evaluate, save or export it. Collective.

        Afterwards it has its own again, to the bit, also after an exception. Takes the memory of one copy more of what
        this rank averages. Raises TrainingError, under ZeRO on every rank, for a step inside, and for weights that were
        changed there otherwise.
        """
        if self._is_averaged_now:
            raise TrainingError("EMA.averaged: inside another such block")
        with self._weights().replaced(self.averages), _replaced(self._model_buffers(), self.buffers):
            self._is_averaged_now = True
            try:
                yield
            finally:
                self._is_averaged_now = False

    def model_state_dict(self) -> dict[str, Any]:
        """Returns the plain model's state_dict with averaged weights, on rank 0. Collective.

        For a plain model and for DDP on every rank; under ZeRO a mark on the other ranks, as ZeroOptimizer returns it.
        Averages of 16-bit parameters are in fp32. Of a model that is cut over tp the tensors are whole; raises
        ConfigurationError for a part without a `cut`.
        """
        tp = self._tp("model_state_dict")
        if self._optimizer is not None:
            if tp is not None:
                whole_tensors.refuse_unknown_cuts(dict(self._model.named_parameters()), "EMA.model_state_dict")
            with self.averaged():
                whole: dict[str, Any] = self._optimizer.model_state_dict()
            return whole
        kept = {**self.averages, **self.buffers}
        tensors = self._named_tensors()
        values = {name: kept.get(name, t).detach() for name, t in tensors.items()}
        if tp is not None:
            values = self._everywhere(partial(whole_tensors.join, tp, values, tensors, "EMA.model_state_dict"))
        by_tensor = {t: values[name] for name, t in tensors.items()}
        states = self._model.state_dict(keep_vars=True)
        # An extra state of a module may be anything.
        return {
            name: by_tensor.get(t, t).detach().cpu().clone() if torch.is_tensor(t) else t for name, t in states.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts and the whole averages by the plain model's names, on rank 0. Collective.

        For a plain model and for DDP on every rank; under ZeRO a mark on the other ranks, as ZeroOptimizer returns it.
        Of a model that is cut over tp the averages are whole, on rank 0 of dp at each rank of tp; raises
        ConfigurationError for a part without a `cut`, and for averaged buffers that differ over tp.
        """
        weights, tp = self._weights(), self._tp("state_dict")
        averages, buffers = weights.gather(self.averages), dict(self.buffers)
        if tp is not None:
            averages, buffers = self._everywhere(lambda: self._joined(tp, averages)) or ({}, {})
        counts = {"steps": self.steps, "updates": self.updates}
        if self._optimizer is not None and not weights.is_root:
            return absent_state(self._optimizer.process_group.rank)
        return {**counts, "averages": averages, "buffers": buffers}

    def _joined(self, tp: Communicator, averages: Tensors) -> tuple[Tensors, Tensors]:
        """Returns whole averages and buffers. Collective over tp."""
        tensors = self._named_tensors()
        whole, buffers = (whole_tensors.join(tp, kept, tensors, "EMA.state_dict") for kept in (averages, self.buffers))
        differing = difference(tp, {name: checksum(b) for name, b in buffers.items()})
        if differing is not None:
            raise ConfigurationError(
                f"EMA.state_dict: of the averaged buffers differs over tp {differing}; needs use_buffers=False, or "
                'place(buffer, "tp", cut=)'
            )
        return whole, buffers

    def _named_tensors(self) -> Tensors:
        """Returns the plain model's parameters and buffers."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _tp(self, what: str) -> Communicator | None:
        """Returns the ranks of tp over which the model is cut; None if it is whole."""
        return whole_tensors.group_of_tp(self._named_tensors(), self._comm, f"EMA.{what}")

    def _everywhere(self, action: Callable[[], Any]) -> Any:
        """Returns `action()`, under ZeRO on a root alone. What it raises on one rank is an error on all. Collective."""
        if self._comm is None:
            return action()
        if self._optimizer is None:
            return check_everywhere(self._comm, action)
        return kept_on_rank_0(self._comm, action, ConfigurationError)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the state of an EMA of any engine and number of ranks; under ZeRO rank 0's. Collective.

        Over tp each rank takes its parts of the whole averages, under ZeRO of those that rank 0 of dp gives at its rank
        of tp. Raises ConfigurationError, under ZeRO and over tp on every rank, for averages of other names or shapes.
        """
        weights, tp = self._weights(), self._tp("load_state_dict")
        tensors = self._named_tensors()
        shapes = {name: whole_tensors.whole_shape(tensors[name]) for name in weights.shapes()}
        problem = self._problem(state_dict, shapes) if weights.is_root else None
        if tp is not None and weights.is_root:
            problem = next((found for found in all_gather_object(tp, problem) if found is not None), None)
        is_given = weights.is_root and not problem
        counts = (
            None if not is_given else [state_dict.get("steps"), state_dict.get("updates"), state_dict.get("buffers")]
        )
        problem, counts = weights.from_root((problem, counts))
        if problem:
            raise ConfigurationError(f"EMA.load_state_dict: {problem}")
        assert counts is not None
        whole = state_dict["averages"] if weights.is_root else {}
        given = {name: whole_tensors.part_of(tensors[name], whole[name]) for name in self.averages if name in whole}
        for name, own in weights.scatter(given, list(self.averages)).items():
            self.averages[name].copy_(own)
        self.steps, self.updates, buffers = counts
        for name, own in self.buffers.items():
            own.copy_(whole_tensors.part_of(tensors[name], buffers[name]))

    def _problem(self, given: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Runs `_mismatch` on any value, also one that is no state at all."""
        try:
            return self._mismatch(given, shapes)
        except (AttributeError, TypeError, KeyError) as error:
            return f"needs what an EMA's state_dict() gave ({type(error).__name__}: {error})"

    def _mismatch(self, given: Any, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Explains why a state is not one of this average; None if it is."""
        if (absent := refusal(given)) is not None:
            return absent
        if not isinstance(given, Mapping) or not {"steps", "updates", "averages", "buffers"} <= given.keys():
            return "needs what an EMA's state_dict() gave"
        if not all(isinstance(given[name], int) and given[name] >= 0 for name in ("steps", "updates")):
            return f"got counts of {given['steps']!r} and {given['updates']!r}; needs integers of at least 0"
        expected = {"averages": {name: shapes[name] for name in self.averages}}
        buffers = dict(self._model.named_buffers())
        expected["buffers"] = {name: whole_tensors.whole_shape(buffers[name]) for name in self.buffers}
        for kind, own in expected.items():
            missing, unexpected = sorted(own.keys() - given[kind].keys()), sorted(given[kind].keys() - own.keys())
            if missing or unexpected:
                return f"{kind}: missing names {missing[:5]}, unexpected names {unexpected[:5]}"
            for name, shape in own.items():
                if tuple(given[kind][name].shape) != shape:
                    return f"{kind}: {name} has shape {tuple(given[kind][name].shape)}; needs {shape}"
        return None


class _WholeWeights:
    """Weights of a plain model or of DDP: the parameters that train or have an average already."""

    is_root = True

    def __init__(self, model: torch.nn.Module, averages: Mapping[str, torch.Tensor]) -> None:
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad or n in averages}

    def values(self) -> Tensors:
        return {name: p.detach() for name, p in self._parameters.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self._parameters.items()}

    def forget(self) -> None:
        pass

    @contextmanager
    def replaced(self, averages: Mapping[str, torch.Tensor]) -> Iterator[None]:
        with _replaced(self.values(), averages):
            versions = {name: p._version for name, p in self._parameters.items()}
            yield
            changed = [name for name, p in self._parameters.items() if p._version != versions[name]]
        if changed:
            raise TrainingError(
                f"{listed(changed)}: changed inside `with ema.averaged():`, as by a step; the weights are again what "
                "they were before it"
            )

    def gather(self, averages: Mapping[str, torch.Tensor]) -> Tensors:
        return dict(averages)

    def scatter(self, given: Mapping[str, torch.Tensor], names: Iterable[str]) -> Tensors:
        return {name: given[name] for name in names}

    def from_root(self, value: Any) -> Any:
        return value


@contextmanager
def _replaced(tensors: Tensors, by: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Context in which tensors have other values."""
    kept: Tensors = {}
    try:
        with torch.no_grad():
            for name, t in tensors.items():
                if name in by:
                    kept[name] = t.clone()
                    t.copy_(by[name])
        yield
    finally:
        with torch.no_grad():
            for name, before in kept.items():
                tensors[name].copy_(before)


def _average(averages: Tensors, values: Tensors, weight: float) -> None:
    """Moves each average towards the values; a new average begins with its value."""
    same_dtype_pairs = []
    for name, value in values.items():
        if name not in averages:
            averages[name] = _wide(value)
        elif not (value.is_floating_point() or value.is_complex()):
            averages[name].copy_(value)
        elif value.dtype != averages[name].dtype:
            averages[name].lerp_(value.to(averages[name].dtype), weight)
        else:
            same_dtype_pairs.append((averages[name], value))
    if same_dtype_pairs:
        averaged, new = zip(*same_dtype_pairs, strict=True)
        torch._foreach_lerp_(averaged, new, weight)


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Copies a tensor, to fp32 if it has 16 bits."""
    return values.to(torch.float32 if values.dtype in _SIXTEEN_BITS else values.dtype, copy=True)
