"""Methods of ZeroOptimizer, as functions of its parts (`optimizer_parts`), a file for each subject.

step               `step`, in its order; read it first
clip_and_unscale   clips, unscales, searches for NaN and clears, between backward and step
states             whole states, gathered parameters, and what this rank owns, for checkpoints and averages
loading            `load_safetensors`: weights from files into a model that trains
unfreeze           `add_param_group`: parameters that were frozen
unwrapping         `unwrap`: makes the sharded model a plain one again
"""
