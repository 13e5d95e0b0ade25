"""Everything of a call but the inner product: five functions of one argument block.

``group`` (one thread) sorts the (token, expert) pairs by local expert, each expert's in order of
tokens, and cuts them into groups of at most ``max_tokens``. ``pack`` writes the activations of a
group as a panel (see `panel`). ``fc1`` and ``fc2`` take
(expert, a few tiles of 16 weight rows) as items; ``reduce`` sums a token's experts in the order
of its ids. Any number of threads may run the last four at once: they share counters, and no two
items write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from rubin_moe.kernels.activation import GATED
from rubin_moe.kernels.cpu import convert, panel
from rubin_moe.kernels.cpu.arguments import COUNTERS, Slots, offset
from rubin_moe.kernels.cpu.decode import F32V
from rubin_moe.kernels.cpu.ir import F32, I32, I64, PTR, Function, Value
from rubin_moe.kernels.cpu.isa import LANES, Isa
from rubin_moe.kernels.cpu.panel import Product


@dataclass(frozen=True)
class Variant:
    """What the stages are generated for."""

    isa: Isa
    dtype: str
    kind: str
    product: Product

    def panel_bytes(self, k: Any) -> Any:
        """Of one token's ``k`` activations; ``k`` may be a number or a value of the code."""
        return k // LANES * panel.tile_bytes(self.product)


def stages_module(variant: Variant) -> ir.Module:
    """Functions ``group``, ``pack``, ``fc1``, ``fc2``, ``reduce`` of the argument block."""
    module = ir.Module("stages")
    _group(module, variant.isa.max_tokens)
    _pack(module, variant)
    _fc1(module, variant)
    _fc2(module, variant)
    _reduce(module, variant)
    return module


