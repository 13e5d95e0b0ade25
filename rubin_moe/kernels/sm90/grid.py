"""A barrier of some of a grid's blocks in two halves, for one thread of each. Device code.

All of them together add 2^31 to the counter: when its top bit has turned, all are here. It never
has to be set back.
"""

import cutlass.cute as cute
from cutlass import Int32

from rubin_moe.kernels.cute import ptx


@cute.jit
def arrive(counter, first, blocks) -> Int32:
    """What this block wrote is seen by those that wait; ``first`` is true of one of ``blocks``.
    The counter's value before, for `wait`."""
    rest = Int32(-(2**31)) - (blocks - 1)
    return ptx.fetch_add_release(counter, rest if first else Int32(1))


@cute.jit
def wait(counter, old):
    """Until all blocks have arrived."""
    seen = ptx.load_acquire(counter)
    while (seen ^ old) >= 0:
        seen = ptx.load_acquire(counter)
