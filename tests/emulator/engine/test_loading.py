"""Reading PTX, refusals, and the limits of a launch."""

from pathlib import Path

import numpy as np
import pytest

from rubin_moe.emulator import (
    Device,
    EmulationError,
    LaunchError,
    PtxSyntaxError,
    UnsupportedInstructionError,
    forms,
    load_ptx,
)
from rubin_moe.emulator.ptx import parse_ptx
from rubin_moe.emulator.ptx.ast import Imm, Mem, Pair, Reg, Sym, Vec
from tests.emulator.engine.harness import module, run

OPCODES = (Path(__file__).parent / "opcodes.txt").read_text().split()


@pytest.mark.parametrize("opcode", OPCODES)
def test_compilers_opcodes_are_modelled(opcode: str) -> None:
    assert forms.family_of(opcode) is not None


@pytest.mark.parametrize(
    "opcode",
    [
        "add.rz.f32", "cvt.rn.e4m3x2.f32", "tcgen05.mma.cta_group::3.kind::f16", "ld.global.v3.b32",
        "cp.async.bulk.tensor.6d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
        "wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16", "multimem.ld_reduce.global.add.f32",
        "tensormap.replace.tile.global_address.global.b1024.b64", "call.uni", "bra.divergent",
    ],
)  # fmt: skip
def test_other_opcodes_are_refused_by_name_and_line(opcode: str) -> None:
    assert forms.family_of(opcode) is None
    with pytest.raises(UnsupportedInstructionError) as error:
        load_ptx(module(f"mov.b32 %r1, 0;\n {opcode} %r1, %r2;"))
    assert error.value.opcode == opcode
    text = module(f"mov.b32 %r1, 0;\n {opcode} %r1, %r2;").split("\n")
    line = next(i for i, x in enumerate(text, 1) if opcode in x)
    assert error.value.line == line
    assert f"line {line}: {opcode}" in str(error.value)


def test_every_family_of_the_table_has_an_emitter() -> None:
    from rubin_moe.emulator.compile import EMITTERS
    from rubin_moe.emulator.lower import CONTROL_FAMILIES

    names = {name for name, _ in forms.patterns()}
    assert names == set(EMITTERS) | set(CONTROL_FAMILIES)


def test_scoped_blocks_have_their_own_registers_and_labels() -> None:
    block = """{ .reg .pred P; .reg .b32 t; mov.b32 t, %r1; setp.eq.u32 P, t, 0;
     @P bra DONE; add.u32 %r2, %r2, t; DONE: }"""
    entry = parse_ptx(module(f"mov.b32 %r1, 5; {block} {block}")).entries[0]
    assert sorted(name for name in entry.registers if "@" in name) == ["P@1", "P@2", "t@1", "t@2"]
    assert sorted(entry.labels) == ["DONE@1", "DONE@2"]
    branches = [ins for ins in entry.instructions if ins.opcode == "bra"]
    assert [ins.operands[0] for ins in branches] == [Sym("DONE@1"), Sym("DONE@2")]
    assert [ins.guard for ins in branches] == [Reg("P@1"), Reg("P@2")]


def test_operands() -> None:
    body = """
     shfl.sync.idx.b32 %r1|%p1, %r2, 0x1F, 037, -1;
     st.global.v2.f32 [%d1+-16], {0f3F800000, %r2};
     cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {%r1, %r2}], [%r3+8];"""
    shuffle, store, copy, _ = parse_ptx(module(body)).entries[0].instructions
    assert shuffle.operands[0] == Pair(Reg("%r1"), Reg("%p1"))
    assert list(shuffle.operands[2:]) == [Imm(31), Imm(31), Imm(-1)]
    assert store.operands == (Mem(Reg("%d1"), -16), Vec((Imm(0x3F800000), Reg("%r2"))))
    assert copy.operands[0] == Mem(Reg("%d1"), 0, Vec((Reg("%r1"), Reg("%r2"))))


def test_comments_debug_lines_and_statements_over_lines() -> None:
    body = """.loc 1 2 3
     mov.b32 /* in the
     middle */ %r1,
       7; // a comment; with a semicolon
     .loc\t1 5 0, function_name $L__info, inlined_at 1 2 3
    $L__BB0_1: add.u32 %r2, %r1, 1; @%p1 bra $L__BB0_1;"""
    text = module(body) + "\n.section .debug_abbrev\n{\n.b8 1\n}\n"
    entry = parse_ptx(text).entries[0]
    assert [ins.opcode for ins in entry.instructions] == ["mov.b32", "add.u32", "bra", "ret"]
    assert entry.labels == {"$L__BB0_1": 1}
    line = next(i for i, x in enumerate(text.split("\n"), 1) if "add.u32" in x)
    assert entry.instructions[1].line == line


