"""Tensor and sequence parallelism: the layers of a model cut over the ranks of the tp axis of a mesh.

What a user calls:

    parallelize       cuts a model by a plan, and makes it whole again
    loading, saving   reads each rank's parts from safetensors; refuses to write parts as if they were the model
    assigned          keeps the placements of parameters that a load replaces
    deferred          values of a model that was built by deferred_init
    counting          what a rank holds and sends, counted without the other ranks

Plans, which give modules of a model a style:

    plans             the names in a plan
    ready_plans       plans by the class of a model
    automatic         the plan of any other model; attention_structure, feed_forward_structure: find these networks;
                      layer_calls: what both read; source: reads a module's source; flow: follows values through it;
                      elementwise: operations of single elements; tokens: what blocks do with pieces of sequences
    trial             runs each kind of block cut and whole, as reading source is no proof; trial_copies: how;
                      block_kinds: which blocks are of one kind
    styles            styles of single layers, and of sequences
    regions           styles of an attention and of a feed-forward network

Cut layers:

    linear            column- and row-parallel layers; lora: adapters around them
    vocabulary        embeddings and output layers over parts of the vocabulary; vocab_logits: what these give;
                      cross_entropy: the loss of it
    tensor_parallel   what the cut layers of a model share: ranks, pieces of sequences, random numbers
    functions         autograd functions that communicate in forward or backward
    communication     the collectives of these functions, through symmetric memory
    sum_memory        memory in which an all-reduce leaves its sum as the layer's output
    kept_sums         outputs that an activation checkpoint keeps, so that its second run communicates less
    regathered        a region's gathered input, which is gathered again in backward
    dropout           dropout by index: the same elements for every tp
    forward_wrapper   runs a function around a module's forward pass
    sizes             the runs of heads, features and tokens that each rank holds
    local_elements    the same for a tensor inside a region, by its shape; for dropout by index

Checks:

    input_check       the ranks of tp have the same model, and the same inputs
    step_checks       an optimizer that needs whole parameters does not step on parts
    same_gradients    gradients of replicated parameters are equal over tp as a step begins

To add a style: a class with `apply` in `styles` (one layer) or `regions` (a module with several), what it sends in
`functions`, its name here; CONTRIBUTING.md has the steps and the tests ("tensor-parallel style"). To add a plan:
`ready_plans`.

docs/parallelism.md tells which to use.
"""

from .communication import Traffic
from .counting import traffic
from .cross_entropy import cross_entropy
from .deferred import materialize
from .linear import ColumnParallelLinear, RowParallelLinear
from .loading import load_safetensors
from .parallelize import model_state_dict, parallelize, unparallelize
from .plans import Plan
from .ready_plans import PLANS, plan_for
from .regions import AttentionParallel, FeedForwardParallel
from .styles import ColumnParallel, RowParallel, SequenceBegins, SequenceEnds, SequenceParallel, VocabParallel
from .vocab_logits import VocabLogits
from .vocabulary import VocabParallelEmbedding

__all__ = [
    "PLANS",
    "AttentionParallel",
    "ColumnParallel",
    "ColumnParallelLinear",
    "FeedForwardParallel",
    "Plan",
    "RowParallel",
    "RowParallelLinear",
    "SequenceBegins",
    "SequenceEnds",
    "SequenceParallel",
    "Traffic",
    "VocabLogits",
    "VocabParallel",
    "VocabParallelEmbedding",
    "cross_entropy",
    "load_safetensors",
    "materialize",
    "model_state_dict",
    "parallelize",
    "plan_for",
    "traffic",
    "unparallelize",
]
