"""Poison: each rule by the smallest kernel that breaks it, beside a twin that is legal."""

from __future__ import annotations

import numpy as np
import pytest

import rubin_moe.emulator.compile as compile_
from rubin_moe.emulator import Device, EmulationError, LaunchError, load_ptx
from rubin_moe.emulator.native.compiler import compile_object
from tests.emulator.engine.harness import module, run

ADDRESS, BRANCH = "poison: address", "poison: branch"
STORE, OPERAND = "poison: global store", "poison: operand"

#: Lane i has word i of the buffer in %addr1, word i of shared memory in %r21 (from %r20), i in %i0.
HEAD = """
 .shared .align 128 .b8 s[4096];
 mov.u32 %i0, %tid.x; shl.b32 %i1, %i0, 2; cvt.u64.u32 %addr2, %i1;
 ld.param.u64 %addr1, [a]; add.s64 %addr1, %addr1, %addr2;
 mov.u32 %r20, s; add.u32 %r21, %r20, %i1; mov.b32 %r30, 7;
"""
LOAD = "ld.shared.b32 %r5, [%r21];"
OUT = "st.global.b32 [%addr1], %r5;"
WRITE = "st.shared.b32 [%r21], %r30;"
HALF = "st.shared.b16 [%r21], 5;"
ODD = "and.b32 %r9, %i0, 1; setp.ne.u32 %p5, %r9, 0;"
EVEN = f"{ODD} @!%p5 {WRITE}"

