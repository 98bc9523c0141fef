"""The states of a ZeroOptimizer: of the model and of the optimizer, whole on rank 0, and what this rank owns of them.

Whole states have the plain model's and the plain optimizer's formats; how they come from shards is told in `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from collectives import Communicator

from ..consistency import check_everywhere, refuse_everywhere
from ..errors import TrainingError
from . import state
from .construction.construct import targets_of
from .construction.weights import Rename, Safetensors, WeightFiles
from .grad_attribute import GradAttributes
from .groups import ShardGroup
from .guard import WeightGuard
from .offload import OffloadedOptimizer
from .owned import OwnedState
from .owned_weights import OwnedWeights
from .shards import GradientShards, ParameterShard
from .slices import Slice
from .strategy import ParameterStrategy
from .whole import WholeParameters
from .whole_steps import WholeSteps


class StatefulOptimizer(torch.optim.Optimizer):
    """The part of ZeroOptimizer that gives state out and takes it in. The attributes are ZeroOptimizer's."""

    _comm: Communicator
    _group: ShardGroup
    _model: torch.nn.Module
    _names: state.StateNames
    _parameters: ParameterStrategy
    _shards: list[ParameterShard]
    _slices: dict[torch.nn.Parameter, Slice]
    _gradients: GradientShards
    _grads: GradAttributes
    _inner: Any
    _prototype: torch.optim.Optimizer
    _offloaded: OffloadedOptimizer | None
    _guard: WeightGuard
    _whole: WholeParameters
    _refuse_gone: Callable[[str], None]

    @torch.no_grad()
    def flush(self) -> None:
        """Shows the values of a delayed update that is under way, as before an evaluation. Collective.

        Returns when no rank needs another one to gather a unit. States and `gathered` do it by themselves.
        """
        self._parameters.drain()  # for ranks whose last forward pass needs this one
        if self._offloaded is not None and self._offloaded.pending:
            self._parameters.release()
            self._offloaded.finish()
            self._parameters.publish()

    @contextmanager
    def gathered(
        self, module: torch.nn.Module | None = None, writable: bool = True, from_rank: int | None = None
    ) -> Iterator[None]:
        """Inside, the parameters of `module` (default: the model) are whole on every rank. Collective.

        writable: they may be changed if every rank makes the same change. The model may be run without gradients on
            some ranks only, to sample from it, say; not to change them saves a copy.
        from_rank: the changes of this rank alone count, and go to all.

        A block may be inside another; a writable one begins with what the outer ones have made by then, which the ranks
        agree on as at their end. Raises TrainingError on every rank at the end of the block, or the begin of an inner
        one, for parameters that the ranks have changed otherwise than one another.
        """
        self.flush()
        held = self._whole.block(module, writable, from_rank)
        with self._guard.gathered(module, writable), held:
            yield

    def model_state_dict(self, masters: bool = True) -> dict[str, torch.Tensor]:
        """The plain model's state_dict, on rank 0; an empty one on the others. Collective.

        masters: parameters that have fp32 masters are given in fp32, so that training can go on from them to the bit;
            frozen ones in the dtype that they have. False: all as the forward pass sees them.

        Raises TrainingError on every rank for weights that were changed other than by a step, `gathered` or loading.
        """
        self.flush()
        refuse_everywhere(self._comm, self._guard.damage())
        slices = self._slices if masters else {}
        return state.gather_model(self._group, self._model, self._names, self._parameters, slices)

    def load_model_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Loads what `model_state_dict` or the plain model's state_dict gave, from rank 0. Collective.

        Rank 0 gives the whole, in any dtype; what the others give is ignored. Masters take the values before they are
        rounded. Raises ConfigurationError on every rank for missing or unexpected names and for other shapes.
        """
        self._guard.put_back()
        state.scatter_model(self._group, self._model, self._names, state_dict, self.gathered(from_rank=0), self._slices)
        self._guard.accept()

    def load_safetensors(
        self, path: str | Path, rename: Rename | None = None, missing: Callable[[str], bool] | None = None
    ) -> None:
        """Loads the model's weights from safetensors, of which each rank reads its slices. Collective.

        The arguments are those of `zero.Safetensors`. Masters take the values before they are rounded. Raises, on every
        rank and before anything is changed, ConfigurationError for names and shapes that do not fit, and TrainingError
        where the files lack some and weights were changed other than by a step, inside `gathered` or by loading.
        """
        self.flush()
        names = self._names.tensors(self._model)
        files = check_everywhere(self._comm, lambda: WeightFiles(Safetensors(path, rename, missing), names))
        files.check(self._comm)
        if files.tensors.issuperset(names.values()):
            self._guard.put_back()
        else:
            refuse_everywhere(self._comm, self._guard.damage(inside=True))
            if self._whole.is_open:
                with self.gathered():
                    pass  # what blocks around this have changed is in the shards then
        self._parameters.release(inside_gathered=True)
        targets = targets_of(self._model, self._group.rank, self._parameters.shards, self._slices)
        files.fill({t: targets[t] for t in files.tensors})
        self._parameters.publish()
        self._guard.accept()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as the plain torch optimizer would have it, on rank 0. Collective.

        On others a dictionary of one entry, which tells that the state is on rank 0, and which rank 0 refuses to load.
        """
        self.flush()
        self._cut_state()
        return state.gather_optimizer(self._group, self, self._inner, self._slices)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` or the plain torch optimizer gave, whatever the ranks, from rank 0. Collective."""
        self.flush()
        self._cut_state()
        state.scatter_optimizer(self._group, self, self._inner, self._slices, state_dict)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The reduced gradients by the parameters' names, whole, on rank 0; {} on the others. Collective.

        What a plain model's `.grad` would be: the mean over the ranks, scaled and clipped as they are now. Those that
        no rank's passes reached since zero_grad are left out.
        """
        self._refuse_gone("gradients")
        self._parameters.release()
        return state.gather_gradients(self._group, self._names, self._owned().gradients(), self._slices)

    def owned_state(self) -> OwnedState:
        """What this rank owns of the parameters and gradients, slice by slice; the state of a slice is in `state`.

        Waits for a delayed update that is under way, and leaves it unseen. Collective.
        """
        self._parameters.release()  # a library's all-gather may use the shard's own place as room while it runs
        if self._offloaded is not None:
            self._offloaded.complete()
        self._cut_state()
        return self._owned()

    def owned_weights(self) -> OwnedWeights:
        """This rank's slices of the weights that train, as `mpidl.optim.EMA` averages them."""
        names = {p: name for name, p in reversed(self._names.parameters.items())}
        return OwnedWeights(self._group, self._parameters, self._slices, names, self._owned(), self._guard)

    def _owned(self) -> OwnedState:
        return OwnedState(
            self._group,
            self._parameters,
            self._slices,
            self._gradients,
            self._grads,
            self._shards,
            self._offloaded,
            self._guard,
        )

    def _cut_state(self) -> None:
        """The state is in slices, as the parameters are, in `state`. Collective.

        Raises TrainingError for what no parameter's name could be given to. Alike on every rank.
        """
        if isinstance(self._inner, WholeSteps):
            self._inner.cut_state()
        kept = self._inner.own_state if isinstance(self._inner, WholeSteps) else self._inner.state
        foreign = [] if self._offloaded is not None else [key for key in kept if not torch.is_tensor(key)]
        if foreign:
            raise TrainingError(
                f"state_dict: {type(self._prototype).__name__} keeps a state {foreign[0]!r} that belongs to no "
                "parameter, and only those of parameters are saved and loaded"
            )

    def held_tensors(self) -> dict[str, list[torch.Tensor]]:
        """All tensors of model state on this rank, by category; views of one storage may appear several times."""
        held = {**self._parameters.held_tensors(), **self._gradients.held_tensors()}
        if self._offloaded is not None:
            own = self._offloaded.held_tensors()
            return {**held, **own, "gradients": held["gradients"] + own["gradients"]}
        entries = self._inner.entries() if isinstance(self._inner, WholeSteps) else self._inner.state.values()
        states = [v for entry in entries for v in entry.values() if torch.is_tensor(v) and v.dim() > 0]
        return {**held, "optimizer": states + [s.values.detach() for s in self._slices.values() if s.is_master]}

    def offloaded_bytes(self) -> int:
        """Bytes of this rank's optimizer state and masters that lie elsewhere: see `Offload`."""
        return 0 if self._offloaded is None else self._offloaded.offloaded_bytes()
