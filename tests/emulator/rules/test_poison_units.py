"""Poison through tensor memory, matrix instructions and copies.

The oracle of the matrix units does not know about shadows: an element is poisoned where changing
the byte that nothing wrote can change the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rubin_moe.emulator import EmulationError
from rubin_moe.emulator.isa import bulk_copy, mma_sync, shadow_ops, tcgen05_data, tcgen05_mma, wgmma
from rubin_moe.emulator.state.shadow import ClusterShadow
from tests.emulator.engine.harness import module, run
from tests.emulator.units.machine import (
    FakeCluster,
    GlobalBytes,
    block_scaled_idesc,
    multiplied,
    plain_idesc,
    put_k_major,
    smem_desc,
    tensor_map,
)

A_AT, B_AT, SFA_AT, SFB_AT = 0, 0x10000, 256, 320
SMEM = 1 << 17


def defined_shadow(ctas: int = 1) -> ClusterShadow:
    shadow = ClusterShadow(ctas, SMEM, tensor_memory=True)
    for rank in range(ctas):
        shadow.smem(rank).fill(0)
        shadow.tmem(rank).fill(0)
    return shadow


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma: operands of `decode_mma`, CTAs, N, bytes of a row of A and B."""

    operands: dict
    ctas: int
    n: int
    row_bytes: int
    scales: int


PRODUCTS = {
    "nvfp4": Product(
        {
            "arch": "sm_107a", "kind": "mxf4nvf4", "sf_vec": 16, "sfa": SFA_AT, "sfb": SFB_AT,
            "idesc": block_scaled_idesc("mxf4nvf4", 128, 48) | 1 << 3, "cta_group": 1,
        }, 1, 48, 64, 8,
    ),
    "nvfp4 pair": Product(
        {
            "arch": "sm_107a", "kind": "mxf4nvf4", "sf_vec": 16, "sfa": SFA_AT, "sfb": SFB_AT,
            "idesc": block_scaled_idesc("mxf4nvf4", 256, 64) | 1 << 3, "cta_group": 2,
        }, 2, 64, 64, 8,
    ),
    "mxf8f6f4": Product(
        {
            "arch": "sm_100a", "kind": "mxf8f6f4", "sf_vec": 32, "sfa": SFA_AT, "sfb": SFB_AT,
            "idesc": block_scaled_idesc("mxf8f6f4", 128, 48, scale=1), "cta_group": 1,
        }, 1, 48, 32, 1,
    ),
    "f16": Product(
        {"arch": "sm_100a", "kind": "f16", "idesc": plain_idesc("f16", 128, 16), "cta_group": 1},
        1, 16, 32, 0,
    ),
    "f16 M=64": Product(
        {"arch": "sm_100a", "kind": "f16", "idesc": plain_idesc("f16", 64, 16), "cta_group": 1},
        1, 16, 32, 0,
    ),
}  # fmt: skip


