"""Every rule that a decoder knows, broken once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rubin_moe.emulator.isa import bulk_copy, matrix_ldst, mma_sync, tcgen05_data, wgmma
from rubin_moe.emulator.isa.descriptors import decode_instruction, decode_tcgen05_smem
from rubin_moe.emulator.isa.legality import IllegalOperationError
from rubin_moe.emulator.isa.reductions import reduce_bytes
from rubin_moe.emulator.isa.tcgen05_mma_decode import decode_mma
from rubin_moe.emulator.rules import RULES
from rubin_moe.emulator.state.tensormap import decode_tensormap
from rubin_moe.emulator.state.tmem import TensorMemory
from tests.emulator.units.machine import block_scaled_idesc, plain_idesc, smem_desc, tensor_map

BYTES = np.zeros(4096, np.uint8)
B = smem_desc(0x2000, 16, 512, 64)
MAP = (4096, 0, (256, 20), (256,), (128, 8), 128)


def _map(word: int, value: int) -> Callable[[], object]:
    """A tensor map with bits of a word set."""

    def decode() -> object:
        words = np.frombuffer(tensor_map(*MAP), "<u8").copy()
        words[word] |= np.uint64(value)
        return decode_tensormap(words.tobytes())

    return decode


def _store(coordinates: tuple[int, ...], code: int = 0) -> Callable[[], object]:
    raw = tensor_map(4096, code, (256, 20), (256,), (128, 8), 128 if code == 0 else 0)
    return lambda: bulk_copy.decode_tensor_store(raw, coordinates, 0)


def _mma(word: int, sf_vec: int, kind: str, **changes: Any) -> Callable[[], object]:
    operands: dict[str, Any] = {
        "arch": "sm_107a", "kind": kind, "cta_group": 1, "rank": 0, "d": 0, "a": B, "b": B,
        "idesc": word, "enable_input_d": False, "sf_vec": sf_vec, "sfa": 300, "sfb": 340,
    }  # fmt: skip
    return lambda: decode_mma(**{**operands, **changes})


FP4 = block_scaled_idesc("mxf4nvf4", 128, 64)
FP8 = block_scaled_idesc("mxf8f6f4", 128, 64, scale=1)
PLAIN = plain_idesc("f8f6f4", 128, 64)
F16 = plain_idesc("f16", 128, 64)


def _instruction(
    word: int, kind: str, group: int = 1, vec: int = 0, arch: str = "sm_107a"
) -> Callable[[], object]:
    return lambda: decode_instruction(word, kind, arch, group, vec)


def _wgmma(shape: str, d: str, a: str, b: str, **options: Any) -> Callable[[], object]:
    return lambda: wgmma.decode_wgmma(shape, d, a, b, 0, 0, **options)


BROKEN: list[tuple[str, Callable[[], object]]] = [
    # shared memory and copies
    ("matrix load/store: alignment", lambda: matrix_ldst.load_matrices(BYTES, np.arange(32), 1)),
    ("matrix load/store: count", lambda: matrix_ldst.load_matrices(BYTES, np.zeros(32), 3)),
    ("bulk copy: alignment", lambda: bulk_copy.decode_bulk_copy("gmem", 4096, "smem", 8, 16)),
    ("cp.async: alignment", lambda: bulk_copy.decode_async_copy(0x2004, 4096, 16)),
    ("cp.async: size", lambda: bulk_copy.decode_async_copy(0x2000, 4096, 12)),
    ("cp.async: size", lambda: bulk_copy.decode_async_copy(0x2000, 4096, 8, bypass_l1=True)),
    ("cp.async: source size", lambda: bulk_copy.decode_async_copy(0x2000, 4096, 8, 9)),
    ("bulk reduction: type", lambda: reduce_bytes(BYTES, BYTES, "and", "f32")),
    ("tensor copy: negative store coordinate", _store((0, -1))),
    ("tensor copy: padded format", _store((0, 0), 12)),
    # tensor maps
    ("tensor map: size", lambda: decode_tensormap(bytes(32))),
    ("tensor map: rank", _map(1, 6 << 4)),
    ("tensor map: element format", _map(1, 15 << 7)),
    ("tensor map: interleave", _map(1, 1 << 11)),
    ("tensor map: traversal stride", _map(6, 1 << 35)),
    ("tensor map: base address", _map(0, 4)),
    ("tensor map: inner box", lambda: decode_tensormap(tensor_map(*MAP[:4], (120, 8), 0))),
    ("tensor map: swizzle", lambda: decode_tensormap(tensor_map(*MAP[:5], 64))),
    ("tensor map: padded format",
     lambda: decode_tensormap(tensor_map(4096, 12, (256, 20), (128,), (64, 8), 0))),
    # instruction descriptors: what the porting to sm_107a gets wrong
    ("instruction descriptor: M", _instruction(PLAIN & ~(31 << 24) | 4 << 24 | 1 << 29, "f8f6f4")),
    ("instruction descriptor: M",
     _instruction(FP8 & ~(3 << 27) | 1 << 31, "mxf8f6f4", vec=32)),
    ("instruction descriptor: N", _instruction(FP4 & ~(63 << 17) | 33 << 17, "mxf4nvf4", vec=16)),
    ("instruction descriptor: N",
     _instruction(block_scaled_idesc("mxf4nvf4", 256, 24), "mxf4nvf4", 2, 16)),
    ("instruction descriptor: K size", _instruction(FP4 | 1 << 31, "mxf4nvf4", vec=16)),
    ("instruction descriptor: undefined field", _instruction(FP8 | 8, "mxf8f6f4", vec=32)),
    ("instruction descriptor: undefined field",
     _instruction(FP4 | 8, "mxf4nvf4", vec=16, arch="sm_100a")),
    ("instruction descriptor: format code", _instruction(FP4 ^ 4 << 7, "mxf4nvf4", vec=16)),
    ("instruction descriptor: format code", _instruction(FP8 | 2 << 7, "mxf8f6f4", vec=32)),
    ("instruction descriptor: scale format", _instruction(FP8 ^ 1 << 23, "mxf8f6f4", vec=32)),
    ("instruction descriptor: accumulator format", _instruction(F16 | 3 << 4, "f16")),
    ("instruction descriptor: max shift", _instruction(F16 | 1 << 30, "f16")),
    ("tcgen05.mma: block scale", _instruction(PLAIN, "f8f6f4", vec=32)),
    ("tcgen05.mma: cta_group", _instruction(FP4, "mxf4nvf4", group=3, vec=16)),
    ("tcgen05.mma: scale factor id", _mma(FP4 | 1 << 29, 16, "mxf4nvf4")),
    ("tcgen05.mma: scale factor id", _mma(FP4 | 1 << 4, 16, "mxf4nvf4")),
    ("tcgen05.mma: scale factor id", _mma(FP4, 16, "mxf4nvf4", sfa=300 | 1 << 30)),
    ("tcgen05.mma: A in tensor memory",
     _mma(F16 | 1 << 15, 0, "f16", a=64, a_in_tmem=True, sfa=0, sfb=0)),
    ("tcgen05.shift: not modelled", tcgen05_data.refuse_shift),
    # shared-memory descriptors
    ("shared-memory descriptor: undefined field",
     lambda: decode_tcgen05_smem(B | 1 << 53, "sm_107a")),
    ("shared-memory descriptor: undefined field",
     lambda: decode_tcgen05_smem(B | 1 << 14, "sm_100a")),
    ("shared-memory descriptor: version", lambda: decode_tcgen05_smem(B ^ 1 << 46, "sm_107a")),
    ("shared-memory descriptor: swizzle", lambda: decode_tcgen05_smem(B | 1 << 61, "sm_107a")),
    ("shared-memory descriptor: leading dimension mode",
     lambda: decode_tcgen05_smem(smem_desc(0, 16, 512, 0, absolute=True), "sm_107a").chunks(8, 2)),
    # tensor memory
    ("tcgen05.alloc: columns", lambda: TensorMemory("sm_100a").allocate(544)),
    ("tcgen05.alloc: columns", lambda: TensorMemory("sm_107a").allocate(48)),
    # Hopper's and older matrix instructions
    ("wgmma: shape", _wgmma("m64n64k32", "f32", "bf16", "bf16")),
    ("wgmma: type", _wgmma("m64n64k16", "f32", "bf16", "f16")),
    ("wgmma: N", _wgmma("m64n264k16", "f32", "bf16", "bf16")),
    ("wgmma: accumulator", _wgmma("m64n64k16", "f16", "bf16", "bf16")),
    ("wgmma: scale", _wgmma("m64n64k32", "s32", "s8", "s8", scale_a=-1)),
    ("wgmma: transpose", _wgmma("m64n64k32", "f32", "e4m3", "e4m3", trans_b=1)),
    ("mma.sync: shape", lambda: mma_sync.decode_mma_sync("m16n8k64", "f32", "f16", "f16", "f32")),
    ("mma.sync: type", lambda: mma_sync.decode_mma_sync("m16n8k16", "f32", "f16", "bf16", "f32")),
    ("mma.sync: accumulator",
     lambda: mma_sync.decode_mma_sync("m16n8k16", "f16", "bf16", "bf16", "f32")),
    ("mma.sync: satfinite",
     lambda: mma_sync.decode_mma_sync("m16n8k16", "f32", "f16", "f16", "f32", True)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "break_it"), BROKEN, ids=[rule for rule, _ in BROKEN])
def test_refused_by_its_rule(rule: str, break_it: Callable[[], object]) -> None:
    with pytest.raises(IllegalOperationError) as error:
        break_it()
    assert error.value.rule == rule
    assert RULES[rule].profile in ("always", "model")


def test_a_code_of_the_right_kind_is_reported_as_what_it_decodes_to() -> None:
    """E2M1 is 5 under mxf8f6f4; 1, its code under the FP4 kinds, is E5M2 there and legal."""
    meant, written = (
        decode_instruction(FP8 & ~(7 << 7) | code << 7, "mxf8f6f4", "sm_107a", 1, 32)
        for code in (5, 1)
    )
    assert meant.text == "mxf8f6f4 cta_group::1 128x64x32: e2m1 x e4m3, UE8M0 a 32 -> f32"
    assert written.text == "mxf8f6f4 cta_group::1 128x64x32: e5m2 x e4m3, UE8M0 a 32 -> f32"
