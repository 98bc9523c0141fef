"""States of the model and the optimizer: whole on rank 0, or what this rank owns."""
