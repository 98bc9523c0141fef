"""Operations that act on single elements, by their names: a part of a tensor gives the same values as the whole one."""

from __future__ import annotations

import re

# Functions and methods that act on single elements, by their last names without "_" at the end.
ON_ELEMENTS = re.compile(
    r"(?!\w*(?:norm|mean|max|sum|pool|conv|att|mix|cat))(?:\w+_)?(?:relu6?|gelu|silu|swish|mish|sigmoid|tanh|[sc]?elu)(?:_\w+)?|"
    r"log_?sigmoid|hard(?:tanh|swish|sigmoid|shrink)|soft(?:plus|sign|shrink)|tanhshrink|threshold|rrelu|"
    r"(?:alpha_)?dropout|square|pow|r?sqrt|exp2?|expm1|log(?:1p|2|10)?|sin|cos|erf|abs|neg|sign|reciprocal|"
    r"mul(?:tiply)?|add|sub|div(?:ide)?|addc(?:mul|div)|lerp|m(?:ax|in)imum|clamp(?:_m(?:ax|in))?|clip|where|"
    r"masked_fill|nan_to_num|float|half|double|bfloat16|to|type(?:_as)?|contiguous|clone|detach|"
    r"(?:zeros|ones|empty|full)_like|is(?:finite|nan|inf)"
)
MODULES_ON_ELEMENTS = (  # of torch
    "Identity", "Dropout", "AlphaDropout", "ReLU", "ReLU6", "GELU", "SiLU", "Mish", "Sigmoid", "LogSigmoid", "Tanh",
    "ELU", "SELU", "CELU", "LeakyReLU", "RReLU", "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softplus",
    "Softsign", "Softshrink", "Tanhshrink", "Threshold",
)  # fmt: skip
