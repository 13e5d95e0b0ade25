"""Inline PTX by which the lanes of a warp agree, one function an instruction."""

from cutlass import Int32, Uint32
from cutlass.cute.arch import inline_ptx


def ballot(condition) -> Uint32:
    """Mask of the warp's lanes whose 32 bits are not negative."""
    return inline_ptx(
        "{\n.reg .pred p;\nsetp.ge.s32 p, {$r0}, 0;\nvote.sync.ballot.b32 {$w0}, p, -1;\n}",
        write_only_types=[Uint32],
        read_only_args=[condition],
    )


def fetch_add(address, value) -> Int32:
    """Atomic, orders nothing; the value before."""
    return inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, value],
    )
