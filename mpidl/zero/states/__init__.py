"""States of the model and the optimizer: whole on rank 0 for the program, in slices for checkpoints and averages.

`methods.states` calls it.

    whole_states       gathers whole states from the shards on rank 0, and scatters them back; plain formats
    owned_state        this rank's slices of parameters and gradients, which a checkpoint writes and fills
    owned_weights      this rank's slices of the weights, of which EMA keeps averages
    separate_storages  `model.state_dict()` with a storage for each tensor

`mpidl.checkpoint` saves and loads a ZeroOptimizer by the methods of `owned_state`: what a checkpoint is to store of
ZeRO gets a method there.
"""
