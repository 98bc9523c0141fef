"""Keeps torch.compile from compiling functions of an engine, which then run as plain Python.

`torch.compiler.disable` imports the compiler where it decorates, which doubles the time of `import mpidl`; `uncompiled`
does so when what it has decorated is first called, as in torch's own optimizers. It keeps what it decorates in a cycle,
so functions made for each engine take torch.compiler.disable, and are gone with the engine.
"""

import torch

uncompiled = torch._disable_dynamo
