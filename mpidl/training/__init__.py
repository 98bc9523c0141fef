"""Parts of a training loop that serve every engine: loss scaling, NaN and infinity, replicas that must stay equal.

loss_scaling         `mpidl.GradScaler`: torch's, whose decisions all ranks take together
nonfinite_gradients  `mpidl.find_nonfinite_gradients`: which parameters, on which ranks
nonfinite_guard      `mpidl.NonfiniteGuard`: stops the job for such a loss or gradient, or skips the step
kept_buffers         what puts the model's buffers back when a step is skipped
replica_check        `mpidl.check_replicas`: compares parameters and states of all ranks
"""
