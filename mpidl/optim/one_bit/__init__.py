"""Optimizers that send one bit an element: 1-bit Adam, 0/1 Adam, 1-bit LAMB.

flat             buckets: parameters side by side, and a flat array for each state
exchange         the mean of an array over the ranks, in one bit, with error feedback
base             what the optimizers share: the hook, the states, one exchange after the other
group_settings   betas and eps, the same in all groups
left_out         parameters that do not train
steps            arithmetic on the parameters of a bucket
adam, zero_one, lamb   a method each
"""

from .adam import OneBitAdam
from .base import OneBitOptimizer, one_bit_hook
from .lamb import OneBitLamb
from .zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "OneBitOptimizer", "ZeroOneAdam", "one_bit_hook"]
