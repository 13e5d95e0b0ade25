"""``wgmma`` with weights in registers and accumulators that stay where they are. Device code."""

from cutlass import Float32, Uint32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

DEPTH = 4  # MMAs of 16 in a block of 64
HIGH_BITS = 0x40000040  # of a descriptor: 128-byte swizzle, eight rows are 1024 bytes
LOW_BITS = 1 << 16


def multiply_block(kind: str, n: int, chains: int, acc, a, tokens):
    """acc += A B over 64 of K, MMA ``j`` to chain ``j % chains``; complete afterwards.

    It waits because MMAs read A's registers long after they were issued, and the compiler, which
    does not know, puts the next block's values there. Other warpgroups fill the time.

    ``acc``: register tensor, ``chains`` x ``n / 2`` floats; ``a``: A's registers, four an MMA;
    ``tokens``: address of ``[n, 64]`` 16-bit elements in shared memory, 128-byte swizzled.
    """
    each = n // 2
    number = each * chains
    registers = [f"${number + number + i}" for i in range(4 * DEPTH)]
    lines = ["{", ".reg .b32 low;", ".reg .b64 desc;", "wgmma.fence.sync.aligned;"]
    for j in range(DEPTH):
        d = ", ".join(f"${each * (j % chains) + i}" for i in range(each))
        lines += [
            f"add.u32 low, ${2 * number + 4 * DEPTH}, {2 * j};",
            f"mov.b64 desc, {{low, {HIGH_BITS}}};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{d}}}, "
            f"{{{', '.join(registers[4 * j : 4 * j + 4])}}}, desc, 1, 1, 1, 0;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    in_place(acc, number, lines, [*(v for four in a for v in four), low_word(tokens)])


def low_word(tokens):
    """Of the descriptor of rows at an address in shared memory."""
    return (Uint32(tokens) >> Uint32(4)) | Uint32(LOW_BITS)


def in_place(acc, number: int, lines: list[str], registers):
    """One piece of PTX whose first operands are ``number`` of ``acc``'s registers, read and
    written, each with one operand; then come ``registers``."""
    values = [Float32(acc[i]).ir_value() for i in range(number)]
    values += [Uint32(r).ir_value() for r in registers]
    constraints = ["=f"] * number + [str(i) for i in range(number)] + ["r"] * len(registers)
    f32 = ir.F32Type.get()
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * number), values, "\n".join(lines),
        ",".join(constraints), has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
    for i in range(number):
        acc[i] = Float32(llvm.extractvalue(f32, result, [i]))
