"""Arrays, the arithmetic on them, and the checks of what a caller gives.

    buffers         a flat, typed view of any array's memory
    arguments       checks, each with an error that says what was given and what is needed
    coalesced       lists of arrays, packed so that they cost one operation
    partition       n elements over p ranks
    reduction       operators and their kernels; float_errors: arithmetic that neither raises nor warns
    scratch         memory for intermediate results

To add a dtype: `buffers.DTYPES`, `reduction`, `backends.mpi.datatype`, `backends.cuda.kernels` and the bench's
`operations.DATATYPES`. CONTRIBUTING.md says what goes into each, and names the tests.
"""
