"""A ZeroOptimizer's begin and end: arguments are checked, the model is cut, and at the end it is a plain one again.

    `arguments`   the checks          `build`        the parts, in their order
    `unfreeze`    more parameters     `unwrapping`   the way back

The rest is for models larger than a rank's memory, built without values, which then go straight into the shards:

    model = mpidl.deferred_init(GPT2, config)                      # shapes, and a tape of how the values come about
    optimizer = mpidl.ZeroOptimizer(model, AdamW, stage=3)         # the tape is played; a rank keeps its slices

    values from                                  to
    a tape             `recording`, `tape`  --.
    reset_parameters   `modules`            ---+--> targets: a rank's slices in the working dtype, and their masters
    a safetensors file `weights`            --'

`construct` decides which tensor gets its values from where. No source holds more than the tensor that it works at.
"""
