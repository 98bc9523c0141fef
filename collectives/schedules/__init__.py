"""Collectives as data: which rank sends, receives and reduces what, in which round.

schedule        the language: rounds of steps on chunks
algorithms/     a schedule for any number of ranks, of each operation; a new algorithm is a file there
proof           runs a schedule symbolically, and proves that it computes its operation
layout          a schedule laid out on a modelled cluster, for `collectives.price`
"""
