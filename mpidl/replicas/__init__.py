"""The state that all ranks hold: made equal to that of rank 0, and compared."""
