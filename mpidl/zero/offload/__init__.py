"""Offload: the optimizer's state and fp32 masters in CPU memory or on disk, and its step on the CPU.

    optimizer = mpidl.ZeroOptimizer(model, torch.optim.AdamW, stage=3, offload=mpidl.Offload("disk", path="/nvme"))

    settings          the argument `offload=`: the memories to offload to, by name, and the checks
    offloaded_slice   a parameter's slice whose master may lie in CPU memory or in the storage
    storage           what sub-groups ask of a storage, and how what they read lies in a buffer
    swap_file         the storage on disk: a file and its regions
    disk_space        the bytes that the file needs, predicted, and the file of that size
    sub_groups        the chunks of slices that are read, stepped on and written together
    triple_buffering  reads the next sub-group and writes the last one while one is stepped on
    optimizer         the optimizer inside ZeroOptimizer instead of torch's; delayed updates
    state_mapping     the state of every slice as a mapping

To add a place to offload to: its name in `settings.PLACES` and its checks in `settings.Offload`; a `storage.Storage` in
a file next to `swap_file`; and its construction in `optimizer.OffloadedOptimizer.__init__`, where "disk" calls
`disk_space.open_file`. Nothing else in this folder knows which storage it is.

Sources: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"; Rajbhandari et al. 2021,
"ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning", section 5.
"""

from typing import TYPE_CHECKING

from ...lazy_names import lazily
from .offloaded_slice import OffloadedSlice
from .settings import Offload

if TYPE_CHECKING:
    from .optimizer import OffloadedOptimizer

__getattr__, __dir__ = lazily(__name__, {"OffloadedOptimizer": "optimizer"})  # few programs offload

__all__ = ["Offload", "OffloadedOptimizer", "OffloadedSlice"]
