"""PTX text to an abstract syntax tree."""

from rubin_moe.emulator.ptx.ast import Entry, Instruction, PtxModule
from rubin_moe.emulator.ptx.lexer import PtxSyntaxError
from rubin_moe.emulator.ptx.parser import parse_ptx

__all__ = ["Entry", "Instruction", "PtxModule", "PtxSyntaxError", "parse_ptx"]
