"""Job of `test_eight_ranks`: python -m tests.mpidl.tensor.job_eight_ranks ENGINE MODEL DP SHARDS SEQUENCES.

SEQUENCES: "in pieces" or "whole". SHARDS: how many neighbouring ranks of dp hold the shards of one replica, or "all".
"""

from __future__ import annotations

import sys
from dataclasses import replace

import mpidl
from collectives import Communicator
from mpidl import Mesh
from tests.mpidl.tensor.engines import Recipe, assert_same, train_alone, train_cut
from tests.mpidl.tensor.reference import all_in_float64, build


def main(engine: str, name: str, dp: str, shards: str, sequences: str) -> None:
    """Trains 20 steps on 8 ranks, clipped, and compares with one process."""
    comm = Communicator()
    recipe = Recipe(clip=0.05)
    with all_in_float64(), Mesh(dp=int(dp), tp=-1, comm=comm) as mesh:
        data = mesh["dp"]
        group = {} if shards == "all" else {"shard_group": data.split(data.rank // int(shards))}
        model = mpidl.parallelize(build(name), mesh, sequence_parallel=sequences == "in pieces")
        recipe = replace(recipe, engine=group)
        assert_same(train_cut(engine, model, mesh, recipe), train_alone(build(name), recipe))
    if comm.rank == 0:
        print("the same")
    comm.close()


main(*sys.argv[1:])