def fill(cluster: FakeCluster, product: Product, rng: np.random.Generator) -> dict:
    """Operands in which no element of A, B or a scale is zero or not finite."""
    for rank in range(product.ctas):
        for at, count in ((A_AT, 128), (B_AT, product.n // product.ctas)):
            data = rng.choice(np.array([0x22, 0x33, 0x35], np.uint8), (count, product.row_bytes))
            put_k_major(cluster.smem(rank), at, data, max(product.row_bytes, 32))
        cluster.tmem(rank)[:, SFA_AT:] = 0x38383838 if product.scales == 8 else 0x7F7F7F7F
    swizzle = max(product.row_bytes, 32)
    descriptors = {
        "a": smem_desc(A_AT, 16, 8 * swizzle, swizzle),
        "b": smem_desc(B_AT, 16, 8 * swizzle, swizzle),
    }
    return {"rank": 0, "d": 0, "enable_input_d": False, **product.operands, **descriptors}


def result(cluster: FakeCluster, op: tcgen05_mma.Tcgen05Mma, product: Product) -> np.ndarray:
    """D of all CTAs, uint32 [CTAs, 128, N]."""
    tcgen05_mma.perform(op, cluster)
    return np.stack([cluster.tmem(rank)[:, : product.n].copy() for rank in range(product.ctas)])


def places(product: Product, rng: np.random.Generator) -> list[tuple[str, int, int, int]]:
    """Some bytes of every operand: memory, rank, index (lane and column), byte."""
    out = []
    rows = 64 if product.row_bytes == 32 and not product.scales else 128
    for _ in range(3):
        rank = int(rng.integers(product.ctas))
        out.append(("smem", rank, A_AT + int(rng.integers(rows * product.row_bytes)), 0))
        size = product.n // product.ctas * product.row_bytes
        out.append(("smem", rank, B_AT + int(rng.integers(size)), 0))
    if product.scales:
        for at, count in ((SFA_AT, 128), (SFB_AT, product.n)):
            row, byte = int(rng.integers(count)), int(rng.integers(min(product.scales, 4)))
            out.append(
                ("tmem", int(rng.integers(product.ctas)), (at + row // 32) << 8 | row % 32, byte)
            )
    return out


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_depends_on_an_undefined_byte_of_an_mma_is_poisoned(name: str) -> None:
    product = PRODUCTS[name]
    rng = np.random.default_rng(len(name))
    cluster = FakeCluster(product.ctas, SMEM)
    op = tcgen05_mma.decode_mma(**fill(cluster, product, rng))
    before = result(cluster, op, product)
    for space, rank, index, byte in places(product, rng):
        shadow = defined_shadow(product.ctas)
        if space == "smem":
            shadow.smem(rank)[index] = 0xFF
            cluster.smem(rank)[index] ^= 0x11
            changed = result(cluster, op, product) != before
            cluster.smem(rank)[index] ^= 0x11
        else:
            lane, column = index & 255, index >> 8
            shadow.tmem(rank)[lane, column] = np.uint32(0xFF << 8 * byte)
            lanes = np.arange(lane, 128, 32)  # every quarter has its copy of a scale
            cluster.tmem(rank)[lanes, column] ^= np.uint32(8 << 8 * byte)
            changed = result(cluster, op, product) != before
            cluster.tmem(rank)[lanes, column] ^= np.uint32(8 << 8 * byte)
        shadow_ops.multiply(op, shadow)
        poisoned = np.stack([shadow.tmem(r)[:, : product.n] != 0 for r in range(product.ctas)])
        np.testing.assert_array_equal(poisoned, changed)
        assert poisoned.any()


def test_an_accumulator_keeps_its_poison_until_it_is_overwritten() -> None:
    product = PRODUCTS["nvfp4"]
    cluster, shadow = FakeCluster(1, SMEM), defined_shadow()
    operands = fill(cluster, product, np.random.default_rng(1))
    shadow.tmem(0)[7, 5] = 0xFF
    shadow_ops.multiply(tcgen05_mma.decode_mma(**operands | {"enable_input_d": True}), shadow)
    assert np.argwhere(shadow.tmem(0)[:, :48]).tolist() == [[7, 5]]
    shadow_ops.multiply(tcgen05_mma.decode_mma(**operands), shadow)
    assert not shadow.tmem(0)[:, :48].any()


def test_lanes_whose_output_is_disabled_keep_their_poison() -> None:
    product = PRODUCTS["f16"]
    operands = fill(FakeCluster(1, SMEM), product, np.random.default_rng(1))
    for disabled, kept in (((0, 0, 0, 0), []), ((0, 1 << 3, 0, 0), [35])):
        shadow = defined_shadow()
        shadow.tmem(0)[:] = 0xFF
        op = tcgen05_mma.decode_mma(**operands | {"disable_output_lane": disabled})
        shadow_ops.multiply(op, shadow)
        assert np.flatnonzero(shadow.tmem(0)[:, 0]).tolist() == kept


def test_a_collector_keeps_the_poison_that_it_was_filled_with() -> None:
    product = PRODUCTS["nvfp4"]
    shadow = defined_shadow()
    operands = fill(FakeCluster(1, SMEM), product, np.random.default_rng(1))
    shadow.smem(0)[A_AT] = 0xFF
    for usage in ("fill", "use"):
        op = tcgen05_mma.decode_mma(**operands | {"collector_a": usage})
        shadow_ops.multiply(op, shadow)
        assert np.flatnonzero(shadow.tmem(0)[:, 0]).tolist() == [0]
        shadow.smem(0)[A_AT] = 0


def test_mma_sync_and_wgmma_poison_what_depends_on_a_register() -> None:
    rng = np.random.default_rng(3)
    op = mma_sync.decode_mma_sync("m16n8k16", "f32", "f16", "f16", "f32")
    a, b = (rng.choice(np.array([0x3C003C00, 0x40003C00], np.uint32), (k, 32)) for k in (4, 2))
    c = np.full((4, 32), 0x3F800000, np.uint32)
    before = op.multiply(a, b, c)
    for which, sources in enumerate((a, b, c)):
        register, lane = int(rng.integers(len(sources))), int(rng.integers(32))
        masks = [np.zeros(len(s), np.uint32) for s in (a, b, c)]
        masks[which][register] = 1 << lane
        sources[register, lane] ^= 0x00400040 if which < 2 else 0x400000
        changed = op.multiply(a, b, c) != before
        sources[register, lane] ^= 0x00400040 if which < 2 else 0x400000
        poisoned = shadow_ops.multiply_registers(op, *masks, 4)
        np.testing.assert_array_equal(shadow_ops.words_of(poisoned) != 0, changed)


def test_wgmma_poisons_rows_and_columns_of_shared_tiles() -> None:
    rng = np.random.default_rng(4)
    smem, shadow = np.zeros(SMEM, np.uint8), np.zeros(SMEM, np.uint8)
    for at, rows in ((A_AT, 64), (B_AT, 16)):
        put_k_major(smem, at, rng.choice(np.array([0x3C], np.uint8), (rows, 32)), 32)
    low = (1 << 46) - 1
    a, b = ((smem_desc(at, 16, 256, 32) & low) | 3 << 62 for at in (A_AT, B_AT))
    op = wgmma.decode_wgmma("m64n16k16", "f32", "f16", "f16", b, a, scale_d=False)
    d = np.zeros((4, op.registers, 32), np.uint32)
    before = multiplied(op, smem, d)
    for at in (
        A_AT + 1 + 2 * int(rng.integers(64 * 16)),
        B_AT + 1 + 2 * int(rng.integers(16 * 16)),
    ):
        shadow[at], smem[at] = 0xFF, smem[at] ^ 4
        changed = multiplied(op, smem, d) != before
        masks = shadow_ops.multiply_warpgroup(
            op, shadow, np.zeros((4, op.registers), np.uint32), None
        )
        shadow[at], smem[at] = 0, smem[at] ^ 4
        poisoned = np.stack([shadow_ops.words_of(own) != 0 for own in masks])
        np.testing.assert_array_equal(poisoned, changed)


@pytest.mark.parametrize(("shape", "multicast"), list(tcgen05_data.COPIES))
def test_tensor_memory_copies_take_poison_along(shape: str, multicast: str) -> None:
    shadow, cluster = defined_shadow(), FakeCluster(1, SMEM)
    source = smem_desc(0, 128, 256, 0)
    op = tcgen05_data.decode_copy("sm_107a", shape, multicast, 1, 0, 64, source)
    at = op.base + int(op.table.offsets.reshape(-1)[-1]) + 5
    shadow.smem(0)[at], cluster.smem(0)[at] = 0xFF, 1
    tcgen05_data.perform(op, cluster)
    tcgen05_data.perform(op, shadow)
    np.testing.assert_array_equal(shadow.tmem(0) != 0, cluster.tmem(0) != 0)
    assert shadow.tmem(0).any()


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_tensor_memory_accesses_keep_lanes_and_columns_apart(shape: str) -> None:
    shadow = defined_shadow()
    op = tcgen05_data.decode_access("sm_107a", shape, 2, 16, 1)
    masks = np.zeros(op.registers, np.uint32)
    masks[1] = 1 << 9
    shadow_ops.store_registers(op, shadow.tmem(0), masks)
    expected = np.argwhere(shadow.tmem(0))
    assert expected.tolist() == [[int(op.lane[1, 9]), int(op.column[1, 9])]]
    np.testing.assert_array_equal(shadow_ops.load_registers(op, shadow.tmem(0)), masks)


class NoShadow:
    """Global memory that is defined."""

    def shadow(self, address: int, nbytes: int) -> None:
        return None


@pytest.mark.parametrize("swizzle", [0, 64, 128])
def test_tensor_copies_define_their_box_and_clip(swizzle: int) -> None:
    memory = GlobalBytes(np.arange(64 * 40, dtype=np.uint8))
    raw = tensor_map(memory.base, 0, (48, 40), (64,), (64, 8), swizzle)
    shadow, cluster = ClusterShadow(1, SMEM, tensor_memory=False), FakeCluster(1, SMEM)
    cluster.smem(0).fill(0xEE)
    load = bulk_copy.decode_tensor_load(raw, (0, 36), 1024, 8)
    load.perform(cluster, memory)
    shadow_ops.load_tensor(load, shadow, NoShadow())
    defined = shadow.smem(0) == 0
    assert defined.sum() == 64 * 8
    assert (cluster.smem(0)[~defined] == 0xEE).all()
    store = bulk_copy.decode_tensor_store(raw, (0, 36), 1024)
    assert shadow_ops.store_tensor(store, shadow, NoShadow()) == -1
    # 48 of 64 columns and 4 of 8 rows lie inside the tensor: what is clipped may be undefined
    places = bulk_copy.decode_tensor_load(raw, (0, 0), 1024, 8)
    marks = np.arange(64 * 8).reshape(8, 64)
    for row, column, inside in ((0, 47, True), (0, 48, False), (3, 0, True), (4, 0, False)):
        at = np.flatnonzero(_where(places, marks, row, column))[0]
        shadow.smem(0)[at] = 0xFF
        assert shadow_ops.store_tensor(store, shadow, NoShadow()) == (at if inside else -1)
        shadow.smem(0)[at] = 0


def _where(load: bulk_copy.TensorLoad, marks: np.ndarray, row: int, column: int) -> np.ndarray:
    """Shared bytes in which a load of the box puts one element, by loading a box of one."""
    data = np.zeros((40, 64), np.uint8)
    data[row, column] = 1
    source = GlobalBytes(data)
    full = tensor_map(source.base, 0, (64, 40), (64,), load.map.box, load.map.swizzle)
    cluster = FakeCluster(1, SMEM)
    bulk_copy.decode_tensor_load(full, (0, 0), load.offset, 8).perform(cluster, source)
    return cluster.smem(0) == 1


# ---- whole instructions

TMEM = """
 .shared .align 16 .b8 s[64]; mov.u32 %r1, s; ld.param.u64 %addr1, [a];
 mov.u32 %i0, %tid.x; mul.wide.u32 %addr2, %i0, 4; add.s64 %addr1, %addr1, %addr2;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; bar.warp.sync -1;
 ld.shared.b32 %r2, [%r1]; mov.b32 %r3, 5;
"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;"
PUT = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2+{0}], {{%r3}}; tcgen05.wait::st.sync.aligned; "
GET = (
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r4, %r5}, [%r2]; tcgen05.wait::ld.sync.aligned; "
    "st.global.b32 [%addr1], %r4; "
)
AGAIN = (
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; bar.warp.sync -1; "
    "ld.shared.b32 %r2, [%r1]; "
)


@pytest.mark.parametrize(
    ("body", "legal"),
    [
        (PUT.format(0) + GET, True),  # the second column is loaded, and stored nowhere
        (PUT.format(1) + GET, False),
        (PUT.format(0) + FREE + AGAIN + GET, False),  # what an allocation before left is not ours
        (PUT.format(0) + FREE + AGAIN + PUT.format(0) + GET, True),
    ],
)
def test_tensor_memory_is_undefined_until_this_allocation_wrote_it(body: str, legal: bool) -> None:
    text = module(TMEM + body + FREE, ".param .u64 a")
    for seed in (None, 1):
        if legal:
            run(text, [np.zeros(32, np.uint32)], rules="enforce", seed=seed)
            continue
        with pytest.raises(EmulationError, match=r"line .*tcgen05\.ld") as error:
            run(text, [np.zeros(32, np.uint32)], rules="enforce", seed=seed)
        assert error.value.rule == "poison: global store"


def test_a_remote_store_carries_the_poison_of_its_value() -> None:
    head = """
     .shared .align 16 .b8 s[256]; mov.u32 %r1, s; mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 2;
     ld.param.u64 %addr1, [a]; mul.wide.u32 %addr2, %i0, 4; add.s64 %addr1, %addr1, %addr2;
     setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r1], 1;
     @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128; bar.warp.sync -1;
     add.u32 %r2, %r1, %i1; mov.b32 %r7, 7; VALUE
     st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r2+64], %r3, [%r1];
     WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
     ld.shared.b32 %r4, [%r2+64]; st.global.b32 [%addr1], %r4;"""
    a = np.zeros(32, np.uint32)
    run(module(head.replace("VALUE", "mov.b32 %r3, 7;"), ".param .u64 a"), [a], rules="enforce")
    assert (a == 7).all()
    odd = "and.b32 %r5, %i0, 1; setp.eq.u32 %p3, %r5, 1; @%p3 mov.b32 %r3, 7;"
    with pytest.raises(EmulationError, match="lane 0") as error:
        run(module(head.replace("VALUE", odd), ".param .u64 a"), [a], rules="enforce")
    assert error.value.rule == "poison: global store"
