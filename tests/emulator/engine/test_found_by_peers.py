"""Faults of the emulator that kernels of others showed, each in the smallest kernel that does."""

from __future__ import annotations

import numpy as np
import pytest

from rubin_moe.emulator import load_ptx
from rubin_moe.emulator.isa.bulk_copy import decode_tensor_load

from ..units.machine import tensor_map
from .harness import module, run


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("ignored", "expected"), [(0, 0x11223344), (1, 0)])
def test_cp_async_may_ignore_its_source(ignored: int, expected: int, seed: int | None) -> None:
    """The fourth operand is a predicate; an ignored source may lie outside every buffer."""
    source, out = np.full(1, 0x11223344, np.uint32), np.zeros(1, np.uint32)
    body = f"""
 ld.param.u64 %addr0, [source]; ld.param.u64 %addr1, [out];
 add.u64 %addr0, %addr0, {4096 * ignored};
 setp.eq.b32 %p1, {ignored}, 1;
 mov.b32 %r0, word; mov.b32 %r1, 0xDEADBEEF; st.shared.b32 [%r0], %r1;
 cp.async.ca.shared.global [%r0], [%addr0], 4, %p1;
 cp.async.wait_all;
 ld.shared.b32 %r2, [%r0]; st.global.b32 [%addr1], %r2;"""
    head = ".shared .align 16 .b8 word[16];"
    run(
        module(body, ".param .u64 source, .param .u64 out", head=head),
        [source, out],
        block=1,
        seed=seed,
    )
    assert out[0] == expected


def test_address_of_a_parameter_through_32_bits() -> None:
    """Triton takes the generic address of a parameter from a 32-bit register."""
    out = np.zeros(1, np.uint32)
    body = """
 ld.param.u64 %addr1, [out];
 mov.b32 %r0, blob; cvt.u64.u32 %addr0, %r0; cvta.param.u64 %addr0, %addr0;
 ld.b32 %r1, [%addr0+8]; st.global.b32 [%addr1], %r1;"""
    params = ".param .u64 out, .param .align 64 .b8 blob[128]"
    blob = np.arange(32, dtype=np.uint32)
    run(module(body, params), [out, blob.tobytes()], block=1)
    assert out[0] == 2


def test_parameters_with_pointer_attributes_keep_their_names() -> None:
    text = module(
        " ld.param.b64 %addr0, [first]; ld.param.b64 %addr1, [second];",
        ".param .u64 .ptr .global .align 1 first, .param .u64 .ptr .align 16 second",
    )
    assert [param.name for param in load_ptx(text).entry().compiled.params] == ["first", "second"]


def test_tensor_memory_address_without_a_quarter_means_the_warps_own() -> None:
    """Rubin FC1's scale warps store, each to its quarter, at one address with lane 0."""
    out = np.zeros(128, np.uint32)
    body = """
 mov.u32 %i0, %tid.x; shr.u32 %i1, %i0, 5; ld.param.u64 %addr0, [out];
 mov.b32 %r0, base; setp.eq.u32 %p1, %i1, 0;
 @!%p1 bra STORED_BASE;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;
STORED_BASE:
 bar.sync 0; ld.shared.b32 %r1, [%r0];
 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%i0}; tcgen05.wait::st.sync.aligned;
 bar.sync 0;
 shl.b32 %r2, %i1, 21; add.u32 %r3, %r1, %r2;
 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r3]; tcgen05.wait::ld.sync.aligned;
 mul.wide.u32 %addr1, %i0, 4; add.u64 %addr0, %addr0, %addr1; st.global.b32 [%addr0], %r4;
 bar.sync 0;
 @!%p1 bra DONE;
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
DONE:"""
    head = ".shared .align 16 .b8 base[16];"
    run(module(body, ".param .u64 out", head=head), [out], block=128)
    assert np.array_equal(out, np.arange(128))


@pytest.mark.parametrize(("code", "packed"), [(12, 1024), (13, 1536)])
def test_mbarrier_counts_padded_elements_as_they_are_packed(code: int, packed: int) -> None:
    """128 x 16 elements of 4 and 6 bits take a byte each in shared memory."""
    row_bytes = 128 * packed // 2048
    raw = tensor_map(1 << 20, code, (128, 16), (row_bytes,), (128, 16), 128)
    load = decode_tensor_load(raw, (0, 0), 0x400, 8)
    assert load.nbytes == 2048
    assert load.signals == ((0, 8, packed),)


def test_fences_with_restricted_synchronisation_load() -> None:
    fences = """
 fence.release.sync_restrict::shared::cta.cluster;
 fence.acquire.sync_restrict::shared::cluster.cluster;"""
    run(module(fences), [])
