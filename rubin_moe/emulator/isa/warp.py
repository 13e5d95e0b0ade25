"""Warp collectives: shuffles, votes, reductions, elect, matrix fragments (PTX ISA 9.7.9, 9.7.13).

Before each of them the warp has come together as far as the member mask asks (Emitter.rendezvous).
"""

from __future__ import annotations

from rubin_moe.emulator.codegen import Emitter
from rubin_moe.emulator.isa.floating import canonical_nan
from rubin_moe.emulator.isa.integer import type_bits
from rubin_moe.emulator.isa.memory import checked_address
from rubin_moe.emulator.native.ir import I32, V1, V32, V64, Val
from rubin_moe.emulator.native.order import READ, WRITE
from rubin_moe.emulator.ptx.ast import Imm, Instruction, Operand, Pair, Vec


def _members(em: Emitter, operand: Operand) -> Val:
    """The member mask as a scalar."""
    em.require_operands((operand,), em.mask)
    return em.uniform(operand, 32, em.mask)


def _destinations(operand: Operand) -> tuple[Operand, Operand | None]:
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def emit_shuffle(em: Emitter, ins: Instruction) -> None:
    """shfl.sync: idx, up, down, bfly with segment clamps."""
    em.rendezvous(_members(em, ins.operands[4]))
    mode = ins.parts[2]
    value = em.read(ins.operands[1], 32)
    lane, clamp = em.b.lane_numbers(), em.read(ins.operands[3], 32)
    dest, valid = _destinations(ins.operands[0])
    index, limit = ins.operands[2], ins.operands[3]
    if mode == "idx" and isinstance(index, Imm) and limit == Imm(31) and valid is None:
        lanes = [int(index.value) & 31] * 32
        em.permuted(dest, lanes)
        em.write(dest, value.shuffle(None, lanes))
        return
    if mode == "bfly" and isinstance(index, Imm) and limit == Imm(31) and valid is None:
        lanes = [i ^ (int(index.value) & 31) for i in range(32)]
        em.permuted(dest, lanes)
        em.write(dest, value.shuffle(None, lanes))
        return
    distance = em.read(index, 32) & 31
    segment = clamp >> 8 & 31
    high = (lane & segment) | (clamp & 31 & ~segment)
    if mode == "idx":
        source = (lane & segment) | (distance & ~segment)
        inside = source.cmp("ule", high)
    elif mode == "up":
        source = lane - distance
        inside = source.cmp("sge", high)
    elif mode == "down":
        source = lane + distance
        inside = source.cmp("ule", high)
    else:
        source = lane ^ distance
        inside = source.cmp("ule", high)
    source = inside.select(source, lane)
    em.permuted(dest, source)
    em.write(dest, em.b.call("emu.permute", V32, value, source))
    if valid is not None:
        em.write(valid, inside)


def emit_vote(em: Emitter, ins: Instruction) -> None:
    """vote.sync: ballot, any, all, uni."""
    members = _members(em, ins.operands[2])
    em.rendezvous(members)
    votes = em.predicate(ins.operands[1]).bits_as(I32)
    voters = em.exec_mask() & members
    yes = votes & voters
    mode = ins.parts[2]
    if mode == "ballot":
        em.write(ins.operands[0], yes.splat())
        return
    everyone = yes.eq(voters)
    result = {"any": yes.ne(0), "all": everyone, "uni": everyone | yes.eq(0)}[mode]
    em.write(ins.operands[0], result.splat())


def emit_warp_reduce(em: Emitter, ins: Instruction) -> None:
    """redux.sync over the member mask."""
    members = _members(em, ins.operands[2])
    em.rendezvous(members)
    op, kind = ins.parts[2], ins.parts[-1]
    value = em.read(ins.operands[1], 32)
    voters = (em.exec_mask() & members).bits_as(V1)
    if kind == "f32":
        _reduce_float(em, ins, value, voters)
        return
    signed = kind == "s32"
    name = {"min": "smin" if signed else "umin", "max": "smax" if signed else "umax"}.get(op, op)
    neutral = {
        "add": 0, "or": 0, "xor": 0, "and": -1, "umax": 0, "umin": -1,
        "smax": -(1 << 31), "smin": (1 << 31) - 1,
    }[name]  # fmt: skip
    masked = voters.select(value, neutral)
    em.write(ins.operands[0], em.b.call(f"llvm.vector.reduce.{name}.v32i32", I32, masked).splat())


def _reduce_float(em: Emitter, ins: Instruction, value: Val, voters: Val) -> None:
    op = ins.parts[2]
    if "abs" in ins.parts:
        value = value & 0x7FFFFFFF
    order = value ^ (value.ashr(31) & 0x7FFFFFFF)
    nan = (value & 0x7FFFFFFF).cmp("ugt", 0x7F800000)
    neutral = 0x7FFFFFFF if op == "min" else -(1 << 31)
    masked = (voters & ~nan).select(order, neutral)
    best = em.b.call(f"llvm.vector.reduce.s{op}.v32i32", I32, masked).splat()
    result = best ^ (best.ashr(31) & 0x7FFFFFFF)
    any_nan = (nan & voters).bits_as(I32).ne(0)
    all_nan = (voters & ~nan).bits_as(I32).eq(0)
    bad = any_nan if "NaN" in ins.parts else all_nan
    em.write(ins.operands[0], canonical_nan(bad.splat().select(0x7FFFFFFF, result).as_float()))