#: rule broken, kernel that breaks it, twin that does not.
PAIRS = {
    "register that nothing wrote": (STORE, OUT, f"mov.b32 %r5, 1; {OUT}"),
    "register written under a guard": (
        STORE,
        f"{ODD} @%p5 mov.b32 %r5, 1; {OUT}",
        f"{ODD} @%p5 mov.b32 %r5, 1; @%p5 {OUT}",
    ),
    "register written in a branch": (
        STORE,
        f"{ODD} @%p5 bra L; mov.b32 %r5, 1; L: {OUT}",
        f"{ODD} @%p5 bra L; mov.b32 %r5, 1; {OUT} L:",
    ),
    "shared memory": (STORE, f"{LOAD} {OUT}", f"{WRITE} {LOAD} {OUT}"),
    "shared memory by generic address": (
        STORE,
        f"cvt.u64.u32 %d1, %r21; cvta.shared.u64 %d1, %d1; ld.b32 %r5, [%d1]; {OUT}",
        f"cvt.u64.u32 %d1, %r21; cvta.shared.u64 %d1, %d1; st.b32 [%d1], %r30; {LOAD} {OUT}",
    ),
    "generic store": (
        STORE,
        f"{LOAD} st.b32 [%addr1], %r5;",
        f"{LOAD} cvt.u64.u32 %d1, %r21; cvta.shared.u64 %d1, %d1; st.b32 [%d1+1024], %r5;",
    ),
    "lanes that did not write": (
        STORE, f"{EVEN} {LOAD} {OUT}", f"{EVEN} {LOAD} @!%p5 {OUT}"
    ),
    "local memory": (
        STORE,
        f".local .align 4 .b8 l[16]; mov.u64 %d1, l; ld.local.b32 %r5, [%d1+4]; {OUT}",
        ".local .align 4 .b8 l[16]; mov.u64 %d1, l; st.local.b32 [%d1+4], %r30; "
        f"ld.local.b32 %r5, [%d1+4]; {OUT}",
    ),
    "address": (
        ADDRESS,
        f"{LOAD} and.b32 %r5, %r5, 12; add.u32 %r6, %r20, %r5; ld.shared.b32 %r7, [%r6];",
        f"{LOAD} and.b32 %r5, %r5, 0; add.u32 %r6, %r20, %r5; ld.shared.b32 %r7, [%r6];",
    ),
    "branch": (
        BRANCH,
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; @%p1 bra L; mov.b32 %r6, 0; L:",
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; setp.eq.u32 %p2, %i0, 99; and.pred %p1, %p1, %p2; "
        "@%p1 bra L; mov.b32 %r6, 0; L:",
    ),
    "branch on a combined comparison": (
        BRANCH,
        f"{LOAD} setp.lt.u32 %p2, %i0, 99; setp.ne.and.u32 %p1, %r5, 0, %p2; @%p1 bra L; L:",
        f"{LOAD} setp.eq.u32 %p2, %i0, 99; setp.ne.and.u32 %p1, %r5, 0, %p2; @%p1 bra L; L:",
    ),
    "or with what is true": (
        BRANCH,
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; setp.gt.u32 %p2, %i0, 99; or.pred %p1, %p1, %p2; "
        "@%p1 bra L; L:",
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; setp.lt.u32 %p2, %i0, 99; or.pred %p1, %p1, %p2; "
        "@%p1 bra L; L:",
    ),
    "guard of a store": (
        BRANCH,
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; @%p1 {WRITE}",
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; @%p1 mov.b32 %r6, 1;",
    ),
    "guarded result": (
        STORE,
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; mov.b32 %r5, 0; @%p1 mov.b32 %r5, 1; {OUT}",
        f"{LOAD} setp.ne.u32 %p1, %r5, 0; @%p1 mov.b32 %r5, 1; mov.b32 %r5, 0; {OUT}",
    ),
    "bytes by prmt": (
        STORE,
        f"{HALF} {LOAD} prmt.b32 %r5, %r5, %r30, 0x7620; {OUT}",
        f"{HALF} {LOAD} prmt.b32 %r5, %r5, %r30, 0x7610; {OUT}",
    ),
    "bytes by shifts": (
        STORE,
        f"{HALF} {LOAD} shr.u32 %r5, %r5, 8; {OUT}",
        f"{HALF} {LOAD} shl.b32 %r5, %r5, 16; {OUT}",
    ),
    "bytes by masks": (
        STORE,
        f"{HALF} {LOAD} and.b32 %r5, %r5, 0x1FFFF; {OUT}",
        f"{HALF} {LOAD} and.b32 %r5, %r5, 0xFFFF; {OUT}",
    ),
    "bytes by lop3": (
        STORE,
        f"{HALF} {LOAD} lop3.b32 %r5, %r5, 0xFFFFF, %r30, 0xEA; {OUT}",
        f"{HALF} {LOAD} lop3.b32 %r5, %r5, 0xFFFF, %r30, 0xEA; {OUT}",
    ),
    "bytes by bfe": (
        STORE,
        f"{HALF} {LOAD} bfe.u32 %r5, %r5, 12, 8; {OUT}",
        f"{HALF} {LOAD} bfe.u32 %r5, %r5, 4, 8; {OUT}",
    ),
    "bytes by conversion": (
        STORE,
        f"{HALF} {LOAD} shr.u32 %r5, %r5, 8; cvt.u16.u32 %h1, %r5; cvt.s32.s16 %r5, %h1; {OUT}",
        f"{HALF} {LOAD} cvt.u16.u32 %h1, %r5; cvt.s32.s16 %r5, %h1; {OUT}",
    ),
    "halves by mov": (
        STORE,
        f"{HALF} {LOAD} mov.b32 {{%h1, %h2}}, %r5; st.global.b16 [%addr1], %h2;",
        f"{HALF} {LOAD} mov.b32 {{%h1, %h2}}, %r5; st.global.b16 [%addr1], %h1;",
    ),
    "packed arithmetic": (
        STORE,
        f"{HALF} {LOAD} fma.rn.bf16x2 %r5, %r5, %r5, %r30; shr.u32 %r5, %r5, 16; {OUT}",
        f"{HALF} {LOAD} fma.rn.bf16x2 %r5, %r5, %r5, %r30; and.b32 %r5, %r5, 0xFFFF; {OUT}",
    ),
    "pairs of float32": (
        STORE,
        f"{LOAD} mov.b64 %d1, {{%r30, %r5}}; mul.rn.f32x2 %d1, %d1, %d1; "
        f"mov.b64 {{%r6, %r5}}, %d1; {OUT}",
        f"{LOAD} mov.b64 %d1, {{%r5, %r30}}; mul.rn.f32x2 %d1, %d1, %d1; "
        f"mov.b64 {{%r6, %r5}}, %d1; {OUT}",
    ),
    "packed conversion": (
        STORE,
        f"{LOAD} cvt.rn.bf16x2.f32 %r5, %r5, %r30; shr.u32 %r5, %r5, 16; {OUT}",
        f"{LOAD} cvt.rn.bf16x2.f32 %r5, %r30, %r5; shr.u32 %r5, %r5, 16; {OUT}",
    ),
    "selection": (
        STORE,
        f"{LOAD} setp.lt.u32 %p1, %i0, 99; selp.b32 %r5, %r5, %r30, %p1; {OUT}",
        f"{LOAD} setp.lt.u32 %p1, %i0, 99; selp.b32 %r5, %r30, %r5, %p1; {OUT}",
    ),
    "masked by a zero in a register": (
        STORE,
        f"{LOAD} and.b32 %r5, %r5, %r30; {OUT}",
        f"{LOAD} shr.u32 %r6, %i0, 5; and.b32 %r5, %r5, %r6; {OUT}",
    ),
    "itself": (
        STORE, f"{LOAD} xor.b32 %r5, %r5, %r30; {OUT}", f"{LOAD} xor.b32 %r5, %r5, %r5; {OUT}"
    ),
    "times zero": (
        STORE, f"{LOAD} mul.lo.u32 %r5, %r5, 2; {OUT}", f"{LOAD} mul.lo.u32 %r5, %r5, 0; {OUT}"
    ),
    "vector": (
        STORE,
        f"add.u32 %r22, %r21, %i1; st.shared.b32 [%r22], %r30; "
        f"ld.shared.v2.b32 {{%r6, %r5}}, [%r22]; {OUT}",
        f"add.u32 %r22, %r21, %i1; st.shared.b32 [%r22], %r30; "
        f"ld.shared.v2.b32 {{%r5, %r6}}, [%r22]; {OUT}",
    ),
    "copied through shared memory": (
        STORE,
        f"{LOAD} st.shared.b32 [%r21+1024], %r5; ld.shared.b32 %r5, [%r21+1024]; {OUT}",
        f"{LOAD} st.shared.b32 [%r21+1024], %r5; {WRITE} {LOAD} {OUT}",
    ),
    "added in global memory": (
        STORE,
        f"{LOAD} red.global.add.u32 [%addr1], %r5;",
        f"{LOAD} red.shared.add.u32 [%r21], %r5;",
    ),
    "result of an atomic": (
        STORE, f"atom.shared.add.u32 %r5, [%r21], %r30; {OUT}",
        f"{WRITE} atom.shared.add.u32 %r5, [%r21], %r30; {OUT}",
    ),
    "exchanged": (
        STORE, f"atom.shared.exch.b32 %r5, [%r21], %r30; {OUT}",
        f"atom.shared.exch.b32 %r5, [%r21], %r30; {LOAD} {OUT}",
    ),
    "compared": (
        STORE,
        f"{LOAD} atom.global.cas.b32 %r6, [%addr1], %r5, %r30;",
        f"{LOAD} atom.global.cas.b32 %r6, [%addr1], %r30, %r30;",
    ),
    "new value of a comparison": (
        STORE,
        f"{LOAD} atom.global.cas.b32 %r6, [%addr1], %r30, %r5;",
        f"{LOAD} atom.shared.cas.b32 %r6, [%r21], %r30, %r5;",
    ),
    "transaction count": (
        OPERAND,
        f"{LOAD} setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r20+512], 1; "
        "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r20+512], %r5;",
        f"{LOAD} setp.eq.u32 %p1, %i0, 0; @%p1 mbarrier.init.shared.b64 [%r20+512], 1; "
        "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r20+512], %r30;",
    ),
    "named barrier": (
        OPERAND, f"{LOAD} and.b32 %r5, %r5, 7; bar.sync %r5, 32;",
        f"{LOAD} and.b32 %r5, %r30, 7; bar.sync %r5, 32;",
    ),
    "shuffle": (
        STORE,
        f"{EVEN} {LOAD} shfl.sync.idx.b32 %r5, %r5, 1, 31, -1; {OUT}",
        f"{EVEN} {LOAD} shfl.sync.idx.b32 %r5, %r5, 2, 31, -1; {OUT}",
    ),
    "shuffle by lane": (
        STORE,
        f"{EVEN} {LOAD} xor.b32 %r6, %i0, 1; shfl.sync.idx.b32 %r5, %r5, %r6, 31, -1; @!%p5 {OUT}",
        f"{EVEN} {LOAD} xor.b32 %r6, %i0, 1; shfl.sync.idx.b32 %r5, %r5, %r6, 31, -1; @%p5 {OUT}",
    ),
    "vote": (
        BRANCH,
        f"{EVEN} {LOAD} setp.ne.u32 %p1, %r5, 0; vote.sync.any.pred %p2, %p1, -1; @%p2 bra L; L:",
        f"{EVEN} {LOAD} setp.ne.u32 %p1, %r5, 0; and.pred %p1, %p1, !%p5; "
        "vote.sync.any.pred %p2, %p1, -1; @%p2 bra L; L:",
    ),
    "matrix load": (
        STORE,
        "shl.b32 %r1, %i0, 4; add.u32 %r1, %r20, %r1; setp.lt.u32 %p1, %i0, 7; "
        "@%p1 st.shared.v4.b32 [%r1], {%r30, %r30, %r30, %r30}; bar.warp.sync -1; "
        f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r5}}, [%r1]; {OUT}",
        "shl.b32 %r1, %i0, 4; add.u32 %r1, %r20, %r1; setp.lt.u32 %p1, %i0, 7; "
        "@%p1 st.shared.v4.b32 [%r1], {%r30, %r30, %r30, %r30}; bar.warp.sync -1; "
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r1]; "
        f"setp.lt.u32 %p2, %i0, 28; @%p2 {OUT}",
    ),
    "cp.async": (
        STORE,
        f"cp.async.ca.shared.global [%r21+2048], [%addr1], 4; cp.async.wait_all; {LOAD} {OUT}",
        f"cp.async.ca.shared.global [%r21], [%addr1], 4, 0; cp.async.wait_all; {LOAD} {OUT}",
    ),
    "bulk store": (
        STORE,
        f"{WRITE} fence.proxy.async; bar.warp.sync -1; setp.eq.u32 %p1, %i0, 0; "
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%addr1], [%r20], 144; "
        "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;",
        f"{WRITE} fence.proxy.async; bar.warp.sync -1; setp.eq.u32 %p1, %i0, 0; "
        "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%addr1], [%r20], 128; "
        "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;",
    ),
    "mma.sync row": (
        STORE,
        f"{EVEN} {LOAD} mov.b32 %r10, 0; setp.eq.u32 %p1, %i0, 5; selp.b32 %r5, %r5, %r10, %p1; "
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, "
        "{%r5, %r10, %r10, %r10}, {%r10, %r10}, {%r10, %r10, %r10, %r10}; "
        "st.global.b32 [%addr1], %r1;",
        f"{EVEN} {LOAD} mov.b32 %r10, 0; setp.eq.u32 %p1, %i0, 5; selp.b32 %r5, %r5, %r10, %p1; "
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2, %r3, %r4}, "
        "{%r5, %r10, %r10, %r10}, {%r10, %r10}, {%r10, %r10, %r10, %r10}; "
        "st.global.b32 [%addr1], %r3; setp.gt.u32 %p2, %i0, 7; @%p2 st.global.b32 [%addr1], %r1;",
    ),
}  # fmt: skip


