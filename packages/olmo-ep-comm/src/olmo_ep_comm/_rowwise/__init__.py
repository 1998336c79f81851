"""One-sided exchange: every rank writes its rows straight into the memory of the others.

    dispatch             counts to every rank, then rows, each once for a destination rank
    combine              the sums of a rank's rows, each once for the rank of its token
    backward of combine  as the rows of dispatch, along the same plan
    backward of dispatch as combine, with the gradients of the row weights

The **write-after-read rule**: nobody writes into a buffer of another rank before a barrier which
that rank entered after its last read of it. So each exchange is

    barrier    "my buffer may be written": entered after the last read
    writes     into the buffers of the others
    barrier    "your buffer is written": entered after the last write
    reads      of the own buffer

where the counts of a dispatch, which need a barrier anyway, take the place of the first. Sums that
are fetched turn it round, each writing into its own buffer and reading those of the others, under
the same two barriers. All of it is enqueued on one stream, whose order is that of the calls, and
the host waits for nothing.

A **fault** of one rank travels with its counts, so that the other ranks meet it after the first
barrier and need not wait for a rank that has gone: in a dispatch alone, since only that has counts.

- `sizes`: the `Form` that all ranks agree on, and the bytes of the buffers; `checks` makes one of
  what a caller gives, and `formula` tells the bytes beforehand.
- `plan`: which row a route gets, what is dropped, and what travels once.
- `leases`: which receive buffers are still read by a forward that is alive.
- `memory`: buffers that other ranks can write, here of one process; `files` maps them between CPU
  processes, `symmetric` between GPUs.
- `moves`: what is written where, in plain torch; `_triton.moves` is the same as kernels, and `impl`
  chooses.
- `buffers`: all of it that a dispatcher allocates, and the faults in the counts.
- `exchange`: the order of all this.
- `dispatcher` is one rank in each process, `virtual` all of them in one.
"""