def emit_match(em: Emitter, ins: Instruction) -> None:
    """match.any (lanes with my value) and match.all (the mask if all agree)."""
    members = _members(em, ins.operands[2])
    em.rendezvous(members)
    value = em.read(ins.operands[1], type_bits(ins.parts[-1])).resize(64)
    voters = em.exec_mask() & members
    same = em.b.call("emu.match_any", V32, value, voters)
    dest, valid = _destinations(ins.operands[0])
    if ins.parts[1] == "any":
        em.write(dest, same)
        return
    agree = same.lane(em.first_lane(voters)).eq(voters).splat()
    em.write(dest, agree.select(voters.splat(), 0))
    if valid is not None:
        em.write(valid, agree)


def emit_elect(em: Emitter, ins: Instruction) -> None:
    """elect.sync: the lowest lane of the member mask leads."""
    members = _members(em, ins.operands[1])
    em.rendezvous(members)
    leader = em.first_lane(em.exec_mask() & members)
    dest, valid = _destinations(ins.operands[0])
    em.write(dest, leader.splat())
    if valid is not None:
        em.write(valid, em.b.lane_numbers().eq(leader.splat()))


def emit_active_mask(em: Emitter, ins: Instruction) -> None:
    """activemask: lanes that execute together now."""
    em.write(ins.operands[0], em.exec_mask().splat())


def emit_warp_barrier(em: Emitter, ins: Instruction) -> None:
    """bar.warp.sync: the rendezvous is all there is to it."""
    em.rendezvous(_members(em, ins.operands[0]))


def emit_transpose(em: Emitter, ins: Instruction) -> None:
    """movmatrix: an 8x8 matrix of 16-bit elements, two a lane, transposed.

    Lane i holds row i/4, columns 2(i%4) and 2(i%4)+1.
    """
    em.rendezvous(None)
    value = em.read(ins.operands[1], 32)
    halves = []
    for part in range(2):
        # element (row r, column c) of the result is (c, r) of the source
        rows = [lane // 4 for lane in range(32)]
        columns = [2 * (lane % 4) + part for lane in range(32)]
        source = [4 * c + r // 2 for r, c in zip(rows, columns, strict=True)]
        moved = value.shuffle(None, source)
        odd = em.b.vector([16 * (r % 2) for r in rows], V32)
        halves.append(moved >> odd & 0xFFFF)
    em.write(ins.operands[0], halves[0] | halves[1] << 16)


def _matrix_operands(ins: Instruction) -> tuple[int, bool]:
    return int(next(p for p in ins.parts if p in ("x1", "x2", "x4"))[1:]), "trans" in ins.parts


def _matrix_addresses(em: Emitter, where: Operand, count: int, mask: Val, kind: int) -> Val:
    """Checked host addresses of the matrices' rows, one a lane (lanes of unused matrices idle)."""
    used = mask & ((1 << 8 * count) - 1 if count < 4 else -1)
    address = checked_address(em, where, "shared", 16, used)
    em.accessed(address, used, 16, kind, "shared")
    return address


def emit_matrix_load(em: Emitter, ins: Instruction) -> None:
    """ldmatrix: 8x8 matrices of 16-bit elements; lanes 8m..8m+7 hold the rows of matrix m."""
    em.rendezvous(None)
    count, transposed = _matrix_operands(ins)
    mask = em.exec_mask()
    rows = _matrix_addresses(em, ins.operands[1], count, mask, READ)
    dest = ins.operands[0]
    items = dest.items if isinstance(dest, Vec) else (dest,)
    for matrix, item in enumerate(items):
        if not transposed:
            base = rows.shuffle(None, [8 * matrix + lane // 4 for lane in range(32)])
            place = base + em.b.vector([4 * (lane % 4) for lane in range(32)], V64)
            em.loaded((item,), place, mask, 32, "shared")
            em.write(item, em.b.call("emu.load32", V32, place, mask))
            continue
        halves, places = [], []
        for part in range(2):
            row = [8 * matrix + 2 * (lane % 4) + part for lane in range(32)]
            place = rows.shuffle(None, row) + em.b.vector([2 * (i // 4) for i in range(32)], V64)
            places.append(place)
            half = em.b.call("emu.load16", V32.with_bits(16), place, mask)
            halves.append(half.resize(32))
        em.gathered(item, places, mask, 16)
        em.write(item, halves[0] | halves[1] << 16)


def emit_matrix_store(em: Emitter, ins: Instruction) -> None:
    """stmatrix: the inverse of ldmatrix."""
    em.rendezvous(None)
    count, transposed = _matrix_operands(ins)
    mask = em.exec_mask()
    rows = _matrix_addresses(em, ins.operands[0], count, mask, WRITE)
    source = ins.operands[1]
    items = source.items if isinstance(source, Vec) else (source,)
    for matrix, item in enumerate(items):
        value = em.read(item, 32)
        if not transposed:
            base = rows.shuffle(None, [8 * matrix + lane // 4 for lane in range(32)])
            place = base + em.b.vector([4 * (lane % 4) for lane in range(32)], V64)
            em.stored((item,), place, mask, 32, "shared")
            em.b.call("emu.store32", None, place, value, mask)
            continue
        for part in range(2):
            row = [8 * matrix + 2 * (lane % 4) + part for lane in range(32)]
            place = rows.shuffle(None, row) + em.b.vector([2 * (i // 4) for i in range(32)], V64)
            em.scattered(item, part, place, mask, 16)
            em.b.call("emu.store16", None, place, (value >> 16 * part).resize(16), mask)


EMITTERS = {
    "warp_shuffle": emit_shuffle,
    "warp_vote": emit_vote,
    "warp_reduce": emit_warp_reduce,
    "warp_match": emit_match,
    "warp_elect": emit_elect,
    "warp_mask": emit_active_mask,
    "warp_barrier": emit_warp_barrier,
    "transpose": emit_transpose,
    "matrix_load": emit_matrix_load,
    "matrix_store": emit_matrix_store,
}
