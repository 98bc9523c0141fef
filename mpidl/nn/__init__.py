"""Modules that compute over all ranks: `sync_batch_norm`, batch normalization with the statistics of all samples."""