def launch(body: str, **options: object) -> object:
    return run(module(HEAD + body, ".param .u64 a"), [np.ones(64, np.uint32)], **options)


@pytest.mark.parametrize("name", PAIRS)
def test_a_use_of_poison_is_refused_and_its_legal_twin_runs(name: str) -> None:
    rule, broken, legal = PAIRS[name]
    with pytest.raises(EmulationError) as error:
        launch(broken, rules="enforce")
    assert error.value.rule == rule, str(error.value)
    report = launch(legal, rules="enforce")
    assert not [f for f in report.findings if f.rule.startswith("poison")]
    launch(broken)  # the plain form does not look


@pytest.mark.parametrize("name", ["shared memory", "cp.async", "bulk store"])
def test_delayed_operations_move_their_poison_when_they_are_performed(name: str) -> None:
    rule, broken, legal = PAIRS[name]
    for seed in range(3):
        launch(legal, rules="enforce", seed=seed)
        with pytest.raises(EmulationError) as error:
            launch(broken, rules="enforce", seed=seed)
        assert error.value.rule == rule


def test_the_message_names_the_use_and_where_the_poison_was_read() -> None:
    text = module(HEAD + f"{EVEN}\n{LOAD}\nadd.u32 %r5, %r5, 1;\n{OUT}", ".param .u64 a")
    lines = text.splitlines()
    load, store = (1 + next(i for i, line in enumerate(lines) if s in line) for s in (LOAD, OUT))
    with pytest.raises(EmulationError) as error:
        run(text, [np.ones(64, np.uint32)], rules="enforce")
    message = str(error.value)
    for part in (
        f"kernel k, CTA (0, 0, 0), warp 0, lane 1, line {store}: st.global.b32",
        "poison: global store", "%r5 goes to global memory",
        f"line {load}, ld.shared.b32 at shared byte 0x404 of CTA rank 0",
    ):  # fmt: skip
        assert part in message, message


