"""Calls of the race detector (``order/hooks.py``) from native code; without rules nothing happens.

The hooks take and return int64: addresses of blocks and slots, numbers. Their own addresses are in
the order block.
"""

from __future__ import annotations

from collections.abc import Sequence

from rubin_moe.emulator.native import blocks
from rubin_moe.emulator.native.ir import I1, I32, I64, PTR, V64, Builder, Val
from rubin_moe.emulator.native.library import runtime_function
from rubin_moe.emulator.order import layout
from rubin_moe.emulator.state.registers import FIELDS

#: What an access does, and the space that its instruction names.
READ, WRITE, ATOMIC = layout.READ, layout.WRITE, layout.ATOMIC
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel"}
SPACES = {"global": 0, "shared": 1, "generic": 2}


def access_order(parts: Sequence[str], kind: int) -> int:
    """Bits of an access kind that say how it is ordered (`order.layout`), from its opcode."""
    if parts[:2] == ("cp", "async"):
        return layout.COPY_ENGINE
    found = 0
    if kind == ATOMIC or _STRONG & set(parts):
        found |= layout.STRONG
    if {"acquire", "acq_rel"} & set(parts):
        found |= layout.ACQUIRE
    if {"release", "acq_rel"} & set(parts):
        found |= layout.RELEASE
    return found


def _wide(b: Builder, value: Val | int) -> Val:
    if isinstance(value, int):
        return b.const(value, I64)
    return value.cast("ptrtoint" if value.ty == PTR else "zext", I64)


def call_block_hook(b: Builder, name: str, block: Val, *arguments: Val | int) -> Val:
    """The result (i64) of the hook at its place in an order block."""
    place = 8 * (layout.FIRST_HOOK + layout.HOOKS.index(name))
    hook = b.field(block, place, PTR)
    wide = ", ".join(str(_wide(b, value)) for value in arguments)
    return b.emit(f"call i64 {hook.text}({wide})", I64)


def call_hook(b: Builder, name: str, S: Val, *arguments: Val | int) -> None:
    """Call a hook where accesses are followed; a violation leaves a fault in the state."""
    block = b.field(S, FIELDS["order"], PTR)
    with b.if_(block.cast("ptrtoint", I64).ne(0)):
        ok = call_block_hook(b, name, block, S, *arguments)
        with b.if_(ok.eq(0)):
            b.set_field(S, FIELDS["trap_code"], b.const(blocks.ORDER, I32))


@runtime_function(
    "emu.order_access", I1, S=PTR, a=V64, mask=I32, size=I32, kind=I32, space=I32, site=I32
)
def _order_access(
    b: Builder, S: Val, a: Val, mask: Val, size: Val, kind: Val, space: Val, site: Val
) -> None:
    """``size`` bytes at each lane's host address; false when a violation is in the state."""
    with b.if_(mask.eq(0)):
        b.ret(1, I1)
    slot = b.alloca_slot(V64)
    b.store(a, slot, 64)
    call_hook(b, "access", S, slot, mask, size, kind, site)
    b.ret(b.field(S, FIELDS["trap_code"], I32).ne(blocks.ORDER), I1)


def _define(name: str, *arguments: str) -> None:
    """``emu.order_<name>(S, ...)`` calls the hook of that name."""

    @runtime_function(f"emu.order_{name}", None, S=PTR, **dict.fromkeys(arguments, I32))
    def function(b: Builder, S: Val, *values: Val) -> None:
        call_hook(b, name, S, *values)
        b.ret()


for _name, _arguments in (
    ("converge", ()),
    ("fence", ("kind",)),
    ("cluster_wait", ()),
    ("group_commit", ("kind",)),
    ("group_wait", ("kind", "allowed", "reads")),
    ("tensor_wait", ("stores",)),
    ("load_read", ("site",)),
    ("registers_used", ("site", "write")),
    ("copies_begin", ("begin",)),
):
    _define(_name, *_arguments)
