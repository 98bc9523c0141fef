"""States of the model and the optimizer: whole on rank 0 for the program, in slices for checkpoints and averages.

`methods.states` calls it.

    whole_states       gathers whole states from the shards on rank 0, and scatters them back; plain formats
    owned_state        this rank's slices of parameters and gradients; a checkpoint reads and fills them, DiLoCo fills
                       those of parameters
    owned_weights      this rank's slices of the weights, for EMA, which averages them, and DiLoCo, which steps from
                       them
    separate_storages  `model.state_dict()` with a storage for each tensor

`mpidl.checkpoint` saves and loads a ZeroOptimizer by the methods of `owned_state`: what a checkpoint is to store of
ZeRO gets a method there.
"""
