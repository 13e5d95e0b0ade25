"""Instructions that not every architecture has."""

from __future__ import annotations

import pytest

from rubin_moe.emulator import UnsupportedInstructionError, load_ptx
from rubin_moe.emulator.targets import missing_on

TARGETS = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")
CASES = [
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", "1000"),
    ("tcgen05.ld.sync.aligned.32x32b.x4.b32", "0111"),
    ("tcgen05.alloc.exclusive.cta_group::1.sync.aligned.shared::cta.b32", "0001"),
    ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.collector::a::fill", "0111"),
    ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.collector::b::fill", "0001"),
    ("cvt.rn.satfinite.e2m1x2.f32", "0111"),
    ("cvt.rp.satfinite.ue8m0x2.f32", "0111"),
    ("cvt.rn.satfinite.e4m3x2.f32", "1111"),
    ("cvt.rn.satfinite.ue5m3x2.f32", "0001"),
    ("cvt.rn.satfinite.scaled::n1::ue8m0.e4m3x2.f32", "0001"),
    ("add.rn.f32x2", "0111"),
    ("add.rn.f32", "1111"),
    ("ld.global.v8.b32", "0111"),
    (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes",
        "0111",
    ),
    ("redux.sync.add.s32", "1111"),
]


@pytest.mark.parametrize(("opcode", "has"), CASES)
def test_table(opcode: str, has: str) -> None:
    assert "".join(str(int(missing_on(opcode, t) is None)) for t in TARGETS) == has


def test_loading_names_opcode_line_and_targets() -> None:
    text = ".version 8.6\n.target {}\n.address_size 64\n.visible .entry k()\n{{\n"
    text += "\t.reg .b64 %q<2>;\n\tmov.b64 %q0, 0;\n\tadd.rn.f32x2 %q1, %q0, %q0;\n\tret;\n}}\n"
    load_ptx(text.format("sm_100a"))
    with pytest.raises(UnsupportedInstructionError, match=r"line 8: add\.rn\.f32x2 .*sm_90a lacks"):
        load_ptx(text.format("sm_90a"))
