"""Memory that a rank needs, and memory that it holds: predicted by formula, and counted tensor by tensor.

    python -m mpidl.memory --params 7.5e9 --ranks 64 --dtype bf16

    estimate       bytes a rank of any ZeRO stage, from a model or a number of parameters
    optimizer_state
                   bytes of an optimizer's state, by its name
    activations    what autograd keeps for backward: by formula for a transformer, and counted while a model runs
    counted        the tensors of model state that this rank holds now, by category
    process        what the system says of the whole process

To add a term of the estimate: a field of `estimate.Estimate` with its formula in `estimate.estimate`, and the same
category of `counted.Measurement`, with which tests compare it. Units that are whole are the exception: they are
`buckets` of the estimate, but `parameters` of the measurement. CONTRIBUTING.md has the steps and the tests.
"""

from .activations import SavedActivations, activation_bytes, measure_activations, slot_bytes
from .counted import Measurement, measure, model_state_bytes, storage_bytes
from .estimate import Estimate, estimate
from .optimizer_state import STATE_BYTES
from .process import MIB, data_mib, peak_rss_mib, pss_mib, rss_mib

__all__ = [
    "MIB",
    "STATE_BYTES",
    "Estimate",
    "Measurement",
    "SavedActivations",
    "activation_bytes",
    "data_mib",
    "estimate",
    "measure",
    "measure_activations",
    "model_state_bytes",
    "peak_rss_mib",
    "pss_mib",
    "rss_mib",
    "slot_bytes",
    "storage_bytes",
]
