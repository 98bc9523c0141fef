"""ZeRO: the optimizer's state, the gradients and the parameters cut over the ranks (Rajbhandari et al. 2020).

| stage | parameters | gradients | optimizer state | sent by a rank a step (ring, Psi parameters) |
|---|---|---|---|---|
| 1 | whole | whole; the mean of a shard | shard | 2 Psi (N - 1) / N |
| 2 | whole | shard | shard | 2 Psi (N - 1) / N |
| 3 | shard, whole a unit at a time | shard | shard | 3 Psi (N - 1) / N over nodes; a node has them once |

    unit    a part of the model, by default each repeated block, whose parameters are gathered and released together
    shard   a rank's part of the flattened parameters, or gradients, of a unit or bucket (`parameter_shard`)
    slice   what a shard holds of one parameter, or its fp32 master: the inner optimizer steps on it (`slices`)

    optimizer        ZeroOptimizer, what a user calls: a facade over `optimizer_parts`, made by `construction.build`
    methods/         what its methods do: step, clip, states, load, unfreeze, unwrap
    construction/    checks arguments, cuts the model, gives values to models larger than a rank
    parameters/      where they live: `replicated` (1, 2), `node_shared` (3 in shared memory), `sharded` (3 elsewhere)
    gradients/       reduces each bucket to this rank's shard, and shows it as `.grad`
    stepping/        the inner optimizer's step on slices or whole parameters; fp32 masters of 16-bit parameters
    states/          whole states from shards and back, and what this rank owns
    offload/         optimizer state in CPU memory or on disk
    shard_group      the ranks over which state is cut; hybrid sharding
    placeholder      tensors of any shape in the memory of one element
    copy_guard       refuses to pickle or copy a model that is cut
    traffic          counts what was sent; forward_label: names the forward pass in a profile
"""

from .construction.initial_values import Safetensors
from .construction.recording import deferred_init
from .gradients.sharded_gradient import ShardedGradient
from .offload import Offload
from .optimizer import ZeroOptimizer
from .parameters.units import unit
from .stepping.precision import Precision

__all__ = ["Offload", "Precision", "Safetensors", "ShardedGradient", "ZeroOptimizer", "deferred_init", "unit"]
