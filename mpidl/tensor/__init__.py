"""Tensor and sequence parallelism: the layers of a model cut over the ranks of the tp axis of a mesh.

parallelize    cuts a model by a plan, and makes it whole again
plans          what a plan's names mean
ready          ready plans by class
automatic      the plan of any other model, by its structure
structure      attentions and feed-forward networks in a module
source         what the source of a module's class tells
styles         what a plan does with a module: single layers, sequences
regions        the styles of an attention and of a feed-forward network
linear         column- and row-parallel layers
lora           adapters of low rank around a cut layer
vocabulary     embeddings, output layers, cross-entropy over parts of the vocabulary
saving         a rank's parts are not written as the model
loading        weights from safetensors, of which each rank reads its parts
deferred       values of a model from deferred_init
functions      where autograd communicates
regathered     inputs of regions that are gathered again in backward
communication  the ranks of tp: the collectives of activations, through symmetric memory
sum_memory     symmetric memory in which sums stay
dropout        dropout that is the same for every tp; parts: which elements a rank computes
forwards       what runs around a module's forward pass
steps          optimizers that would step wrongly on parts
same_gradients  gradients that must be equal over tp, compared as a step begins
tensor_parallel  what the layers of a model share: ranks, pieces of sequences, random numbers
kept_sums      what checkpoints of activations need not communicate again
sizes          which heads, features and tokens each rank holds
counting       what a rank holds, beforehand and now, and what it has sent

docs/parallelism.md says what to take when.
"""

from .communication import Traffic
from .counting import traffic
from .deferred import materialize
from .linear import ColumnParallelLinear, RowParallelLinear
from .loading import load_safetensors
from .parallelize import model_state_dict, parallelize, unparallelize
from .plans import Plan
from .ready_plans import PLANS, plan_for
from .regions import AttentionParallel, FeedForwardParallel
from .styles import ColumnParallel, RowParallel, SequenceBegins, SequenceEnds, SequenceParallel, VocabParallel
from .vocabulary import VocabLogits, VocabParallelEmbedding, cross_entropy

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
