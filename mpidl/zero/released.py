"""Parameters that are not whole notice when somebody touches them.

So a weight that is used outside its module's forward pass is gathered then, and what would only read or change a part
of it, on one rank maybe, is refused by name. It stays watched while it is held for such a use, as every result must see
to it that the weight is whole again for its backward pass. Parameters that are whole for their module are what they
were.
"""

from __future__ import annotations

import weakref

import torch

from .touch import ABOUT, Touched, Watched, unwatch, watch


class _Released(Watched):
    about = ABOUT | {"data_ptr", "untyped_storage", "is_shared", "__repr__", "__format__"}
    about |= {"__reduce_ex__", "__deepcopy__"}


def release(parameter: torch.nn.Parameter, filler: torch.Tensor, touched: Touched) -> None:
    """Gives its memory up: from now on it reads as `filler`, of its shape.

    touched: a method that makes it whole, or raises, and returns what makes it whole once more for the backward pass.
        Its object is not kept alive.
    """
    parameter.data = filler
    watch(parameter, weakref.WeakMethod(touched), _Released)


def restore(parameter: torch.nn.Parameter, values: torch.Tensor, watched: bool = False) -> None:
    """Gives it values and, unless its uses are watched on, makes it what it was."""
    if not watched:
        unwatch(parameter)
    parameter.data = values
