"""The job: joining it, its ranks and devices, what all ranks agree on, and its end."""
