"""First synchronised backward pass of a copied wrapper (deepcopy), before which a rank may use its copy alone.

A forward pass communicates nothing. So the ranks set up their copies together when the first backward pass begins: at
the first gradient of an output, or of a parameter if the loss does not come from an output. The forward pass has used
the parameters by then, so that the ranks can compare them, but not make them equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from collectives import Communicator

from ..errors import ModelMismatch
from ..gradients.backward import BackwardWatch, PassPhases, reaches_any, replacement_test
from ..replicas.checksums import checksum, difference
from .reducer import Reducer


class FirstPass:
    """Sets a copy up when a backward pass through its module begins.

    watch: of the copy's forward passes.
    set_up: of the copy, which has this object; makes its reducer, whose phases the watch has from then on, or returns
        None in a pass that is not synchronised.
    """

    def __init__(
        self,
        watch: BackwardWatch,
        module: torch.nn.Module,
        parameters: Iterable[torch.nn.Parameter],
        set_up: weakref.WeakMethod[Callable[[], Reducer | None]],
    ) -> None:
        self._watch = watch
        self._reducer: Reducer | None = None
        where = weakref.ref(self)  # the garbage collector does not see what a parameter's hooks refer to
        of_passes = weakref.ref(watch)

        def begins() -> None:  # also after `remove`: a graph may be there longer, as where the set-up has failed
            set_up_method, first_pass, live_watch = set_up(), where(), of_passes()
            reducer = None if set_up_method is None else set_up_method()
            if first_pass is not None:
                first_pass._reducer = reducer
            if reducer is not None and live_watch is not None:
                live_watch.phases.begin()  # the reducer's, in this pass

        def arrives(parameter: torch.Tensor) -> None:
            first_pass = where()
            if first_pass is not None:
                first_pass._arrive(parameter)

        trained = list(parameters)
        watch.is_training_backward = partial(reaches_any, trained)
        watch.are_replaced = replacement_test(module, set(trained))
        watch.phases = PassPhases(begun=(begins,))
        self._handles = [p.register_post_accumulate_grad_hook(arrives) for p in trained]

    def _arrive(self, parameter: torch.Tensor) -> None:
        self._watch.begin()
        if self._reducer is not None:  # whose hook, made just now, is not called for this gradient
            self._reducer.queue.arrive(parameter)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()


def check_copies_agree(comm: Communicator, names: Mapping[torch.nn.Parameter, str]) -> None:
    """Raises ModelMismatch on every rank where the values of the parameters differ over the ranks. Collective."""
    found = difference(comm, {name: checksum(p) for p, name in names.items()})
    if found is not None:
        raise ModelMismatch(
            f"the ranks' copies of a DistributedDataParallel begin with different parameters: {found}; load "
            "the same on all ranks, or wrap the copy's `.module` anew, which takes over rank 0's"
        )
