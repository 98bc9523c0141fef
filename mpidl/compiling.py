"""Support of torch.compile: functions that it must not compile, and the plain model inside a compiled one.

`torch.compiler.disable` imports the compiler where it decorates, which doubles the time of `import mpidl`; `uncompiled`
does so when what it has decorated is first called, as in torch's own optimizers. `uncompiled` makes a reference cycle
with what it decorates. So functions that are made for each engine use torch.compiler.disable, and are freed with it.
"""

from typing import Any

import torch

uncompiled = torch._disable_dynamo


def unwrap_compiled(model: Any) -> Any:
    """Returns the module inside what torch.compile made; any other object as it is."""
    return getattr(model, "_orig_mod", model) if isinstance(model, torch.nn.Module) else model
