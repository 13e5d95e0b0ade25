"""``wgmma`` that runs while its warpgroup prepares the next one. Device code.

MMAs read A's registers and write accumulators until the `wait` that covers them. Until then nobody
may touch either: accumulators are operands in place, and the caller has two sets of A. The
assembler knows both where waits can be matched to products; that it does, in the kernels that it
made, is read from their machine code (tests/kernels/sm90/test_prefill_sass.py).
"""

import cutlass

from rubin_moe.kernels.sm90.wgmma import DEPTH, HIGH_BITS, in_place, low_word


def start_block(kind: str, n: int, acc, a, tokens):
    """Starts acc += A B over 64 of K, one group.

    ``acc``: register tensor, ``n / 2`` floats; ``a``: A's 16 registers, four an MMA; ``tokens``:
    address of ``[n, 64]`` 16-bit elements in shared memory, 128-byte swizzled.
    """
    number = n // 2
    d = ", ".join(f"${i}" for i in range(number))
    lines = ["{", ".reg .b32 low;", ".reg .b64 desc;", "wgmma.fence.sync.aligned;"]
    for j in range(DEPTH):
        registers = ", ".join(f"${2 * number + 4 * j + i}" for i in range(4))
        lines += [
            f"add.u32 low, ${2 * number + 4 * DEPTH}, {2 * j};",
            f"mov.b64 desc, {{low, {HIGH_BITS}}};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, "
            f"{{{registers}}}, desc, 1, 1, 1, 0;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    in_place(acc, number, lines, [*(a[i] for i in range(4 * DEPTH)), low_word(tokens)])


def wait(pending: int):
    """Until at most ``pending`` of the groups are incomplete."""
    cutlass.cute.arch.inline_ptx(f"wgmma.wait_group.sync.aligned {pending};")
