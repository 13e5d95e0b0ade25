"""mbarrier instructions, local and remote (PTX ISA 9.7.13.15)."""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.native.ir import I1, I32, I64, V1, V32, V64, Val
from rubin_moe.emulator.ptx.ast import Instruction, Mem, Operand
from rubin_moe.emulator.state.registers import Outcome, Status


def barrier_address(em: Emitter, operand: Operand, ins: Instruction, mask: Val) -> Val:
    """shared::cluster addresses of 8-byte barriers; generic addresses are converted."""
    em.require_address(operand, mask)
    em.require_operands(ins.operands[ins.operands.index(operand) + 1 :], mask)
    if any(part.startswith("shared") for part in ins.parts):
        address = em.address(operand, 32)
    else:
        generic = em.address(operand, 64) - em.field("smem", I64).splat()
        address = generic.resize(32)
    if em.checked:
        em.set_field("site", em.index)
    size = em.b.const(8, I32)
    em.trap_unless(em.b.call("emu.check_shared", I1, em.S, address, mask, size))
    return address


def emit_init(em: Emitter, ins: Instruction) -> None:
    """mbarrier.init, mbarrier.inval."""
    mask = em.exec_mask()
    address = barrier_address(em, ins.operands[0], ins, mask)
    if ins.parts[1] == "inval":
        place = address.cast("zext", V64) + em.field("smem", I64).splat()
        em.b.call("emu.store64", None, place, em.b.const(0, V64), mask)
        return
    count = em.read(ins.operands[1], 32)
    if em.checked:
        em.defined(address.cast("zext", V64) + em.field("smem", I64).splat(), mask, 8)
    em.b.call("emu.mbarrier_init", None, em.S, address, count, mask)
    em.trap_if_recorded()


def emit_arrive(em: Emitter, ins: Instruction) -> None:
    """arrive, arrive_drop, with expect_tx or a count; the state token is the word before."""
    mask = em.exec_mask()
    where = next(i for i, operand in enumerate(ins.operands) if isinstance(operand, Mem))
    address = barrier_address(em, ins.operands[where], ins, mask)
    rest = ins.operands[where + 1 :]
    one = em.b.const(1, V32)
    if "expect_tx" in ins.parts:
        tx, count = em.read(rest[0], 32), one
    else:
        tx, count = em.b.const(0, V32), em.read(rest[0], 32) if rest else one
    drop = em.b.const(1 if ins.parts[1] == "arrive_drop" else 0, I32)
    token = em.b.call("emu.mbarrier_arrive", V64, em.S, address, count, tx, drop, mask)
    em.trap_if_recorded()
    if where > 0:
        em.write(ins.operands[0], token)


def emit_tx(em: Emitter, ins: Instruction) -> None:
    """expect_tx and complete_tx."""
    mask = em.exec_mask()
    address = barrier_address(em, ins.operands[0], ins, mask)
    tx = em.read(ins.operands[1], 32)
    if ins.parts[1] == "complete_tx":
        tx = -tx
    zero = em.b.const(0, V32)
    em.b.call("emu.mbarrier_arrive", V64, em.S, address, zero, tx, em.b.const(0, I32), mask)
    em.trap_if_recorded()


def emit_wait(em: Emitter, ins: Instruction) -> None:
    """try_wait suspends the warp until the phase completes or the scheduler lets it time out, if
    all lanes wait for one and the same; else they spin, each on its own. test_wait never waits."""
    mask = em.exec_mask()
    address = barrier_address(em, ins.operands[1], ins, mask)
    if "parity" in ins.parts:
        parity = em.read(ins.operands[2], 32) & 1
    else:
        parity = (em.read(ins.operands[2], 64) >> 61).resize(32) & 1
    passed = em.b.call("emu.mbarrier_test", I32, em.S, address, parity, mask)
    em.trap_if_recorded()
    if ins.parts[1] == "try_wait":
        _suspend(em, address, parity, passed, mask)
    em.write(ins.operands[0], passed.bits_as(V1))


def _suspend(em: Emitter, address: Val, parity: Val, passed: Val, mask: Val) -> None:
    b = em.b
    go_on, pending, wait, expired = (b.fresh(s) for s in ("passed", "pending", "wait", "expired"))
    b.cond_br(passed.eq(mask), go_on, pending)
    b.label(pending)
    first = em.first_lane(mask)
    others = address.ne(address.lane(first).splat()) | parity.ne(parity.lane(first).splat())
    together = passed.eq(0) & (others.bits_as(I32) & mask).eq(0)
    b.cond_br(together & em.whole() & em.field("timed_out", I32).eq(0), wait, expired)
    b.label(wait)
    em.set_field("site", em.index)
    em.set_field("status", Status.MBARRIER)
    em.set_field("resume", em.number)
    b.ret(Outcome.WAIT)
    b.label(expired)
    em.set_field("timed_out", 0)
    em.set_field("budget", 0)  # the loop around it gives way at once
    b.br(go_on)
    b.label(go_on)


def emit_cp_async_arrive(em: Emitter, ins: Instruction) -> None:
    """cp.async.mbarrier.arrive: copies are complete, so the arrival happens now.

    Without ``.noinc`` the pending count is first raised by one, so that nothing changes but a
    phase that would have completed.
    """
    mask = em.exec_mask()
    address = barrier_address(em, ins.operands[0], ins, mask)
    if "noinc" not in ins.parts and not em.checked:
        return
    count, zero = em.b.const(int("noinc" in ins.parts), V32), em.b.const(0, V32)
    em.ordered("copies_begin", 1)
    em.b.call("emu.mbarrier_arrive", V64, em.S, address, count, zero, em.b.const(0, I32), mask)
    em.ordered("copies_begin", 0)
    em.trap_if_recorded()


EMITTERS = {
    "mbarrier_init": emit_init,
    "mbarrier_arrive": emit_arrive,
    "mbarrier_tx": emit_tx,
    "mbarrier_wait": emit_wait,
    "cp_async_arrive": emit_cp_async_arrive,
}
