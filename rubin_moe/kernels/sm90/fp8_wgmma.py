"""``wgmma`` on E4M3, A from registers, and sums that leave the tensor core. Device code.

As `prefill_wgmma`: until the wait that covers a group nobody may touch its registers.
"""

from cutlass import Float32, Uint32
from cutlass.cute.arch import inline_ptx

from rubin_moe.kernels.cute import fp8
from rubin_moe.kernels.sm90.wgmma import HIGH_BITS, in_place, low_word

DEPTH = 2  # MMAs of 32 in a block of 64


def start_fp8(n: int, acc, a, tokens, accumulate):
    """Starts acc (+)= A B over 64 of K, one group.

    ``acc``: register tensor, its first ``n / 2`` floats; ``a``: A's 8 registers, four an MMA;
    ``tokens``: address of 64 of the 128 bytes of the first of ``n`` rows in shared memory, 128-byte
    swizzled; ``accumulate``: 0 where acc has nothing yet.
    """
    number = n // 2
    at = 2 * number + 4 * DEPTH
    d = ", ".join(f"${i}" for i in range(number))
    lines = [
        "{", ".reg .b32 low;", ".reg .b64 desc;", ".reg .pred add;",
        f"setp.ne.b32 add, ${at + 1}, 0;", "wgmma.fence.sync.aligned;",
    ]  # fmt: skip
    for j in range(DEPTH):
        registers = ", ".join(f"${2 * number + 4 * j + i}" for i in range(4))
        lines += [
            f"add.u32 low, ${at}, {2 * j};",
            f"mov.b64 desc, {{low, {HIGH_BITS}}};",
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{d}}}, "
            f"{{{registers}}}, desc, {'1' if j else 'add'}, 1, 1;",
        ]
    lines += ["wgmma.commit_group.sync.aligned;", "}"]
    others = [*(a[i] for i in range(4 * DEPTH)), low_word(tokens), accumulate]
    in_place(acc, number, lines, others)


def decode_word(word, table_low, table_high) -> list[Uint32]:
    """Eight codes of `layouts.fp4_hopper` (``fp8``) to registers of A: of row g, of row g + 8. A
    table is two registers, the eight magnitudes in E4M3."""
    signs = Uint32(0x80808080)
    selector = word & Uint32(0x77777777)
    low = fp8.look_up(table_low[0], table_low[1], selector)
    high = fp8.look_up(table_high[0], table_high[1], selector >> Uint32(16))
    return [low | (word & signs), high | ((word << Uint32(4)) & signs)]


def fold(total, acc, exponent: int):
    """total += acc / 2^exponent, two float16 a register."""
    factor = f"0f{(127 - exponent) << 23:08X}"
    text = (
        f"{{\n.reg .f32 x, y;\n.reg .b32 t;\nmul.f32 x, {{$r1}}, {factor};\n"
        f"mul.f32 y, {{$r2}}, {factor};\ncvt.rn.f16x2.f32 t, y, x;\n"
        "add.rn.f16x2 {$w0}, {$r0}, t;\n}"
    )
    return inline_ptx(text, write_only_types=[Uint32], read_only_args=[total, *acc])


def unfold(total, acc, exponent: int) -> list[Float32]:
    """acc + total 2^exponent, of the register's two sums."""
    factor = f"0f{(127 + exponent) << 23:08X}"
    text = (
        "{\n.reg .b16 l, h;\n.reg .f32 x, y;\nmov.b32 {l, h}, {$r0};\n"
        "cvt.f32.f16 x, l;\ncvt.f32.f16 y, h;\n"
        f"fma.rn.f32 {{$w0}}, x, {factor}, {{$r1}};\nfma.rn.f32 {{$w1}}, y, {factor}, {{$r2}};\n}}"
    )
    return list(inline_ptx(text, write_only_types=[Float32] * 2, read_only_args=[total, *acc]))
