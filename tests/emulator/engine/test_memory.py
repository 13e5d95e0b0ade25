"""Loads, stores, atomics, cp.async and what happens outside the buffers."""

import numpy as np
import pytest

from rubin_moe.emulator import Device, EmulationError, load_ptx
from tests.emulator.engine.harness import module, run


def test_vector_loads_and_stores_of_every_width() -> None:
    for kind, dtype, count in [("b8", np.uint8, 4), ("b16", np.uint16, 4), ("b32", np.uint32, 4),
                               ("b32", np.uint32, 8), ("b64", np.uint64, 2),
                               ("b64", np.uint64, 4)]:  # fmt: skip
        letter = {"b8": "%h", "b16": "%h", "b32": "%r", "b64": "%d"}[kind]
        names = ", ".join(f"{letter}{j}" for j in range(count))
        swapped = ", ".join(f"{letter}{j}" for j in reversed(range(count)))
        size = np.dtype(dtype).itemsize * count
        body = f"""
         mov.u32 %i0, %tid.x; mul.wide.u32 %addr3, %i0, {size};
         ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b];
         add.s64 %addr1, %addr1, %addr3; add.s64 %addr2, %addr2, %addr3;
         ld.global.v{count}.{kind} {{{names}}}, [%addr1];
         st.global.v{count}.{kind} [%addr2], {{{swapped}}};"""
        source = np.random.default_rng(0).integers(0, 250, 64 * count).astype(dtype)
        # vector accesses need their natural alignment
        storage = np.zeros(source.nbytes * 2 + 128, np.uint8)
        start = -storage.ctypes.data % 64
        a = storage[start : start + source.nbytes].view(dtype)
        b = storage[start + source.nbytes : start + 2 * source.nbytes].view(dtype)
        a[:] = source
        run(module(body, ".param .u64 a, .param .u64 b"), [a, b], 1, 64)
        np.testing.assert_array_equal(b.reshape(-1, count), a.reshape(-1, count)[:, ::-1])


def test_narrow_loads_extend() -> None:
    body = """
     mov.u32 %i0, %tid.x; cvt.u64.u32 %addr3, %i0; ld.param.u64 %addr1, [a];
     add.s64 %addr1, %addr1, %addr3; ld.global.s8 %r0, [%addr1]; ld.global.u8 %r1, [%addr1];
     ld.param.u64 %addr2, [b]; mul.wide.u32 %addr3, %i0, 8; add.s64 %addr2, %addr2, %addr3;
     st.global.v2.b32 [%addr2], {%r0, %r1};"""
    a = np.arange(112, 144, dtype=np.uint8)
    b = np.zeros((32, 2), np.int32)
    run(module(body, ".param .u64 a, .param .u64 b"), [a, b])
    np.testing.assert_array_equal(b[:, 0], a.view(np.int8))
    np.testing.assert_array_equal(b[:, 1], a)


STORE_AT = """
 ld.param.u64 %addr1, [a]; ld.param.u32 %i1, [n]; mov.u32 %i0, %tid.x;
 mad.lo.u32 %i0, %i0, 4, %i1; cvt.s64.s32 %addr2, %i0; add.s64 %addr1, %addr1, %addr2;
 st.global.u32 [%addr1], %i0;"""


@pytest.mark.parametrize(
    ("offset", "lane", "fault"), [(4, 31, "outside"), (-4, 0, "outside"), (2, 0, "misaligned")]
)
def test_accesses_beyond_a_buffer_trap_with_lane_and_line(
    offset: int, lane: int, fault: str
) -> None:
    a = np.zeros(32, np.uint32)
    text = module(STORE_AT, ".param .u64 a, .param .u32 n")
    line = next(i for i, x in enumerate(text.split("\n"), 1) if "st.global" in x)
    with pytest.raises(EmulationError) as error:
        run(text, [a, offset])
    message = str(error.value)
    assert error.value.outcome == "trap"
    for part in (fault, f"lane {lane}", f"line {line}: st.global.u32", "warp 0", "CTA (0, 0, 0)"):
        assert part in message


