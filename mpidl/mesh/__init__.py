"""Named axes over the ranks of a job, for data, tensor, pipeline, context and expert parallelism.

    layout     which rank has which coordinates: sizes and nodes in, groups of ranks out, without MPI
    mesh       a Communicator for each axis of it
    groups     the group that an engine takes from it, or the world where that is right
    placement  the axes over which a parameter is cut, and which elements of it a rank holds (`Cut`)
    whole_tensors  whole tensors of parts that are cut over tp, and back
    experts    the group and the divisor of expert parameters' gradients
    norm       the norm of all gradients, each element of the model once
    scaler_check  refuses torch's GradScaler for parameters of which ranks hold different parts

Layers are cut over tp by `mpidl.tensor`. For pp, cp and ep a mesh gives the groups, and the program has the layers.
"""

from .groups import data_group
from .layout import AXES, EXPERT_AXES, MODEL_AXES, Layout
from .mesh import Mesh
from .placement import Cut, Placement, place, placement

__all__ = [
    "AXES",
    "EXPERT_AXES",
    "MODEL_AXES",
    "Cut",
    "Layout",
    "Mesh",
    "Placement",
    "data_group",
    "place",
    "placement",
]
