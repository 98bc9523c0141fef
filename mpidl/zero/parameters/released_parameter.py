"""Parameters without memory, which are gathered before an operator reads them (`read_hook`).

So a weight that is used outside its module's forward pass is gathered at that time. A read or write where the other
ranks may not take part in the gather is refused by name. A parameter that is gathered for such a use keeps this class,
because the backward pass of each result needs the whole weight again. A parameter that is gathered for its module has
its original class.
"""

from __future__ import annotations

import weakref

import torch

from .read_hook import METADATA_FUNCTIONS, BeforeRead, Watched, unwatch, watch


class _Released(Watched):
    metadata_functions = METADATA_FUNCTIONS | {"data_ptr", "untyped_storage", "is_shared", "__repr__", "__format__"}
    metadata_functions |= {"__reduce_ex__", "__deepcopy__"}


def release(parameter: torch.nn.Parameter, placeholder: torch.Tensor, before_read: BeforeRead) -> None:
    """Puts `placeholder`, of the parameter's shape, in place of its memory, and watches it.

    before_read: a method that makes the parameter whole, or raises, and returns a function that makes it whole again
        for the backward pass. Its object is not kept alive.
    """
    parameter.data = placeholder
    watch(parameter, weakref.WeakMethod(before_read), _Released)


def restore(parameter: torch.nn.Parameter, values: torch.Tensor, watched: bool = False) -> None:
    """Gives a parameter its values. watched: whether operators on it go on to call back."""
    if not watched:
        unwatch(parameter)
    parameter.data = values
