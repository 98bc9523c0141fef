"""Named axes over the ranks of a job, for data, tensor, pipeline, context and expert parallelism.

layout     which rank has which coordinates: sizes and nodes in, groups of ranks out, without MPI
mesh       a Communicator for each axis of it
"""

from .layout import AXES, EXPERT_AXES, Layout
from .mesh import Mesh

__all__ = ["AXES", "EXPERT_AXES", "Layout", "Mesh"]