def test_shared_memory_static_dynamic_and_its_bounds() -> None:
    head = ".extern .shared .align 128 .b8 dyn[];"
    body = """
     .shared .align 16 .b8 fixed[256];
     mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 2;
     mov.u32 %r1, fixed; mov.u32 %r2, dyn; add.u32 %r3, %r1, %i1; add.u32 %r4, %r2, %i1;
     st.shared.u32 [%r3], %i0; st.shared.u32 [%r4+0], %i1;
     bar.sync 0;
     xor.b32 %r5, %i1, 252; add.u32 %r6, %r1, %r5; add.u32 %r7, %r2, %r5;
     ld.shared.u32 %r8, [%r6]; ld.shared.u32 %r9, [%r7];
     ld.param.u64 %addr1, [a]; mul.wide.u32 %addr2, %i0, 8; add.s64 %addr1, %addr1, %addr2;
     st.global.v2.u32 [%addr1], {%r8, %r9};"""
    a = np.zeros((64, 2), np.uint32)
    text = module(body, ".param .u64 a", head=head)
    run(text, [a], 1, 64, dynamic_smem=256)
    np.testing.assert_array_equal(a[:, 0], np.arange(64)[::-1])
    np.testing.assert_array_equal(a[:, 1], 4 * np.arange(64)[::-1])
    with pytest.raises(EmulationError, match="shared-memory address outside"):
        run(text, [a], 1, 64, dynamic_smem=252)


def test_generic_addresses_reach_shared_and_local_memory() -> None:
    body = """
     .shared .align 8 .b8 s[128]; .local .align 8 .b8 frame[16];
     mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 2;
     mov.u64 %addr1, s; cvta.shared.u64 %addr1, %addr1;
     cvt.u64.u32 %addr2, %i1; add.s64 %addr1, %addr1, %addr2;
     st.u32 [%addr1], %i0; ld.u32 %r1, [%addr1];
     mov.u64 %addr3, frame; cvta.local.u64 %addr4, %addr3;
     mul.lo.u32 %r2, %r1, 3; st.local.u32 [%addr3+4], %r2; st.local.u32 [frame+8], %i0;
     ld.local.u32 %r3, [frame+4]; ld.local.u32 %r5, [%addr3+8]; add.u32 %r3, %r3, %r5;
     isspacep.shared %p1, %addr1; isspacep.local %p2, %addr4; and.pred %p1, %p1, %p2;
     selp.b32 %r3, %r3, 0, %p1;
     ld.param.u64 %addr5, [a]; add.s64 %addr5, %addr5, %addr2; st.global.u32 [%addr5], %r3;"""
    a = np.zeros(32, np.uint32)
    run(module(body, ".param .u64 a"), [a])
    np.testing.assert_array_equal(a, 4 * np.arange(32))


def test_param_arrays_and_module_variables() -> None:
    head = """.global .align 4 .u32 table[4] = {10, 20, 30, 40};
     .const .align 4 .b8 bytes[4] = {1, 2, 3, 4};"""
    body = """
     mov.u32 %i0, %tid.x; and.b32 %i1, %i0, 3; mul.wide.u32 %addr2, %i1, 4;
     mov.u64 %addr1, table; add.s64 %addr1, %addr1, %addr2; ld.global.u32 %r1, [%addr1];
     mov.u64 %addr3, bytes; cvt.u64.u32 %addr4, %i1; add.s64 %addr3, %addr3, %addr4;
     ld.const.u8 %r2, [%addr3];
     ld.param.v2.b32 {%r3, %r4}, [blob+8]; add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r4;
     ld.param.u64 %addr5, [a]; mul.wide.u32 %addr6, %i0, 4; add.s64 %addr5, %addr5, %addr6;
     st.global.u32 [%addr5], %r1;"""
    a = np.zeros(32, np.uint32)
    blob = np.array([0, 0, 5, 1000], np.uint32).tobytes()
    params = ".param .align 8 .b8 blob[16], .param .u64 a"
    run(module(body, params, head=head), [blob, a])
    lane = np.arange(32) % 4
    np.testing.assert_array_equal(a, 10 * (lane + 1) + lane + 1 + 1000)


