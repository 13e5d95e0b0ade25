"""Inline PTX that the kernels are made of, one function an instruction.

Addresses in shared and tensor memory are 32-bit integers, global addresses 64-bit ones: the kernels
do their own address arithmetic, so what a function emits is what its name says.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32
from cutlass.cute.arch import inline_ptx

WAIT = """{
.reg .pred done;
WAIT_LOOP:
mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};
@!done bra WAIT_LOOP;
}"""


def smem_base() -> Int32:
    """Address of dynamic shared memory, aligned to 1024 bytes."""
    return Int32(cute.arch.get_dyn_smem(Uint8, 1024).toint())


# ---- mbarriers and fences


def mbarrier_init(bar, arrivals):
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[bar, arrivals])


def mbarrier_init_fence():
    inline_ptx("fence.mbarrier_init.release.cluster;")


def mbarrier_wait(bar, parity):
    """Returns once the phase of that parity is complete."""
    inline_ptx(WAIT, read_only_args=[bar, parity])


def mbarrier_wait_cluster(bar, parity):
    """As `mbarrier_wait`, and sees what other CTAs of the cluster did before they arrived."""
    inline_ptx(
        WAIT.replace(".parity.shared", ".parity.acquire.cluster.shared"),
        read_only_args=[bar, parity],
    )


def mbarrier_arrive(bar):
    inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[bar])


def mbarrier_arrive_at(bar, rank):
    """At the barrier of the same address in CTA ``rank`` of the cluster."""
    inline_ptx(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, {$r0}, {$r1};\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}",
        read_only_args=[bar, rank],
    )


def mbarrier_arrive_expect_tx(bar, nbytes):
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[bar, nbytes],
    )


def fence_proxy_async():
    """Orders this thread's own writes to shared memory before reads by TMA, tcgen05."""
    inline_ptx("fence.proxy.async.shared::cta;")


def cluster_sync():
    """Every thread of the cluster; orders what they did before."""
    inline_ptx("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;")


def cluster_rank() -> Int32:
    """Of this CTA in its cluster."""
    return Int32(cute.arch.block_idx_in_cluster())


def barrier_sync(index: int, threads: int):
    inline_ptx(f"bar.sync {index}, {threads};")


# ---- global memory


def load_s32(address) -> Int32:
    return inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_f32(address) -> Float32:
    return inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_f32(address, value):
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_v2_b32(address, low, high):
    inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, low, high])


def store_b32(address, value):
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_v4_b32(address, v):
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *v]
    )


def store_b8(address, value):
    """The low byte of a 32-bit register."""
    inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[address, value])


def add_f32(address, value):
    """Atomic, no return."""
    inline_ptx("red.global.add.f32 [{$r0}], {$r1};", read_only_args=[address, value])


# ---- copies to shared memory


def bulk_load(smem, address, nbytes, bar):
    """Contiguous copy by the TMA unit; its bytes are counted at ``bar``."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[smem, address, nbytes, bar],
    )


def cp_async_16(smem, address, valid_bytes):
    """16 bytes past L1; bytes from ``valid_bytes`` on are zero."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[smem, address, valid_bytes],
    )


def cp_async_4(smem, address, valid_bytes):
    inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[smem, address, valid_bytes],
    )


def cp_async_commit():
    inline_ptx("cp.async.commit_group;")


def cp_async_wait(pending: int):
    """Until at most ``pending`` of this thread's groups are incomplete."""
    inline_ptx(f"cp.async.wait_group {pending};")


# ---- arithmetic


