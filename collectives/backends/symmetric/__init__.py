"""One-copy collectives among the ranks of a node: each reads what it needs straight from the others' memory.

Every operation begins in one way: a rank writes down its operation and where its arrays lie, and waits for the
others (`Meetings.publish`). Then all of them see the same rows, and take the same of four ways:

    pull      every rank's input is symmetric: read the peers' inputs
    push      every rank's output is symmetric: write the peers' outputs (movements only)
    direct    any arrays: the kernel copies from and to the peers' private memory, if it may (`peer_memory`)
    staged    any arrays: through a scratch of symmetric memory, in chunks that stay in the cache (`staging`)

In a gather all ranks write to the root's output, direct, or also pull above a mebibyte, so that all copy at once.

Where there are several ways, bytes decide (`group.StagedSizes`), and `Communicator(scratch=)`. Of n bytes on p ranks,
in private arrays, a rank copies and adds:

    direct              2 (p - 1) / p n by the kernel, (p - 1) / p n added
    staged, in slices   (2 (p - 1) + 1) / p n in its program, (p - 1) / p n added
    staged, whole       n in its program, (p - 1) n added

Copies by the Linux kernel take two to three times as long: it looks up each page, and each piece is a system call. In
slices there is a barrier for each chunk and one more. Whole, there is one in all, so this way is for small arrays,
symmetric ones too, as pull and push take two. scan and exscan are staged at any size, as a rank's result takes
the place of an input that others read.

Contributions are added in the order of ranks, ((x0 + x1) + x2) + ..., however the data is cut; fp16 and bf16 are added
in fp32 and rounded once. So slices, chunks and packing change no result, and the bits are the same on every rank.

An Operation can be run again on the same arrays. It keeps what it worked out, a list of calls on views, for as long as
the rows are the same, byte by byte; so an operation that is run again costs a few microseconds of Python. A small one
that is run again is carried out from C (`native.OneCopy`), which makes its meeting, copies and sums itself.

    backend      the operations, as a `Backend`; `group`: the state that they share
    operation    from the ranks' meeting (`backends.meeting`) to the calls; `steps`: the calls for the part in C
    reductions   all_reduce, reduce, reduce_scatter, scan, exscan; `movements`: the other operations
    staging      the staged way; `processor`: what copies and reduces, here the host
    partitioned  an all-reduce of arrays that are handed in one by one; `tickets`: who reduces which chunk
"""