@pytest.mark.parametrize(
    ("op", "start", "expected"),
    [
        ("add.u32", 0, 128 * 127 // 2), ("max.s32", -5, 127), ("min.s32", 99, 0),
        ("or.b32", 0, 127), ("xor.b32", 1, 1), ("and.b32", -1, 0), ("inc.u32", 0, None),
    ],
)  # fmt: skip
def test_atomics_of_all_ctas(op: str, start: int, expected: int | None) -> None:
    body = f"""
     mov.u32 %i0, %tid.x; mov.u32 %i1, %ctaid.x; mad.lo.u32 %i0, %i1, 32, %i0;
     ld.param.u64 %addr1, [a]; ld.param.u64 %addr2, [b];
     atom.relaxed.gpu.global.{op} %r1, [%addr1], %i0; red.global.{op} [%addr1+4], %i0;
     mul.wide.u32 %addr3, %i0, 4; add.s64 %addr2, %addr2, %addr3; st.global.u32 [%addr2], %r1;"""
    a = np.array([start, start], np.int32)
    b = np.zeros(128, np.int32)
    run(module(body, ".param .u64 a, .param .u64 b"), [a, b], 4)
    assert a[0] == a[1]
    if expected is not None:
        assert a[0] == expected
    if op == "add.u32":
        assert sorted(b) == sorted(np.concatenate([[0], np.cumsum(np.arange(127))]))


def test_compare_and_swap_elects_one_thread() -> None:
    body = """
     mov.u32 %i0, %tid.x; ld.param.u64 %addr1, [a];
     add.u32 %r2, %i0, 1; atom.global.cas.b32 %r1, [%addr1], 0, %r2;
     setp.eq.u32 %p1, %r1, 0; @%p1 atom.global.exch.b32 %r3, [%addr1+4], %r2;
     @%p1 red.global.add.f32 [%addr1+8], 0f3FC00000;"""
    a = np.zeros(3, np.uint32)
    run(module(body, ".param .u64 a"), [a], 1, 64)
    assert a[0] == a[1] == 1
    assert a[2:].view(np.float32)[0] == 1.5


def test_packed_half_reductions() -> None:
    body = """
     ld.param.u64 %addr1, [a]; mov.b32 %r1, 0x3F803F80; mov.b32 %r2, 0x3C003C00;
     red.global.add.noftz.bf16x2 [%addr1], %r1; red.global.add.noftz.f16x2 [%addr1+4], %r2;"""
    a = np.zeros(2, np.uint32)
    run(module(body, ".param .u64 a"), [a])
    assert a[0] == 0x42004200  # 32 in bfloat16
    assert a[1] == 0x50005000  # 32 in float16


def test_cp_async_fills_the_rest_with_zeros() -> None:
    body = """
     .shared .align 16 .b8 s[512];
     mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 4; mov.u32 %r1, s; add.u32 %r1, %r1, %i1;
     ld.param.u64 %addr1, [a]; cvt.u64.u32 %addr2, %i1; add.s64 %addr1, %addr1, %addr2;
     mov.b32 %r3, -1; st.shared.v4.b32 [%r1], {%r3, %r3, %r3, %r3};
     and.b32 %r2, %i0, 15; setp.eq.u32 %p1, %i0, 31; @%p1 mov.b32 %r2, 0;
     cp.async.cg.shared.global [%r1], [%addr1], 16, %r2; cp.async.commit_group;
     cp.async.wait_group 0; ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r1];
     ld.param.u64 %addr3, [b]; add.s64 %addr3, %addr3, %addr2;
     st.global.v4.b32 [%addr3], {%r4, %r5, %r6, %r7};"""
    storage = np.zeros(1024 + 64, np.uint8)
    start = -storage.ctypes.data % 16
    a, b = storage[start : start + 512], storage[start + 512 : start + 1024]
    a[:] = np.arange(512) % 251 + 1
    report = run(module(body, ".param .u64 a, .param .u64 b"), [a, b])
    keep = np.arange(32) % 16
    keep[31] = 0
    inside = np.arange(16) < keep[:, None]
    np.testing.assert_array_equal(b.reshape(32, 16), np.where(inside, a.reshape(32, 16), 0))
    assert report.bytes == {"cp.async": 512}


def test_launches_share_memory_and_buffers_can_be_withdrawn() -> None:
    body = "ld.param.u64 %addr1, [a]; red.global.add.u32 [%addr1], 1;"
    loaded = load_ptx(module(body, ".param .u64 a"))
    device = Device("sm_107a")
    a = np.zeros(1, np.uint32)
    for _ in range(3):
        device.launch(loaded, 2, 32, [a])
    assert a[0] == 192
    device.memory.unregister(a.ctypes.data)
    with pytest.raises(EmulationError, match="outside every registered buffer"):
        device.launch(loaded, 1, 32, [a.ctypes.data])
