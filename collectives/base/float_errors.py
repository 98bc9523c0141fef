"""Arithmetic that neither raises nor warns, whatever the program has told numpy to do at overflow and the like.

An exception would end a reduction on one rank in its middle, and the others would wait for it. Infinities and NaN are
results like any other, the same on every rank.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

import numpy as np

Runner = Callable[[Callable[[], Any]], Any]


def silent() -> Runner:
    """Returns a function that calls another one with floating-point errors ignored; one thread at a time, not nested.

    numpy keeps its settings in a context variable, and to run something in a context that has others costs a tenth
    of what `np.errstate` does.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # kept by thread there
        return np.errstate(all="ignore")(lambda task: task())
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run