def test_parameters_and_directives() -> None:
    text = module("", ".param .u8 a, .param .align 64 .b8 map[128], .param .u64 .ptr .global b")
    entry = parse_ptx(text.replace(")\n{", ")\n.reqntid 64, 2, 1\n{")).entries[0]
    assert [(p.name, p.offset, p.size) for p in entry.params] == [
        ("a", 0, 1), ("map", 64, 128), ("b", 192, 8)]  # fmt: skip
    assert entry.directives["reqntid"] == (64, 2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no .version"),
        (".version 9.0\n.target sm_90a\n", "no .entry"),
        (module("", head=".func f() { }"), "device functions"),
        (module(".maxnreg 32;"), "directive"),
        (module("mov.b32 %r1, 5x;"), "literal '5x'"),
        (module(".reg .b33 x;"), "register type"),
    ],
)
def test_syntax_errors(text: str, message: str) -> None:
    with pytest.raises(PtxSyntaxError, match=message):
        load_ptx(text)


def test_undeclared_names_are_refused() -> None:
    for body, message in [
        ("bra NOWHERE;", "NOWHERE"), ("mov.b32 %r1, %undeclared;", "%undeclared"),
        ("mov.b64 %d1, unknown;", "unknown"), ("mov.b32 %r1, %pm0;", "%pm0"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedInstructionError, match=message):
            load_ptx(module(body))


def test_launch_limits() -> None:
    body = ".shared .align 4 .b8 s[1024]; mov.u32 %r1, s;"
    loaded = load_ptx(module(body, ".param .u32 n"))
    device = Device("sm_107a")
    device.launch(loaded, 1, 32, [1], dynamic_smem=334_848 - 1024)
    cases = [
        ({"dynamic_smem": 334_848 - 1023}, "shared memory"),
        ({"cluster": 2}, "multiple of cluster"),
        ({"block": 1025}, "threads a block"),
        ({"params": []}, "0 parameters given"),
        ({"params": b"\0"}, "1 parameter bytes"),
        ({"params": [np.zeros(1)]}, "takes 4 bytes"),
        ({"grid": 0}, "positive"),
    ]
    for change, message in cases:
        options = {"grid": 1, "block": 32, "params": [1], **change}
        with pytest.raises(LaunchError, match=message):
            device.launch(loaded, **options)
    with pytest.raises(LaunchError, match="compiled for sm_107a"):
        Device("sm_90a").launch(loaded, 1, 32, [1])
    with pytest.raises(LaunchError, match="sm_80 is not emulated"):
        Device("sm_80")


def test_special_registers() -> None:
    names = ["%tid.y", "%ctaid.z", "%nctaid.x", "%ntid.y", "%laneid", "%warpid", "%cluster_ctarank",
             "%clusterid.x", "%cluster_nctaid.x", "%lanemask_lt", "%dynamic_smem_size"]  # fmt: skip
    stores = "\n".join(
        f" mov.u32 %r1, {name}; st.global.b32 [%addr1+{4 * i}], %r1;"
        for i, name in enumerate(names)
    )
    body = f"""
     mov.u32 %i0, %tid.x; mov.u32 %i1, %tid.y; mad.lo.u32 %i0, %i1, 16, %i0;
     mov.u32 %i2, %ctaid.x; mad.lo.u32 %i0, %i2, 64, %i0;
     mov.u32 %i3, %ctaid.z; mad.lo.u32 %i0, %i3, 256, %i0;
     ld.param.u64 %addr1, [a]; mul.wide.u32 %addr2, %i0, {4 * len(names)};
     add.s64 %addr1, %addr1, %addr2; {stores}"""
    a = np.zeros((2, 4, 4, 16, len(names)), np.uint32)
    run(module(body, ".param .u64 a"), [a], (4, 1, 2), (16, 4), cluster=2, dynamic_smem=48)
    z, x, ty, tx = np.ogrid[:2, :4, :4, :16]
    linear = 16 * ty + tx
    lane = linear % 32
    rows = [ty, z, 4, 4, lane, linear // 32, x % 2, x // 2, 2, (1 << lane) - 1, 48]
    for i, expected in enumerate(rows):
        np.testing.assert_array_equal(a[..., i], np.broadcast_to(expected, a.shape[:-1]), names[i])


def test_report_counts_and_prints() -> None:
    body = """
     mov.u32 %i0, %tid.x; mov.b32 %r1, 0;
    LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 10; @%p1 bra LOOP;"""
    report = run(module(body), [], 3, 64)
    assert report.instructions["add.u32"] == 3 * 2 * 10
    assert report.instructions["ret"] == 6
    assert report.warp_instructions == 6 * (2 + 30 + 1)
    assert "add.u32 60" in str(report)
    assert '"warp_instructions": 198' in report.to_json()


def test_compiled_kernels_come_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rubin_moe.emulator import compile as compilation

    monkeypatch.setenv("RUBIN_MOE_EMULATOR_CACHE", str(tmp_path))
    text = module("mov.b32 %r1, 123;")
    load_ptx(text)
    assert len(list(tmp_path.glob("*.pickle"))) == 1
    monkeypatch.setattr(compilation, "_compile_module", lambda *_: pytest.fail("compiled again"))
    load_ptx(text)


def test_trap_instruction_stops_the_launch() -> None:
    body = "mov.u32 %i0, %tid.x; setp.eq.u32 %p1, %i0, 40; @%p1 trap;"
    with pytest.raises(EmulationError, match=r"warp 1, line .*trap.*lane 8"):
        run(module(body), [], 1, 64)
