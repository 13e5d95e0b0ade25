"""Machine code of compiled kernels, read for what PTX does not show."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rubin_moe.kernels.launch import CompiledKernel

PRODUCTS = ("HGMMA", "QGMMA")  # wgmma on 16 and on 8 bits


def disassembler() -> str | None:
    """nvdisasm of a toolkit, or Triton's."""
    found = shutil.which("nvdisasm")
    spec = find_spec("triton")
    if found or spec is None or spec.origin is None:
        return found
    bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(bundled) if bundled.is_file() else None


@dataclass(frozen=True)
class Instruction:
    """``opcode`` with its modifiers; operands as printed."""

    opcode: str
    operands: tuple[str, ...]

    @property
    def registers(self) -> int:
        """That the first operand stands for."""
        if ".128" in self.opcode:
            return 4
        return 2 if ".64" in self.opcode or "WIDE" in self.opcode else 1

    @property
    def written(self) -> set[int]:
        """Registers; none for what stores or is no ordinary instruction."""
        at = register(self.operands[0]) if self.operands else None
        if at is None or self.opcode.startswith(("ST", "SYNCS", "RED", *PRODUCTS)):
            return set()
        return set(range(at, at + self.registers))


def register(operand: str) -> int | None:
    match = re.fullmatch(r"R(\d+)(\.\w+)?", operand)
    return int(match[1]) if match else None


def instructions(kernel: CompiledKernel) -> list[Instruction]:
    """In the order of their addresses."""
    tool = disassembler()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        text = subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout
    return list(_parsed(text))


def _parsed(text: str) -> Iterator[Instruction]:
    for line in text.splitlines():
        match = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", line)
        if match:
            operands = (o.strip() for o in match[2].split(","))
            yield Instruction(match[1], tuple(o for o in operands if o))


@dataclass(frozen=True)
class Product:
    """Registers of one wgmma."""

    a: set[int]
    acc: set[int]


def product_of(ins: Instruction) -> Product:
    rows, acc, a = re.search(r"x(\d+)x\d+", ins.opcode), *map(register, ins.operands[:2])
    assert rows is not None
    assert acc is not None
    assert a is not None
    return Product(set(range(a, a + 4)), set(range(acc, acc + int(rows[1]) // 2)))


def touched_in_flight(code: list[Instruction]) -> list[Instruction]:
    """What writes A's registers of a wgmma, or touches its accumulators, before the
    WARPGROUP.DEPBAR that covers it, in a straight walk through the code."""
    bad: list[Instruction] = []
    groups: list[list[Product]] = []
    current: list[Product] = []
    for ins in code:
        if ins.opcode.startswith(PRODUCTS):
            current.append(product_of(ins))
            if any("gsb0" in o for o in ins.operands):
                groups.append(current)
                current = []
        elif ins.opcode.startswith("WARPGROUP.DEPBAR"):
            pending = int(ins.operands[-1], 16)
            groups = groups[len(groups) - pending :] if pending else []
        else:
            read = {register(o) for o in ins.operands[1:]}
            running = [p for group in (*groups, current) for p in group]
            if any(ins.written & (p.a | p.acc) or read & p.acc for p in running):
                bad.append(ins)
    return bad
