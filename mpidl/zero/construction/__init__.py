"""Builds the parts of a ZeroOptimizer.

    `options`         the arguments of ZeroOptimizer
    `arguments`       the checks before training: of each argument on its own rank, by functions that raise;
                      `one_bit_checks`: those of 1-bit optimizers
    `build`           runs these checks in `_check`, where all ranks agree on the result before the model changes;
                      then makes the parts of the optimizer, in their order

The rest is for models larger than a rank's memory, built without values, which then go straight into the shards:

    model = mpidl.deferred_init(GPT2, config)                      # shapes, and a tape of how the values come about
    optimizer = mpidl.ZeroOptimizer(model, AdamW, stage=3)         # the tape is played; a rank keeps its slices

    values from                                    to
    a tape             `recording`, `tape`    --.
    reset_parameters   `module_values`        ---+--> `value_targets`: a rank's slices in the working dtype, and masters
    a safetensors file `file_values`          --'

`initial_values` chooses the source of each tensor's values. No source holds more than the tensor that it works at.
"""