def _group(module: ir.Module, max_tokens: int) -> None:
    f = Function(module, "group", [PTR])
    a = Slots(f)
    for counter in COUNTERS:
        f.store(f.i64(0), a.block, offset(counter))
    cursor, position = a.pointer("cursor"), a.pointer("position")
    pairs = a.number("num_tokens") * a.number("top_k")
    with f.loop(a.number("num_experts")) as e:
        f.store(f.i64(0), cursor, e.i * 8)
    with f.loop(pairs) as p:
        local = _local_expert(f, a, p.i)
        f.store(local, position, p.i * 8)
        with f.when(local >= 0):
            f.store(f.load(cursor, I64, local * 8) + 1, cursor, local * 8)
    zero = f.i64(0)
    with f.loop(a.number("num_experts"), carry=[zero, zero, zero]) as e:
        active, group, start = e.carried
        count = f.load(cursor, I64, e.i * 8)
        f.store(e.i, a.pointer("active"), active * 8)
        f.store(group, a.pointer("first_group"), active * 8)
        f.store(start, cursor, e.i * 8)
        parts = (count + (max_tokens - 1)) // max_tokens
        with f.loop(parts) as j:
            f.store(start + count * j.i // parts, a.pointer("group_start"), (group + j.i) * 8)
        some = f.cast("zext", count > 0, I64)
        e.following = [active + some, group + parts, start + count]
    active, group, start = e.carried
    f.store(group, a.pointer("first_group"), active * 8)
    f.store(start, a.pointer("group_start"), group * 8)
    f.store(active, a.block, offset("num_active"))
    f.store(group, a.block, offset("num_groups"))
    with f.loop(pairs) as p:
        local = f.load(position, I64, p.i * 8)
        with f.when(local >= 0):
            at = f.load(cursor, I64, local * 8)
            f.store(at + 1, cursor, local * 8)
            f.store(at, position, p.i * 8)
            f.store(p.i, a.pointer("order"), at * 8)
    f.ret()


def _local_expert(f: Function, a: Slots, pair: Value) -> Value:
    """Local id of a pair or -1; what is no id at all is counted in ``bad_count``."""
    ids, spot = a.pointer("ids"), f.stack(8)
    with f.either(a.number("ids_wide").equals(1)) as (wide, narrow):
        with wide:
            f.store(f.load(ids, I64, pair * 8), spot)
        with narrow:
            f.store(f.cast("sext", f.load(ids, I32, pair * 4), I64), spot)
    given = f.load(spot, I64)
    bad = (given < -1) | (given >= a.number("num_global"))
    with f.when(bad):
        f.store(given, a.block, offset("bad_id"))
        f.store(f.load(a.block, I64, offset("bad_count")) + 1, a.block, offset("bad_count"))
        f.store(f.i64(-1), spot)
    mapped = a.number("expert_map").equals(0) ^ 1
    with f.when(mapped & (f.load(spot, I64) >= 0)):
        local = f.load(a.pointer("expert_map"), I32, f.load(spot, I64) * 4)
        f.store(f.cast("sext", local, I64), spot)
    local = f.load(spot, I64)
    beyond = local >= a.number("num_experts")
    with f.when(beyond):
        f.store(given, a.block, offset("bad_id"))
        f.store(f.load(a.block, I64, offset("bad_count")) + 1, a.block, offset("bad_count"))
    return f.select(beyond, f.i64(-1), local)


def _group_at(f: Function, a: Slots, group: Value) -> tuple[Value, Value]:
    """First position and number of tokens of a group."""
    start = f.load(a.pointer("group_start"), I64, group * 8)
    return start, f.load(a.pointer("group_start"), I64, group * 8 + 8) - start


def _pack(module: ir.Module, v: Variant) -> None:
    f = Function(module, "pack", [PTR])
    a = Slots(f)
    hidden = a.number("hidden")
    row_bytes = hidden * convert.DTYPE_BYTES[v.dtype]
    with f.work(a.block, offset("pack"), a.number("num_groups")) as group:
        start, tokens = _group_at(f, a, group)
        out = f.offset(a.pointer("panel13"), start * v.panel_bytes(hidden))
        with f.loop(tokens) as t:
            pair = f.load(a.pointer("order"), I64, (start + t.i) * 8)
            row = f.offset(a.pointer("x"), pair // a.number("top_k") * row_bytes)
            weight = f.load(a.pointer("weights"), F32, pair * 4)
            on_input = a.number("weight_on_input").equals(1)
            factor = f.splat(f.select(on_input, weight, f.const(F32, 1.0)), LANES)
            with f.loop(hidden // LANES) as tile:
                at = tile.i * (LANES * convert.DTYPE_BYTES[v.dtype])
                x = convert.load_f32(f, v.dtype, row, at) * factor
                place = (tokens, t.i)
                panel.store_tile(f, v.isa, v.product, v.dtype, x, out, tile.i, place)
    f.ret()


@dataclass(frozen=True)
class _Projection:
    """One projection's tensors in the argument block."""

    suffix: str
    halves: int

    def tile_product(
        self, f: Function, a: Slots, v: Variant, k: Value, at: Value, tokens: Value, x: Value
    ) -> Value:
        """fp32 ``[tokens, 16]`` on the stack: tile ``at`` (counted over all experts) times x."""
        out = f.stack(v.isa.max_tokens * 4 * LANES)
        block = a.number("block")
        codes = f.offset(a.pointer("codes" + self.suffix), at * k * (LANES // 2))
        scales = f.offset(a.pointer("scales" + self.suffix), at * (k // block) * LANES)
        gemm = f.load(a.pointer("gemm"), I64, tokens * 8 - 8)
        f.call_address(gemm, codes, scales, k // block, x, out)
        return out

    def finish(self, f: Function, a: Slots, e: Value, half: int, row: Value, acc: Value) -> Value:
        """``acc * dec + bias`` for 16 rows from ``row`` on."""
        dec = f.load(a.pointer("dec" + self.suffix), F32, (e * self.halves + half) * 4)
        stride = a.number(f"bias{self.suffix}_stride")
        bias = f.load(a.pointer("bias" + self.suffix), F32V, (e * stride + row) * 4)
        return f.fma(acc, f.splat(dec, LANES), bias)


def _tiles(f: Function, item: Value, tiles: Value, step: Value) -> tuple[Value, Value, Value]:
    """Index among the active experts, first tile and end of an item."""
    items = (tiles + step - 1) // step
    first = item % items * step
    end = first + step
    return item // items, first, f.select(end < tiles, end, tiles)


def _items(a: Slots, tiles: Value, step: Value) -> Value:
    return a.number("num_active") * ((tiles + step - 1) // step)


def _fc1(module: ir.Module, v: Variant) -> None:
    f = Function(module, "fc1", [PTR])
    a = Slots(f)
    w13 = _Projection("13", 2 if v.kind in GATED else 1)
    hidden, inter = a.number("hidden"), a.number("intermediate")
    tiles, step = inter // LANES, a.number("tiles_per_item13")
    with f.work(a.block, offset("fc1"), _items(a, tiles, step)) as item:
        index, first, end = _tiles(f, item, tiles, step)
        e = f.load(a.pointer("active"), I64, index * 8)
        groups = [f.load(a.pointer("first_group"), I64, (index + i) * 8) for i in (0, 1)]
        with f.loop(end, first) as tile, f.loop(groups[1], groups[0]) as group:
            start, tokens = _group_at(f, a, group.i)
            x = f.offset(a.pointer("panel13"), start * v.panel_bytes(hidden))
            out = f.offset(a.pointer("panel2"), start * v.panel_bytes(inter))
            sums = []
            for half in range(w13.halves):
                at = e * (tiles * w13.halves) + tiles * half + tile.i
                sums.append(w13.tile_product(f, a, v, hidden, at, tokens, x))
            with f.loop(tokens) as t:
                h = [
                    w13.finish(
                        f, a, e, half, inter * half + tile.i * LANES,
                        f.load(acc, F32V, t.i * (4 * LANES)),
                    )
                    for half, acc in enumerate(sums)
                ]  # fmt: skip
                act, place = _activated(f, a, v, h), (tokens, t.i)
                panel.store_tile(f, v.isa, v.product, v.dtype, act, out, tile.i, place)
    f.ret()


def _activated(f: Function, a: Slots, v: Variant, h: list[Value]) -> Value:
    if v.kind not in GATED:
        return convert.squared_relu(f, h[0])
    gate, up = convert.clamped(f, h[0], h[1], a.number("limit", F32))
    return convert.gated(f, v.kind, gate, up, a.number("alpha", F32), a.number("beta", F32))


def _fc2(module: ir.Module, v: Variant) -> None:
    f = Function(module, "fc2", [PTR])
    a = Slots(f)
    w2 = _Projection("2", 1)
    hidden, inter = a.number("hidden"), a.number("intermediate")
    tiles, step = hidden // LANES, a.number("tiles_per_item2")
    with f.work(a.block, offset("fc2"), _items(a, tiles, step)) as item:
        index, first, end = _tiles(f, item, tiles, step)
        e = f.load(a.pointer("active"), I64, index * 8)
        groups = [f.load(a.pointer("first_group"), I64, (index + i) * 8) for i in (0, 1)]
        with f.loop(end, first) as tile, f.loop(groups[1], groups[0]) as group:
            start, tokens = _group_at(f, a, group.i)
            x = f.offset(a.pointer("panel2"), start * v.panel_bytes(inter))
            acc = w2.tile_product(f, a, v, inter, e * tiles + tile.i, tokens, x)
            with f.loop(tokens) as t:
                sums = f.load(acc, F32V, t.i * (4 * LANES))
                y = w2.finish(f, a, e, 0, tile.i * LANES, sums)
                f.store(y, a.pointer("y"), ((start + t.i) * hidden + tile.i * LANES) * 4)
    f.ret()


def _reduce(module: ir.Module, v: Variant) -> None:
    f = Function(module, "reduce", [PTR])
    a = Slots(f)
    hidden, top_k = a.number("hidden"), a.number("top_k")
    row_bytes = hidden * convert.DTYPE_BYTES[v.dtype]
    on_input = a.number("weight_on_input").equals(1)
    with f.work(a.block, offset("reduce"), a.number("num_tokens")) as token:
        out = f.offset(a.pointer("out"), token * row_bytes)
        with f.loop(hidden // LANES) as tile:
            with f.loop(top_k, carry=[f.const(F32V, 0.0)]) as j:
                pair = token * top_k + j.i
                at = f.load(a.pointer("position"), I64, pair * 8)
                # neither the weight nor the row of an absent expert is read: both may be NaN
                there = at >= 0
                weight = f.load(a.pointer("weights"), F32, pair * 4)
                weight = f.select(on_input, f.const(F32, 1.0), weight)
                weight = f.select(there, weight, f.const(F32, 0.0))
                row = f.offset(a.pointer("y"), at * hidden * 4)
                row = f.select(there, row, a.pointer("zeros"))
                y = f.load(row, F32V, tile.i * (4 * LANES))
                j.following = [f.fma(f.splat(weight, LANES), y, j.carried[0])]
            at = tile.i * (LANES * convert.DTYPE_BYTES[v.dtype])
            convert.store_rounded(f, v.dtype, j.carried[0], out, at)
    f.ret()
