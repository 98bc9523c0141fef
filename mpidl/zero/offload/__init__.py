"""Offload: the optimizer's state and fp32 masters elsewhere, in CPU memory or on disk, and its step on the CPU.

    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, offload=mpidl.Offload("disk", path="/nvme"))

| module | what it is |
|---|---|
| `settings` | what a user asks for |
| `slices` | a parameter's slice whose master may lie elsewhere |
| `swap` | the file, its regions, and how they lie in a buffer |
| `need` | what the file will hold, foreseen, and the file of that size |
| `groups` | sub-groups: what is read, stepped on and written together |
| `pipeline` | reads the next sub-group and writes the last one while one is stepped on |
| `optimizer` | in place of the torch optimizer inside ZeroOptimizer; delayed updates |
| `entries` | the state of every slice as a mapping |

Sources: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"; Rajbhandari et al. 2021,
"ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 5.
"""

from .optimizer import OffloadedOptimizer
from .settings import Offload
from .slices import OffloadedSlice

__all__ = ["Offload", "OffloadedOptimizer", "OffloadedSlice"]
