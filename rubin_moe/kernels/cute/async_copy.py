"""Inline PTX of asynchronous copies and of warps that part: as `ptx`, one function an
instruction."""

from cutlass import Float32, Int32, Uint32
from cutlass.cute.arch import inline_ptx


def set_registers(count: int, more: bool):
    """The registers a thread of this warpgroup may use from here on."""
    inline_ptx(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")


def arrive_after_copies(bar):
    """One of the arrivals that ``bar`` was initialised with, once this thread's `cp_async_16`
    copies so far are complete."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[bar])


def copy_16(smem, address):
    """16 bytes past L1."""
    inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[smem, address])


def bulk_store(address, smem, nbytes):
    """Contiguous copy to global memory by the TMA unit, in this thread's open group."""
    inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[address, smem, nbytes],
    )


def bulk_commit():
    inline_ptx("cp.async.bulk.commit_group;")


def bulk_wait_read():
    """Until this thread's groups have read shared memory."""
    inline_ptx("cp.async.bulk.wait_group.read 0;")


def bulk_wait():
    """Until this thread's groups are complete."""
    inline_ptx("cp.async.bulk.wait_group 0;")


def store_matrices(address, registers):
    """Transposed: two or four 8 x 8 matrices of 16 bits, their rows where lanes 0 to 8 n - 1
    say."""
    number = len(registers)
    names = ", ".join(f"{{$r{i + 1}}}" for i in range(number))
    inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{number}.trans.shared.b16 [{{$r0}}], {{{names}}};",
        read_only_args=[address, *registers],
    )


def load_shared_v2_f32(address) -> list[Float32]:
    return list(
        inline_ptx(
            "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
            write_only_types=[Float32] * 2,
            read_only_args=[address],
        )
    )


def shuffle_xor(value, mask: int) -> Uint32:
    """The value of lane ^ mask."""
    return inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {mask}, 31, -1;",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def permute_bytes(low, high, selector) -> Uint32:
    """Bytes of two words by the selector's nibbles."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selector],
    )


def load_shared_v4_s32(address) -> list[Int32]:
    return list(
        inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def store_shared_v4(address, v):
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *v]
    )
