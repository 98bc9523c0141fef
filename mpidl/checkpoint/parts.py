"""Parts of a model that lie over pp, tp or ep of a mesh, each saved as a checkpoint in a folder of the whole one.

    step-00000100/index.json                   the sizes of these axes, and the checksum of each part's index
    step-00000100/part-pp0-tp1/index.json      a checkpoint, as that of a whole model

The ranks of a part are those of one engine, dp x cp (edp for experts); they read and write it as they would a whole
model. Agreements are of all ranks of the mesh, so that an error in one part is an error on every rank. The directory
gets its name once, when all parts are on the disk, so it is complete with all of them or no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

import torch

from collectives import Communicator

from ..errors import CheckpointError, CheckpointMismatch, ConfigurationError
from ..job.agreement import on_rank_0, run_everywhere
from ..mesh.groups import DATA
from ..mesh.layout import MODEL_AXES
from ..mesh.mesh import Mesh
from ..mesh.placement import placement
from . import index
from .index import Index
from .tensorfile import checksum

Result = TypeVar("Result")


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that this rank's engine trains.

    comm: the ranks that train it.
    all_ranks: those of all parts.
    sizes: of the axes over which the parts lie, outermost first; none for a whole model.
    coordinates: this rank's there.
    joined: all parts are one checkpoint.
    """

    comm: Communicator
    all_ranks: Communicator
    sizes: dict[str, int] = field(default_factory=dict)
    coordinates: tuple[int, ...] = ()
    joined: bool = False

    @property
    def number(self) -> int:
        """Number of the part among all."""
        number = 0
        for size, at in zip(self.sizes.values(), self.coordinates, strict=True):
            number = number * size + at
        return number

    @property
    def rank(self) -> int:
        """This rank's number in the checkpoint: those of the first part come first."""
        return self.comm.rank + self.comm.size * (self.number if self.joined else 0)

    @property
    def name(self) -> str:
        """Folder of the part in a checkpoint's directory; empty for a whole model, and for parts that are joined."""
        return "" if self.joined else _name(self.sizes, self.coordinates)

    @property
    def names(self) -> list[str]:
        """Folders of all parts; none for a whole model, and for parts that are joined."""
        if self.joined or not self.sizes:
            return []
        return [_name(self.sizes, point) for point in product(*map(range, self.sizes.values()))]

    def everywhere(self, action: Callable[[], Result]) -> Result:
        """Returns `action()`, which may be collective over `comm` and fails there on every rank. Collective.

        What it raises in one part is an error on every rank of all.
        """
        return run_everywhere(self.all_ranks, action) if self.sizes else action()


def group_of(mesh: Mesh, model: torch.nn.Module) -> Communicator:
    """Returns the ranks of a mesh that hold the same parameters of a model without an engine."""
    experts = any("ep" in placement(p).axes for p in model.parameters())
    return mesh.along("edp") if experts else mesh.along(*DATA)


def group_with(needed: Sequence[Communicator], given: Communicator | None = None) -> Communicator | None:
    """Returns the group that has the ranks of all these: the given one, or one of them; None if none of them has.

    needed: of a model that an averager trains, those that average weights, and those that average gradients.

    Raises ConfigurationError for a given one that lacks ranks.
    """
    ranks = {number for group in needed for number in group.world_ranks}
    having = [group for group in (given, *needed) if group is not None and ranks <= {*group.world_ranks}]
    if given is not None and given not in having:
        raise ConfigurationError(
            f"checkpoint: process_group: got {given.size} ranks, and lacks some whose weights belong together; needs "
            "all over which the optimizer averages weights and DistributedDataParallel gradients"
        )
    return having[0] if having else None


def part_of(mesh: Mesh, comm: Communicator) -> ModelPart:
    """Returns the part whose engine works over `comm`. Raises ConfigurationError for a group of another mesh."""
    if comm is mesh.along(*DATA):
        axes = [axis for axis in mesh.layout.model_axes if axis != "ep"]
    elif comm is mesh.along("edp"):
        axes = [*mesh.layout.model_axes]
    else:
        raise ConfigurationError(
            f"checkpoint: mesh: the model is trained over {comm.size} ranks that are neither dp x cp of {mesh!r} nor "
            "edp; needs the mesh whose groups its engine has"
        )
    if not axes:
        return ModelPart(comm, comm)
    sizes = {axis: mesh.size(axis) for axis in axes}
    return ModelPart(comm, mesh.comm, sizes, tuple(mesh.coordinates[axis] for axis in axes))


def _name(sizes: dict[str, int], point: Sequence[int]) -> str:
    return "-".join(["part", *(f"{axis}{at}" for axis, at in zip(sizes, point, strict=True))]) if sizes else ""


def index_of_parts(path: Any, part: ModelPart, about: dict[str, Any], texts: dict[str, str]) -> Index:
    """Makes the index of the whole from those of the parts.

    about: of one part.
    texts: of all indexes, by folder.
    """
    ranks = part.all_ranks.size
    model = {"class": about["model"]["class"], "parameters": [], "buffers": [], "tied": {}}
    kept = {name: about[name] for name in ("step", "micro_step", "engine")}
    kept |= {"ranks": ranks, "own": [{}] * ranks, "extra": None, "model": model, "mesh": part.sizes}
    kept |= {"apart": about["apart"]} if "apart" in about else {}
    return Index(path, {**kept, "parts": {name: checksum(text.encode()) for name, text in texts.items()}}, {}, {})


def contents(content: Index) -> dict[str, Index]:
    """Reads the indexes that have tensors: those of the parts by folder, or the index itself under "".

    Raises CheckpointError for a part that is missing or not the one that was saved.
    """
    parts = content.about.get("parts", {})
    return {name: _part_in(content, name, index.read_text(content.path / name)) for name in parts} or {"": content}


def own_content(part: ModelPart, content: Index) -> Index:
    """Reads the index of this rank's part. Collective over all parts.

    Raises CheckpointError on every rank, CheckpointMismatch for a model that lies in other parts here.
    """
    saved = content.about.get("mesh", {})
    if saved != part.sizes:
        raise CheckpointMismatch(
            f"{content.file}: holds {parts_in_words(saved)}; here is {parts_in_words(part.sizes)}; needs a mesh with "
            "the same sizes of these axes, given as mesh= (dp and cp may differ)"
        )
    if not part.sizes:
        return content
    text = part.everywhere(lambda: on_rank_0(part.comm, lambda: index.read_text(content.path / part.name)))
    return run_everywhere(part.all_ranks, lambda: _part_in(content, part.name, text))


def refuse_parts(content: Index, what: str) -> None:
    """Raises CheckpointError for a checkpoint whose tensors are parts."""
    if "parts" in content.about:
        raise CheckpointError(
            f"{content.file}: holds {parts_in_words(content.about['mesh'])}, which do not join to a whole one: "
            f"{content.about.get('apart', 'no cuts were saved')}; {what} needs a checkpoint of a whole model"
        )


def parts_in_words(sizes: dict[str, int]) -> str:
    """Describes the parts of a model for a message."""
    shown = ", ".join(f"{axis}={sizes[axis]}" for axis in MODEL_AXES if axis in sizes)
    return f"the parts of a model over {shown}" if shown else "a whole model"


def _part_in(content: Index, name: str, text: str) -> Index:
    path = content.path / name
    if checksum(text.encode()) != content.about["parts"].get(name):
        raise CheckpointError(f"{path / index.NAME}: is damaged, or of another checkpoint than {content.file}")
    found = index.parse(path, text)
    if "parts" in found.about:
        raise CheckpointError(f"{found.file}: is not as the format has it: a part has parts")
    return found