def test_report_goes_on_and_lists_each_instruction_once() -> None:
    a = np.ones(64, np.uint32)
    body = f"{LOAD} {OUT} setp.ne.u32 %p1, %r5, 0; @%p1 bra L; L: st.global.b32 [%addr1], %r30;"
    report = run(module(HEAD + body, ".param .u64 a"), [a], grid=3, rules="report")
    found = [(f.rule, f.severity, f.count) for f in report.findings if f.rule.startswith("poison")]
    assert found == [(STORE, "error", 3), (BRANCH, "error", 3)]
    assert (a[:32] == 7).all()


def test_global_memory_is_defined_unless_the_host_says_otherwise() -> None:
    a = np.ones(64, np.uint32)
    text = module(HEAD + "ld.global.b32 %r5, [%addr1+128]; " + OUT, ".param .u64 a")
    kernel, device = load_ptx(text, checked=True), Device("sm_107a")
    device.register(a)
    device.launch(kernel, 1, 32, [a], rules="enforce")
    device.mark_undefined(a[32:])
    with pytest.raises(EmulationError, match="at global address"):
        device.launch(kernel, 1, 32, [a], rules="enforce")
    device.mark_defined(a[32:])
    device.launch(kernel, 1, 32, [a], rules="enforce")
    device.mark_undefined(a)
    store = module(HEAD + "st.global.b32 [%addr1+128], %r30;", ".param .u64 a")
    device.launch(load_ptx(store, checked=True), 1, 32, [a], rules="enforce")
    assert (device.undefined(a), device.undefined(a[32:])) == (128, 0)
    device.launch(kernel, 1, 32, [a], rules="enforce")
    assert device.undefined(a) == 0


