"""The step: the inner optimizer on slices, on whole parameters, or within the backward pass; masters in fp32.

`methods.step` calls it, in the order of a step.

inner                   the interface of inner optimizers, and the one that steps on slices (AdamW)
whole_steps             steps on whole parameters, each on one rank (Muon)
parameter_distribution  which elements of a parameter each rank of dp x tp has, for whole_steps
replicated_steps        steps on whole parameters on every rank (OneBitAdam)
backward_steps          steps within the backward pass
optimizer_class         chooses among these by the optimizer's class, or refuses it
precision               16-bit parameters with fp32 masters
step_settings           settings of a step that all ranks must have
"""