def as_f32(bits) -> Float32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def as_u32(value) -> Uint32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def exp2_approx(x) -> Float32:
    return inline_ptx(
        "ex2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def rcp_approx(x) -> Float32:
    return inline_ptx(
        "rcp.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def div_u32(x, y) -> Int32:
    """Quotient of numbers that are not negative; ``//`` on signed ones also rounds down."""
    return inline_ptx(
        "div.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[x, y]
    )


def div(x, y) -> Float32:
    """Correctly rounded."""
    return inline_ptx(
        "div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


def fma(x, y, z) -> Float32:
    """x y + z, rounded once."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[x, y, z],
    )


def encode_scale(value, ue5m3: bool) -> Uint32:
    """A block scale's code: UE5M3 rounded up, UE4M3 to nearest even; both saturate."""
    form = "cvt.rp.satfinite.ue5m3x2.f32" if ue5m3 else "cvt.rn.satfinite.e4m3x2.f32"
    return inline_ptx(
        f"{{\n.reg .b16 t;\n.reg .f32 zero;\nmov.f32 zero, 0f00000000;\n"
        f"{form} t, zero, {{$r0}};\ncvt.u32.u16 {{$w0}}, t;\n}}",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def encode_e2m1x8(v: list[Float32]) -> Uint32:
    """Eight elements to four bytes, the first in the lowest nibble."""
    cvt = "\n".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
    )
    return inline_ptx(
        f"{{\n.reg .b8 b0, b1, b2, b3;\n{cvt}\nmov.b32 {{$w0}}, {{b0, b1, b2, b3}};\n}}",
        write_only_types=[Uint32],
        read_only_args=list(v),
    )


# ---- warps: matrix fragments, shared vectors, shuffles


def load_shared_v4(address) -> list[Uint32]:
    return list(
        inline_ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Uint32] * 4,
            read_only_args=[address],
        )
    )


def load_shared_v4_f32(address) -> list[Float32]:
    return list(
        inline_ptx(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )


def load_shared_u16(address) -> Uint32:
    return inline_ptx(
        "{\n.reg .b16 t;\nld.shared.u16 t, [{$r0}];\ncvt.u32.u16 {$w0}, t;\n}",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


def store_shared_b32(address, value):
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_shared_s32(address) -> Int32:
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_shared_f32(address) -> Float32:
    return inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_shared_v4_f32(address, v):
    inline_ptx(
        "st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *v]
    )


def barrier_sync_at(index, threads: int):
    """A named barrier whose number is known at run time only."""
    inline_ptx(f"bar.sync {{$r0}}, {threads};", read_only_args=[index])


def shuffle_up(value, distance: int) -> Int32:
    """The value of the lane ``distance`` below; lanes without one get their own."""
    return inline_ptx(
        f"shfl.sync.up.b32 {{$w0}}, {{$r0}}, {distance}, 0, -1;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def shuffle_xor_f32(value, mask: int) -> Float32:
    """The value of lane ^ mask."""
    return inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {mask}, 31, -1;",
        write_only_types=[Float32],
        read_only_args=[value],
    )


def broadcast(value, lane: int) -> Int32:
    """One lane's value to its whole warp."""
    return inline_ptx(
        f"shfl.sync.idx.b32 {{$w0}}, {{$r0}}, {lane}, 31, -1;",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def broadcast_f32(value, lane: int) -> Float32:
    return inline_ptx(
        f"shfl.sync.idx.b32 {{$w0}}, {{$r0}}, {lane}, 31, -1;",
        write_only_types=[Float32],
        read_only_args=[value],
    )


def mma_m16n8k16(kind: str, c, a, b0, b1) -> list[Float32]:
    """c + a b: 16 rows x 8 tokens, ``bf16`` or ``f16``; c four values, a four registers."""
    return list(
        inline_ptx(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, "
            "{{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, b0, b1, *c],
        )
    )


def mul_x2(kind: str, x, y) -> Uint32:
    """Two ``bf16`` or ``f16`` products."""
    return inline_ptx(
        f"mul.rn.{kind}x2 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[x, y],
    )


def rotate_left(x, bits: int) -> Uint32:
    return inline_ptx(
        f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {bits};",
        write_only_types=[Uint32],
        read_only_args=[x],
    )


def select_bytes(x, selector: int) -> Uint32:
    """Bytes of x by the selector's nibbles; nibbles 4 to 7 give zero."""
    return inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector};",
        write_only_types=[Uint32],
        read_only_args=[x],
    )


def pack_x2(kind: str, low, high) -> Uint32:
    """Two floats as ``bf16`` or ``f16``, to nearest even."""
    return inline_ptx(
        f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


# ---- between blocks


def store_b16(address, value):
    """The low half of a 32-bit register."""
    inline_ptx(
        "{\n.reg .b16 t;\ncvt.u16.u32 t, {$r1};\nst.global.b16 [{$r0}], t;\n}",
        read_only_args=[address, value],
    )


def store_s32(address, value):
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def load_v4_f32_cg(address) -> list[Float32]:
    """16 bytes past L1."""
    return list(
        inline_ptx(
            "ld.global.cg.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )


def load_acquire(address) -> Int32:
    return inline_ptx(
        "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def add_release(address, value):
    """Orders this thread's earlier accesses, and those it has seen, before the atomic addition."""
    inline_ptx(
        "fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [{$r0}], {$r1};",
        read_only_args=[address, value],
    )


def fetch_add_release(address, value) -> Int32:
    """As `add_release`; the value before the addition."""
    return inline_ptx(
        "fence.acq_rel.gpu;\natom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, value],
    )


def launch_dependents():
    """The next launch of the stream may start; it sees nothing of this one before its own wait."""
    inline_ptx("griddepcontrol.launch_dependents;")


def wait_for_launches_before():
    """Until the launches before this one are over and their writes are seen."""
    inline_ptx("griddepcontrol.wait;")


def fence_proxy_async_all():
    """Orders ordinary accesses to any memory before the TMA unit's."""
    inline_ptx("fence.proxy.async;")


def minimum(x, y) -> Float32:
    """NaN if either is."""
    return inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


def maximum(x, y) -> Float32:
    """NaN if either is."""
    return inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


# ---- lanes with equal values


def match_any(value) -> Uint32:
    """Mask of the warp's lanes that hold the same 32 bits."""
    return inline_ptx(
        "match.any.sync.b32 {$w0}, {$r0}, -1;", write_only_types=[Uint32], read_only_args=[value]
    )


def count_ones(x) -> Int32:
    return inline_ptx("popc.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def store_shared_b16(address, value):
    """The low half of a 32-bit register."""
    inline_ptx(
        "{\n.reg .b16 t;\ncvt.u16.u32 t, {$r1};\nst.shared.b16 [{$r0}], t;\n}",
        read_only_args=[address, value],
    )


def warp_max_u32(x) -> Uint32:
    return inline_ptx(
        "redux.sync.max.u32 {$w0}, {$r0}, -1;", write_only_types=[Uint32], read_only_args=[x]
    )


def warp_min_u32(x) -> Uint32:
    return inline_ptx(
        "redux.sync.min.u32 {$w0}, {$r0}, -1;", write_only_types=[Uint32], read_only_args=[x]
    )


def load_half_as_f32(kind: str, address) -> Float32:
    """A ``bf16`` or ``f16`` of global memory."""
    return inline_ptx(
        f"{{\n.reg .b16 t;\nld.global.b16 t, [{{$r0}}];\ncvt.f32.{kind} {{$w0}}, t;\n}}",
        write_only_types=[Float32],
        read_only_args=[address],
    )