REDUCE = f"{WRITE} fence.proxy.async; bar.warp.sync -1; setp.eq.u32 %p1, %i0, 0; @%p1 "
REDUCE += "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%addr1], [%r20], 128; "
REDUCE += "@%p1 cp.async.bulk.commit_group; @%p1 cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize(
    "body",
    ["red.global.add.u32 [%addr1], %r30;", "atom.global.add.u32 %r6, [%addr1], %r30;", REDUCE],
)
def test_a_sum_needs_a_start(body: str) -> None:
    storage = np.ones(128, np.uint32)
    a = storage[-storage.ctypes.data % 128 // 4 :][:64]
    kernel, device = load_ptx(module(HEAD + body, ".param .u64 a"), checked=True), Device("sm_107a")
    device.register(a)
    device.launch(kernel, 1, 32, [a], rules="enforce")
    device.mark_undefined(a[20:])
    with pytest.raises(EmulationError) as error:
        device.launch(kernel, 1, 32, [a], rules="enforce")
    assert error.value.rule == STORE


def test_undefined_global_memory_stays_so_through_copies() -> None:
    a = np.ones(64, np.uint32)
    body = f"cp.async.ca.shared.global [%r21], [%addr1+128], 4; cp.async.wait_all; {LOAD} {OUT}"
    kernel, device = load_ptx(module(HEAD + body, ".param .u64 a"), checked=True), Device("sm_107a")
    device.register(a)
    device.mark_undefined(a[40:41])
    with pytest.raises(EmulationError, match="lane 8"):
        device.launch(kernel, 1, 32, [a], rules="enforce")


def test_the_plain_form_has_nothing_of_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def compiled(text: str, opt: int) -> bytes:
        texts.append(text)
        return compile_object(text, opt)

    monkeypatch.setenv("RUBIN_MOE_EMULATOR_CACHE", "")
    monkeypatch.setattr(compile_, "compile_object", compiled)
    body = module(HEAD + f"{WRITE} {LOAD} {OUT}", ".param .u64 a")
    plain, _ = load_ptx(body), load_ptx(body, checked=True)
    traces = "emu.poison", "emu.define", "emu.taint", "emu.global_", "emu.order"
    assert not [name for name in traces if name in texts[0]]
    assert [name for name in traces if name in texts[1]]
    with pytest.raises(LaunchError, match="checked=True"):
        Device("sm_107a").launch(plain, 1, 32, [np.ones(64, np.uint32)], rules="enforce")
