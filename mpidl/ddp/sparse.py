"""Gradients of sparse embeddings: rows and their numbers are gathered from all ranks instead of whole tables summed.

rank 0: rows 3, 7        rank 1: rows 7, 9, 12        ->   every rank: rows 3, 7, 9, 12, row 7 being their mean
"""

from __future__ import annotations

import numpy as np
import torch

from collectives import Communicator


def sparse_parameters(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """The weights of embeddings that were made with sparse=True."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = [m for m in module.modules() if isinstance(m, kinds) and m.sparse]
    return {p for m in tables for p in m.parameters(recurse=False)}


def mean_of_sparse(comm: Communicator, parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    """The mean over all ranks of gradients whose rows differ, coalesced; bitwise equal on all ranks. Collective.

    gradient: this rank's, sparse in its first dimension, or None for no rows at all. Where any rank's is dense (the
    table is tied to a dense layer, say) the mean is dense.
    """
    own_is_dense = gradient is not None and gradient.layout == torch.strided
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    elif own_is_dense:
        rows, values = torch.arange(len(gradient), device=gradient.device), gradient.contiguous()
    else:
        merged = gradient.coalesce()
        rows, values = merged.indices()[0].contiguous(), merged.values().contiguous()
    counts_and_layouts = np.empty(2 * comm.size, np.int64)
    comm.all_gather(counts_and_layouts, np.array([len(rows), own_is_dense], np.int64))
    counts, dense_by_rank = counts_and_layouts[::2].tolist(), counts_and_layouts[1::2]
    all_rows = torch.empty(sum(counts), dtype=torch.int64, device=rows.device)
    all_values = torch.empty((sum(counts), *values.shape[1:]), dtype=values.dtype, device=values.device)
    width = values[:1].numel() if len(values) else int(np.prod(values.shape[1:]))
    comm.all_gather(all_rows, rows, counts)
    comm.all_gather(all_values.view(-1), values.view(-1), [count * width for count in counts])
    mean = torch.sparse_coo_tensor(
        all_rows[None], all_values / comm.size, parameter.shape, check_invariants=False
    ).coalesce()
    return mean.to_dense() if dense_by_rank.any() else mean
