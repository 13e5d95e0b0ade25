"""Runtime functions for the transcendental instructions: libm, one lane after another.

glibc's float32 functions are within one ulp, closer than the ``approx`` instructions promise.
"""

from __future__ import annotations

from rubin_moe.emulator.native.ir import F32V, I64, LANES, Builder, Type, Val
from rubin_moe.emulator.native.library import runtime_function

_F32 = Type("f", 32)


def _define(name: str, libm: str) -> None:
    @runtime_function(f"emu.{name}", F32V, x=F32V)
    def function(b: Builder, x: Val) -> None:
        memory = b.alloca_slot(F32V)
        b.store(x, memory, 64)
        for lane in range(LANES):
            slot = b.gep(memory, b.const(4 * lane, I64))
            b.store(b.call(libm, _F32, b.load(slot, _F32)), slot)
        b.ret(b.load(memory, F32V, 64), F32V)


for _name, _libm in (
    ("ex2", "exp2f"),
    ("lg2", "log2f"),
    ("sin", "sinf"),
    ("cos", "cosf"),
    ("tanh", "tanhf"),
):
    _define(_name, _libm)
