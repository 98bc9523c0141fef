"""Embeddings and output layers of which each rank of tp holds some rows of the vocabulary.

    tokens -> rows of this rank, zeros for the others -> sum over the ranks
    hidden -> logits of this rank's tokens (`VocabLogits`) -> cross-entropy, by two all-reduces of a few numbers a token

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..compiling import uncompiled
from ..errors import ConfigurationError, TrainingError
from ..mesh import Mesh
from .assigned import keep_placements
from .communication import TensorGroup
from .forward_wrapper import has_own_forward
from .functions import sum_of_region
from .linear import cut_parameter, make_column_parallel, sizes_of
from .saving import refuse_to_save_parts
from .sizes import Run, run_of
from .tensor_parallel import TensorParallel
from .vocab_logits import VocabLogits


def needs_all_rows(embedding: nn.Embedding) -> bool:
    """Returns whether an embedding has a setting that needs all of its rows on a rank."""
    return embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse


def make_vocabulary(name: str, layer: nn.Module, tp: TensorParallel) -> None:
    """Keeps this rank's rows of an embedding, or its tokens of an output layer."""
    if isinstance(layer, nn.Embedding):
        if needs_all_rows(layer):
            raise ConfigurationError(
                f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse needs all of its rows on a rank"
            )
        if has_own_forward(layer):
            raise ConfigurationError(
                f"{name}: has a forward pass of its own in the {type(layer).__name__} itself; needs its class's"
            )
        start, stop = run = run_of(layer.num_embeddings, tp.ranks, tp.rank)
        cut_parameter(layer.weight, 0, [run], tp)
        padding = layer.padding_idx
        tp.set(layer, "forward", _Embedding(layer, tp, run))
        tp.set(layer, "padding_idx", None if padding is None or not start <= padding < stop else padding - start)
        return
    _, tokens = sizes_of(name, layer)
    make_column_parallel(layer, tp, [run_of(tokens, tp.ranks, tp.rank)], copies_input=True)
    tp.keep(layer.register_forward_hook(_AsLogits(tp.group, tokens)))


class _Embedding:
    """The forward pass of an embedding of which this rank has a run of rows.

    A derived class may do with each row what it wants, such as scale it.
    """

    def __init__(self, layer: nn.Embedding, tp: TensorParallel, run: Run) -> None:
        self._layer, self._tp, self._run = layer, tp, run

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Integers [...] -> [..., width], the same on every rank."""
        tokens, (start, stop) = input, self._run
        self._tp.group.check_inputs(tokens)
        if tokens.device.type == "cpu":  # a GPU would wait
            _refuse_out_of_range(tokens, self._layer.num_embeddings)
        elsewhere = (tokens < start) | (tokens >= stop)
        weight = self._layer.weight
        if start == stop:
            rows = weight.sum() * weight.new_zeros(*tokens.shape, weight.shape[1])  # a gradient, also of no rows
        else:
            rows = type(self._layer).forward(self._layer, torch.where(elsewhere, 0, tokens - start))
            rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return sum_of_region(rows, self._tp.group)


@uncompiled
def _refuse_out_of_range(tokens: torch.Tensor, count: int) -> None:
    wrong = tokens[(tokens < 0) | (tokens >= count)]
    if len(wrong):
        raise TrainingError(
            f"embedding: got the token {int(wrong[0])} with a vocabulary of {count}; needs tokens in it"
        )


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which each rank of tp holds some rows; its output is the same on all.

    num_embeddings, embedding_dim: of the whole embedding; the rest as in torch.nn.Embedding.
    mesh: has the ranks of tp. Integers [...] -> [..., embedding_dim]
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, mesh: Mesh, **kwargs: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **kwargs)
        self._tensor_parallel = TensorParallel.of_layers(mesh)
        make_vocabulary("VocabParallelEmbedding", self, self._tensor_parallel)
        refuse_to_save_parts(self, self._tensor_parallel)
        keep_placements(self, self._tensor_parallel)


class _AsLogits:
    """A forward hook that makes an output layer's result VocabLogits. tokens: of the whole vocabulary."""

    def __init__(self, group: TensorGroup, tokens: int) -> None:
        self._group, self._tokens = group, tokens

    def __call__(self, layer: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return VocabLogits.of(output, self._group, self._tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AsLogits:
        return self
