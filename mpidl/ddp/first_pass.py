"""First synchronised backward pass of a copied wrapper (deepcopy), before which a rank may use its copy alone.

A forward pass communicates nothing. So the ranks set up their copies together when the first backward pass begins: at
the first gradient of an output, or of a parameter if the loss does not come from an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..gradients.backward import BackwardWatch, PassPhases, goes_to, replacement_test


class FirstPass:
    """Calls `begins` when a backward pass through the module begins.

    watch: of the copy's forward passes. arrives(parameter): called, after that, for every gradient that comes while
    this object listens.
    """

    def __init__(
        self,
        watch: BackwardWatch,
        module: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        begins: Callable[[], None],
        arrives: Callable[[torch.Tensor], None],
    ) -> None:
        watch.is_training_backward = partial(goes_to, parameters)
        watch.are_replaced = replacement_test(module, set(parameters))
        watch.phases = PassPhases(begun=(begins,))
        self._handles = [p.register_post_accumulate_grad_hook(arrives) for p in parameters]

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
