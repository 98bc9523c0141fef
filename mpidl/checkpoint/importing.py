"""Imports weights from safetensors files into a model of any engine.

files      [ header | wte ......... | wpe .. ]      whole tensors, as Hugging Face's transformers has them
rank 0     reads      ####            ##            what it holds, also runs of a cut weight
rank 1     reads          #####         #
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from collectives import Communicator

from ..errors import CheckpointError, ConfigurationError
from ..job.agreement import run_everywhere
from ..mesh import Mesh
from ..models.published import published_names
from ..weight_files import INDEX, SINGLE, names_in
from . import folder, index
from .engine import Engine, engine_of
from .index import Index, TensorEntry
from .matching import plan_reads
from .reading import CheckpointReader
from .saving import wait
from .tensorfile import TensorFile


def import_safetensors(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rename: Callable[[str], str | None] | None = None,
    process_group: Communicator | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Fills a model, of any engine, with the weights in a directory; each rank reads what it holds. Collective.

    rename: the model's name for a tensor of the files, or None to pass it over; by default as published weights of
        GPT-2 and BERT need it.
    mesh: where the model lies over pp, tp or ep of one, as for `load`.

    Converts dtypes; masters take the values unrounded.

    Raises CheckpointError, on every rank, for weights that are missing or do not fit, and then has changed nothing.
    """
    engine = engine_of(model, optimizer, process_group, mesh, needed="mesh=, so that each part gets its own")
    engine.optimizer = None  # weights alone
    comm = engine.all_ranks
    wait(model)
    if engine.join.reason is not None:
        raise ConfigurationError(f"import_safetensors: the parts of the model do not join: {engine.join.reason}")
    names = rename or published_names(engine.model)
    with CheckpointReader(run_everywhere(comm, lambda: _published(folder.path_of(path), engine, names))) as reader:
        read_plan = run_everywhere(comm, lambda: plan_reads(engine, reader.index))
        with engine.writing():
            run_everywhere(comm, lambda: reader.fill(read_plan.requests, engine.forget))


def _files_of(file: Path) -> list[str]:
    """Lists the files that an index in Hugging Face's format names."""
    try:
        return names_in(file)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _published(path: Path, engine: Engine, names: Callable[[str], str | None]) -> Index:
    """Describes a directory of weights as the index of a checkpoint that holds the model alone."""
    files = [SINGLE]
    if not (path / SINGLE).exists() and (path / INDEX).exists():
        files = _files_of(path / INDEX)
    content = Index(path, {}, {}, {})
    for name in files:
        with TensorFile(path / name) as file:
            content.files[name] = {"bytes": file.bytes}
            for key, span in file.spans.items():
                own = names(key)
                if own is not None:
                    entry = TensorEntry(span.dtype, span.shape)
                    entry.slices.append(index.StoredSlice(name, key, 0, entry.count, []))
                    content.tensors[f"model/{own}"] = entry
    found = {name.removeprefix("model/") for name in content.tensors}
    ties = engine.join.tied
    twice = {name for name, first in ties.items() if name in found and first in found}
    with CheckpointReader(content) as reader:
        for name in sorted(twice):
            if not torch.equal(reader.tensor(f"model/{name}"), reader.tensor(f"model/{ties[name]}")):
                raise CheckpointError(f"{path}: {name} differs from {ties[name]}; here they are one tensor")
    # Further names of shared tensors that the files hold under another of the model's names.
    tied = {first: name for name, first in ties.items() if name in found and first not in found}
    about = {"class": f"the weights in {path}", "parameters": sorted(found - twice), "buffers": [], "tied": tied}
    content.about.update(model=about, ranks=1, micro_step=0, own=[{}])
    return content
