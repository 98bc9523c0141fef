"""Support of torch.compile: functions that it must not compile, and the plain model inside a compiled one.

`torch.compiler.disable` imports the compiler where it decorates, which doubles the time of `import mpidl`; `uncompiled`
does so when what it has decorated is first called, as in torch's own optimizers. It keeps what it decorates in a cycle,
so functions made for each engine take torch.compiler.disable, and are freed with the engine.
"""

from typing import Any

import torch

uncompiled = torch._disable_dynamo


def plain(model: Any) -> Any:
    """The model that torch.compile was given, if this is what it made; its parameters have the plain names."""
    return getattr(model, "_orig_mod", model) if isinstance(model, torch.nn.Module) else model
