"""ZeRO: the optimizer's state, the gradients and the parameters cut over the ranks (Rajbhandari et al. 2020).

| stage | parameters | gradients | optimizer state | sent by a rank a step (ring, Psi parameters) |
|---|---|---|---|---|
| 1 | whole | whole, reduced on the own shard | shard | 2 Psi (N - 1) / N |
| 2 | whole | shard | shard | 2 Psi (N - 1) / N |
| 3 | shard, whole a unit at a time | shard | shard | 3 Psi (N - 1) / N |

`optimizer` is what a user calls: a facade over the `Parts` that `build` makes, with `step`, `reduced_gradients`,
`states`, `unfreeze` and `unwrapping` as its methods. `shards` owns the gradients and the parameters of all stages;
`strategy` names the verbs of the three strategies that differ in where the parameters live: `replicated` (1, 2),
`node_shared` (3 on one node) and `sharded` (3 over several); `units` cuts a model; `precision` says in which dtypes it
is trained; `groups` over which ranks it is cut; `sharded_gradient` is what `.grad` shows of a gradient; `construction`
gives values to models that are larger than a rank's memory; `offload` keeps optimizer state elsewhere; `state` puts
whole states together from shards.
"""

from .construction.recording import deferred_init
from .construction.weights import Safetensors
from .gradients.sharded_gradient import ShardedGradient
from .offload import Offload
from .optimizer import ZeroOptimizer
from .parameters.units import unit
from .stepping.precision import Precision

__all__ = ["Offload", "Precision", "Safetensors", "ShardedGradient", "ZeroOptimizer", "deferred_init", "unit"]
