"""Inline PTX of tensor memory and the fifth-generation tensor cores, one function an instruction.

Addresses are 32-bit integers: lane in the upper half, column in the lower. ``group`` is the number
of CTAs that an instruction is for.
"""

from cutlass import Uint32
from cutlass.cute.arch import inline_ptx


def alloc(slot, columns: int, group: int = 1):
    """Whole warp, in both CTAs of a pair; the address appears in shared memory at ``slot``. More
    than 512 columns are to be had alone (sm_107a)."""
    form = f"tcgen05.alloc{'.exclusive' if columns > 512 else ''}.cta_group::{group}"
    inline_ptx(
        f"{form}.sync.aligned.shared::cta.b32 [{{$r0}}], {columns};",
        read_only_args=[slot],
    )


def relinquish(group: int = 1):
    inline_ptx(f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;")


def dealloc(address, columns: int, group: int = 1):
    form = f"tcgen05.dealloc{'.exclusive' if columns > 512 else ''}.cta_group::{group}"
    inline_ptx(
        f"{form}.sync.aligned.b32 {{$r0}}, {columns};",
        read_only_args=[address],
    )


def fence_after():
    inline_ptx("tcgen05.fence::after_thread_sync;")


def fence_before():
    inline_ptx("tcgen05.fence::before_thread_sync;")


def commit(bar, group: int = 1):
    """``bar``, in both CTAs of a pair, gets one arrival when all this thread's tcgen05 operations
    so far are complete."""
    if group == 1:
        inline_ptx(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
            read_only_args=[bar],
        )
    else:
        inline_ptx(
            "{\n.reg .b16 pair;\nmov.b16 pair, 3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::"
            "one.shared::cluster.multicast::cluster.b64 [{$r0}], pair;\n}",
            read_only_args=[bar],
        )


def copy_scales(taddr, sdesc, group: int = 1):
    """One chunk of 128 rows x 4 scales, to all four lane quarters; each CTA of a pair its own."""
    inline_ptx(
        f"tcgen05.cp.cta_group::{group}.32x128b.warpx4 [{{$r0}}], {{$r1}};",
        read_only_args=[taddr, sdesc],
    )


def mma_scaled(form: str, d, a_desc, b_desc, idesc, sfa, sfb, accumulate, group: int = 1):
    """Block-scaled product; ``form``: kind and elements a scale, such as ``mxf4nvf4.block16``."""
    kind, block = form.split(".")
    inline_ptx(
        "{\n.reg .pred acc;\nsetp.ne.b32 acc, {$r6}, 0;\n"
        f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale.{block} "
        "[{$r0}], {$r1}, {$r2}, {$r3}, [{$r4}], [{$r5}], acc;\n}",
        read_only_args=[d, a_desc, b_desc, idesc, sfa, sfb, accumulate],
    )


def load(shape: str, count: int, taddrs, registers: int) -> list[Uint32]:
    """One ``tcgen05.ld`` from each address, ``registers`` values each, and the wait for them.

    One block of text, so that no use of a value can be moved above the wait.
    """
    lines = []
    for a in range(len(taddrs)):
        names = ", ".join(f"{{$w{a * registers + i}}}" for i in range(registers))
        lines.append(f"tcgen05.ld.sync.aligned.{shape}.x{count}.b32 {{{names}}}, [{{$r{a}}}];")
    out = inline_ptx(
        "\n".join([*lines, "tcgen05.wait::ld.sync.aligned;"]),
        write_only_types=[Uint32] * (registers * len(taddrs)),
        read_only_args=list(taddrs),
    )
    return list(out)


def store(shape: str, count: int, taddrs, values: list[Uint32]):
    """One ``tcgen05.st`` to each address, the values shared out in order, and the wait for them."""
    each = len(values) // len(taddrs)
    lines = []
    for a in range(len(taddrs)):
        first = len(taddrs) + a * each
        names = ", ".join(f"{{$r{first + i}}}" for i in range(each))
        lines.append(f"tcgen05.st.sync.aligned.{shape}.x{count}.b32 [{{$r{a}}}], {{{names}}};")
    inline_ptx(
        "\n".join([*lines, "tcgen05.wait::st.sync.aligned;"]),
        read_only_args=[*taddrs, *values],
    )
