"""The ten points over small PTX texts; the long form runs over the peers' kernels."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rubin_moe.arch import SM107A
from rubin_moe.arch.port_check import PlannedKernel, check_plan, check_ptx
from rubin_moe.arch.smem_plan import Buffer, Placed, SmemPlan, plan_smem
from rubin_moe.cli import app
from rubin_moe.errors import PlanError
from rubin_moe.kernels.sm107.plan import OPERANDS, TILES_N

HEADER = ".version 9.4\n.target sm_107a\n.address_size 64\n"
MMA = (
    "tcgen05.mma.cta_group::1.kind::{kind}.block_scale{tail} "
    "[%r1], %rd1, %rd2, %r9, [%r2], [%r3], %p1;\n"
)


def module(word: int, kind="mxf4nvf4", tail=".block16", columns=576, extra="", masked=True) -> str:
    """A kernel whose idesc is made as compilers make it: selects, or-ed with masked ids."""
    mask = "and.b32 %r7, %r6, 1610612736;" if masked else "mov.b32 %r7, %r6;"
    return (
        HEADER
        + f"""
mov.b32 %r20, {columns};
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r21], %r20;
selp.b32 %r5, {word | 8192}, {word}, %p2;
shr.u32 %r6, %r2, 1;
{mask}
{extra}
or.b32 %r9, %r5, %r7;
"""
        + MMA.format(kind=kind, tail=tail)
    )


def verdicts(text: str, **plan):
    return {p.number: (p.status, p.why) for p in check_ptx(text, **plan)}


def test_a_good_nvfp4_kernel():
    v = verdicts(module(0x08200488))
    assert v[1] == ("met", "mxf4nvf4 K = 128")
    assert v[2] == ("met", "idesc 0x08200488")
    assert v[4][0] == "met"
    assert {v[n][0] for n in (3, 5, 6, 7, 8, 9, 10)} == {"not applicable"}


def test_blackwells_k_is_missed():
    assert verdicts(module(0x08200480))[1] == ("missed", "mxf4nvf4 runs K = 64, 128 exists")


def test_ue5m3_and_scaled_cvt():
    assert verdicts(module(0x09200488))[9] == ("met", "UE5M3 scale factors")
    old = "cvt.rp.satfinite.ue8m0x2.f32 %rs1, %f1, %f2;\nrcp.approx.ftz.f32 %f3, %f4;"
    assert verdicts(module(0x08200488, extra=old))[9][0] == "missed"
    new = "cvt.rn.satfinite.scaled::n1::ue8m0.e4m3x2.f32 %rs1, %f1, %f2, %rs2;"
    assert verdicts(module(0x08200488, extra=new))[9][0] == "met"


def test_mixed_precision_code_5_and_what_code_1_decodes_to():
    assert verdicts(module(0x88A00280, kind="mxf8f6f4", tail=""))[3][0] == "met"
    trap = verdicts(module(0x88A00080, kind="mxf8f6f4", tail=""))[3]
    assert "decodes to E5M2" in trap[1]


def test_m_64_with_k_64_cannot_hide():
    # M / 128 = 0: what an M = 64 descriptor would have to say
    text = module(0x80A00280, kind="mxf8f6f4", tail="")
    assert verdicts(text)[2][0] != "met"


@pytest.mark.parametrize(
    ("columns", "status"),
    [(576, "met"), (544, "met"), (530, "missed"), (96, "missed"), (256, "met")],
)
def test_allocations(columns, status):
    assert verdicts(module(0x08200488, columns=columns))[4][0] == status


def test_512_columns_at_n_256_leave_the_new_ones_unused():
    assert verdicts(module(0x08400488, columns=512))[4][0] == "missed"


def test_cp_async_needs_the_plan_and_is_judged_by_it():
    text = module(0x08200488, extra="cp.async.cg.shared.global [%r30], [%rd9], 16;")
    assert "give the plan" in verdicts(text)[5][1]
    low = plan_smem(SM107A, [Buffer("sSFB", 2048, "tokens", cp_async=True), Buffer("sA", 16384)])
    assert verdicts(text, smem=low, cp_async_buffers=("sSFB",))[5][0] == "met"
    high = SmemPlan((Placed("sSFB", 0x3D000, 0x2000, 1),), {}, False, 0, 0x3F000, 334_848)
    assert verdicts(text, smem=high, cp_async_buffers=("sSFB",))[5][0] == "missed"


@pytest.mark.parametrize("fmt", OPERANDS)
@pytest.mark.parametrize("tile_n", TILES_N)
@pytest.mark.parametrize("ctas", [1, 2])
def test_a_plan_alone_is_checked(fmt, tile_n, ctas):
    result = CliRunner().invoke(app, ["check-port", "--plan", f"{fmt}:{tile_n}:{ctas}", "--json"])
    assert result.exit_code == 0, result.output
    points = {p["number"]: p for p in json.loads(result.stdout)}
    assert {n for n, p in points.items() if p["status"] == "met"} >= {1, 2, 4, 5, 8}
    assert (points[3]["status"] == "met") == (fmt == "mxfp8")
    assert (points[9]["status"] == "met") == (fmt == "nvfp4-ue5m3")


def test_a_plan_can_miss_points():
    good = SmemPlan((Placed("sB", 0x1000, 0x2000, 1),), {}, False, 0, 0x3F000, 334_848)
    high = SmemPlan((Placed("sB", 0x3D000, 0x2000, 1),), {}, False, 0, 0x3F000, 334_848)
    sound = PlannedKernel("mxf4nvf4", 1, (0x08200488,), 576, good, ("sB",))
    assert {p.number for p in check_plan(sound) if p.status == "missed"} == set()
    for number, change in (
        (1, {"descriptors": (0x08200480,)}),
        (4, {"columns": 530}),
        (5, {"smem": high}),
    ):
        points = check_plan(replace(sound, **change))
        assert [p.number for p in points if p.status == "missed"] == [number]


def test_a_plan_decides_what_a_ptx_alone_leaves_open(tmp_path):
    path = tmp_path / "kernel.ptx"
    path.write_text(module(0x08200488, extra="cp.async.cg.shared.global [%r30], [%rd9], 16;"))
    alone = CliRunner().invoke(app, ["check-port", str(path)])
    both = CliRunner().invoke(app, ["check-port", str(path), "--plan", "nvfp4-ue4m3:64"])
    assert "give the plan" in alone.stdout
    assert "sB, sSFB below 0x3e000" in both.stdout


def test_b_reuse_and_the_order_of_its_copies():
    fill, last = ".block16.collector::b::fill", ".block16.collector::b::lastuse"
    copies = "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r72], %rd478;\n"
    both = MMA.format(kind="mxf4nvf4", tail=last)
    good = module(0x08200488, tail=fill, extra=copies * 6) + both
    assert (verdicts(good)[6][0], verdicts(good)[7][0]) == ("met", "met")
    assert verdicts(module(0x08200488, tail=fill, extra=copies * 12) + both)[7][0] == "missed"
    assert verdicts(module(0x08200488, tail=fill))[6][0] == "missed"


def test_runtime_n_needs_masks():
    runtime = "shl.b32 %r5, %r40, 17;"
    assert verdicts(module(0x08000488, extra=runtime))[8][0] == "met"
    assert verdicts(module(0x08000488, extra=runtime, masked=False))[8][0] == "missed"


def test_runtime_n_as_the_compiler_leaves_it_and_ids_of_zero():
    text = module(0x09000488).replace(
        "or.b32 %r9, %r5, %r7;",
        "shl.b32 %r66, %r59, 14;\nadd.s32 %r67, %r66, 245760;\nand.b32 %r68, %r67, -151257088;\n"
        "or.b32 %r9, %r68, 150996104;",
    )
    assert verdicts(text)[8] == (
        "met",
        "N at bit 17 at run time; scale ids are constants, none is or-ed in; a pair's shifted view "
        "of tokens and their compact scales are not to be seen here",
    )


def test_a_word_whose_n_is_masked_last():
    """(n << 14 | static) & mask, as the compiler leaves N of a pair in a tile of 256."""
    text = (
        HEADER
        + "shl.b32 %r5, %r4, 14;\nor.b32 %r6, %r5, 268436616;\nand.b32 %r9, %r6, -260984;\n"
        + MMA.format(kind="mxf4nvf4", tail=".block16").replace("group::1", "group::2")
    )
    v = verdicts(text)
    assert v[2] == ("met", "idesc 0x10000488")
    assert v[8][0] == "met"


def test_other_targets_and_other_files_are_refused():
    with pytest.raises(PlanError, match="compiled for sm_100a"):
        check_ptx(module(0x08200488).replace("sm_107a", "sm_100a"))
    with pytest.raises(PlanError, match="no PTX text"):
        check_ptx("hello")


def test_the_command(tmp_path):
    file = tmp_path / "kernel.ptx"
    file.write_text(module(0x08200480))
    result = CliRunner().invoke(app, ["check-port", str(file), "--json"])
    assert result.exit_code == 1
    assert [p["number"] for p in json.loads(result.stdout)] == list(range(1, 11))
