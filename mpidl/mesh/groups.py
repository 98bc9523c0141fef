"""The group of ranks that an engine works over: from `mesh=`, from `process_group=`, or the world.

The world is the default only as long as all ranks hold the same parameters. While a mesh is open whose ranks hold
different ones (pp, tp or ep longer than 1), an engine over the world would average tensor-parallel parts, and its
first broadcast would overwrite pipeline stages; so that default is an error then. What shares out samples works over dp
alone: over the world the ranks of cp, which hold parts of the same sequences, would take different samples; so with cp
longer than 1 its default is an error too. A mesh is open from its construction until `close`.
"""

from __future__ import annotations

from typing import Any

from collectives import Communicator

from ..errors import ConfigurationError
from ..job.runtime import default_communicator
from .mesh import Mesh, open_meshes

DATA = ("dp", "cp")  # the ranks that hold the same parameters and train on different tokens


def data_group(
    what: str,
    process_group: Communicator | None,
    mesh: Mesh | None = None,
    axes: tuple[str, ...] = DATA,
    needed: str = "mesh= or process_group=",
) -> Communicator:
    """The Communicator of data parallelism from two arguments, of which one at most is given.

    what: whose arguments these are, for messages.
    axes: of the mesh.
    needed: what to give in place of the world.
    """
    mesh = checked_mesh(what, process_group, mesh)
    if mesh is not None:
        return mesh.along(*axes)
    if process_group is None:
        refuse_world(what, needed)
        if "cp" not in axes:
            _refuse_different_samples(what, needed)
    return default_communicator(process_group)


def refuse_world(what: str, needed: str) -> None:
    """Raises ConfigurationError while a mesh is open whose ranks hold different parameters."""
    for mesh in _meshes_of_parts():
        raise ConfigurationError(
            f"{what}: by default all ranks hold the same parameters, and a mesh with {_model_axes_in_words(mesh)} is "
            f"open, on which they do not; needs {needed}"
        )


def _refuse_different_samples(what: str, needed: str) -> None:
    """Raises ConfigurationError while a mesh is open whose ranks of cp take the same samples."""
    for mesh in open_meshes():
        if mesh.size("cp") > 1:
            raise ConfigurationError(
                f"{what}: by default all ranks take different samples, and a mesh with cp={mesh.size('cp')} is open, "
                f"on which ranks of cp take the same ones; needs {needed}"
            )


def checked_mesh(what: str, process_group: Any, mesh: Any) -> Mesh | None:
    """The argument `mesh`. Raises ConfigurationError if it is none, or given together with a process group."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigurationError(f"{what}: mesh: got {type(mesh).__name__}; needs a mpidl.Mesh")
    if mesh is not None and process_group is not None:
        raise ConfigurationError(f"{what}: got mesh= and process_group=; needs one of them")
    return mesh


def refuse_part(what: str, group: Communicator, needed: str) -> None:
    """Raises ConfigurationError if the group holds one part of several of a model. needed: what to do instead."""
    for mesh in _meshes_of_parts():
        if group.size < mesh.comm.size:
            raise ConfigurationError(
                f"{what}: {group.size} of the {mesh.comm.size} ranks of a mesh with {_model_axes_in_words(mesh)} take "
                f"part, and together they hold only a part of the model; needs {needed}"
            )


def _meshes_of_parts() -> list[Mesh]:
    """The open meshes whose ranks hold different parameters."""
    return [mesh for mesh in open_meshes() if mesh.layout.model_axes]


def _model_axes_in_words(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={mesh.size(axis)}" for axis in mesh.layout.model_axes)
