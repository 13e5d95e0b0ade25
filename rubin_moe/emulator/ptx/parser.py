"""PTX text to :class:`~rubin_moe.emulator.ptx.ast.PtxModule`.

Reads what CuTe DSL 4.8, Triton 3 and nvcc emit: several entries a file, ``.param`` arrays, module
and function variables, scoped inline-assembly blocks that reuse register and label names.
Device functions and calls are refused: none of these compilers leaves them in kernels of our kind.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache

from rubin_moe.emulator.ptx.ast import (
    TYPE_BITS,
    Entry,
    Imm,
    Instruction,
    Mem,
    Not,
    Operand,
    Pair,
    Param,
    PtxModule,
    Reg,
    Sym,
    Variable,
    Vec,
)
from rubin_moe.emulator.ptx.lexer import (
    LineIndex,
    PtxSyntaxError,
    Statement,
    split_commas,
    statements,
    strip_comments,
)

_ENTRY = re.compile(r"(?:\.visible\s+|\.weak\s+|\.extern\s+)*\.entry\s+([\w$]+)\s*")
_FUNC = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+|\.extern\s+)*\.func\b", re.M)
_VARIABLE = re.compile(
    r"(?P<extern>\.extern\s+)?(?:\.visible\s+|\.weak\s+)*\.(?P<space>shared|global|const|local)\s+"
    r"(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$%]+)\s*"
    r"(?P<dims>(?:\[\s*\d*\s*\])*)\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?:\.ptr\s*(?:\.(?!align)\w+\s*)*(?:\.align\s+\d+\s+)?)?(?P<name>[\w$]+)\s*(?:\[(?P<count>\d+)\])?"
)
_DIRECTIVE = re.compile(r"\.(\w+)((?:\s*,?\s*\d+)*)")
_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_NUMBER = re.compile(r"[+-]?\s*(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")
_DECIMAL = re.compile(r"[+-]?\d+\.\d*(?:[eE][+-]?\d+)?$")
_OFFSET = re.compile(r"(.*?)\s*\+\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))$", re.S)


def _integer(text: str) -> int:
    text = text.replace(" ", "").rstrip("U")
    digits = text.lstrip("+-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    return int(text, 8) if octal else int(text, 0)


@lru_cache(maxsize=65536)
def parse_operand(text: str) -> Operand:
    """One operand, with names as written (scopes are resolved by the caller)."""
    if text.startswith("{"):
        return Vec(tuple(parse_operand(item) for item in split_commas(text[1:-1])))
    if text.startswith("["):
        return _parse_memory(text[1:-1].strip())
    if text.startswith("!"):
        return Not(Reg(text[1:].strip()))
    if "|" in text:
        first, second = text.split("|")
        return Pair(parse_operand(first.strip()), parse_operand(second.strip()))
    if match := _FLOAT_BITS.match(text):
        return Imm(int(match.group(1) or match.group(2), 16))
    if text[0].isdigit() or text[0] in "+-":
        if _NUMBER.match(text):
            return Imm(_integer(text))
        if _DECIMAL.match(text):
            return Imm(float(text))
        raise PtxSyntaxError(f"literal {text!r} is not understood")
    if match := _OFFSET.match(text):
        return Sym(match.group(1), _integer(match.group(2)))
    return Reg(text) if text[0] == "%" or text == "_" else Sym(text)


def _parse_memory(text: str) -> Mem:
    items = split_commas(text)
    coords = parse_operand(items[1]) if len(items) > 1 else None
    if coords is not None and not isinstance(coords, Vec):
        raise PtxSyntaxError(f"coordinates {items[1]!r} are not a vector")
    if match := _OFFSET.match(items[0]):
        return Mem(parse_operand(match.group(1).strip()), _integer(match.group(2)), coords)
    return Mem(parse_operand(items[0]), 0, coords)


class _Scopes:
    """Names declared in nested blocks; inner names get a unique suffix.

    Registers may be declared without ``%`` (inline assembly does): their uses parse as symbols and
    become registers here.
    """

    def __init__(self, registers: dict[str, str]) -> None:
        self._stack: list[dict[str, str]] = []
        self._count = 0
        self._registers = registers
        self._plain_registers = False

    def push(self) -> None:
        self._count += 1
        self._stack.append({})

    def pop(self) -> None:
        self._stack.pop()

    def declare(self, name: str, register: bool = False) -> str:
        self._plain_registers |= register and not name.startswith("%")
        if not self._stack:
            return name
        unique = f"{name}@{self._count}"
        self._stack[-1][name] = unique
        return unique

    @property
    def active(self) -> bool:
        return self._plain_registers or any(self._stack)

    def resolve(self, name: str) -> str:
        for scope in reversed(self._stack):
            if name in scope:
                return scope[name]
        return name

    def rename(self, operand: Operand) -> Operand:
        match operand:
            case Reg(name):
                return Reg(self.resolve(name))
            case Sym(name, offset):
                unique = self.resolve(name)
                return Reg(unique) if unique in self._registers else Sym(unique, offset)
            case Not(reg):
                return Not(Reg(self.resolve(reg.name)))
            case Vec(items):
                return Vec(tuple(self.rename(item) for item in items))
            case Pair(first, second):
                return Pair(self.rename(first), self.rename(second))
            case Mem(base, offset, coords):
                renamed = self.rename(coords) if coords is not None else None
                return Mem(self.rename(base), offset, renamed)  # type: ignore[arg-type]
            case _:
                return operand


def _declare_registers(text: str, scopes: _Scopes, registers: dict[str, str]) -> None:
    kind, _, names = text[4:].strip().partition(" ")
    kind = kind.lstrip(".")
    if kind.startswith("v") and names.strip().startswith("."):
        raise PtxSyntaxError(f"vector register declaration {text!r} is not modelled")
    if kind not in TYPE_BITS:
        raise PtxSyntaxError(f"register type .{kind} is not modelled")
    for declared in (item.strip() for item in names.split(",")):
        if match := re.match(r"(.+?)<(\d+)>$", declared):
            for number in range(int(match.group(2))):
                name = f"{match.group(1)}{number}"
                registers[scopes.declare(name, register=True)] = kind
        else:
            registers[scopes.declare(declared, register=True)] = kind


def _element_bytes(kind: str, init: str) -> bytes:
    values = [item for item in re.split(r"[{},\s]+", init) if item]
    bits = TYPE_BITS[kind]
    out = b""
    for value in values:
        if match := _FLOAT_BITS.match(value):
            number = int(match.group(1) or match.group(2), 16)
        elif _DECIMAL.match(value):
            code = "<f" if bits == 32 else "<d"
            out += struct.pack(code, float(value))
            continue
        else:
            number = _integer(value)
        out += (number & ((1 << bits) - 1)).to_bytes(bits // 8, "little")
    return out


def parse_variable(text: str) -> Variable | None:
    """A variable declaration (without ``;``), or None when the text is something else."""
    match = _VARIABLE.match(text.strip())
    if match is None:
        return None
    element = max(TYPE_BITS[match["type"]] // 8, 1)
    dims = [int(d or 0) for d in re.findall(r"\[\s*(\d*)\s*\]", match["dims"] or "")]
    data = _element_bytes(match["type"], match["init"]) if match["init"] else b""
    size = element
    for dim in dims:
        size *= dim
    size = max(size, len(data))
    align = int(match["align"] or element)
    return Variable(match["name"], match["space"], size, align, bool(match["extern"]), data)


def _parse_params(text: str) -> list[Param]:
    params, offset = [], 0
    for match in _PARAM.finditer(text):
        element = TYPE_BITS[match["type"]] // 8
        size = element * int(match["count"] or 1)
        align = int(match["align"] or element)
        offset = -(-offset // align) * align
        params.append(Param(match["name"], offset, size, align))
        offset += size
    return params


class _Body:
    """Collects one entry's body."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.scopes = _Scopes(entry.registers)

    def parse(self, body: list[Statement]) -> None:
        for index, statement in enumerate(body):
            if statement.kind == "open":
                self.scopes.push()
                self._declare_labels(body, index)
            elif statement.kind == "close":
                self.scopes.pop()
            elif statement.kind == "label":
                name = self.scopes.resolve(statement.text)
                self.entry.labels[name] = len(self.entry.instructions)
            else:
                try:
                    self._text(statement)
                except PtxSyntaxError as error:
                    raise PtxSyntaxError(f"line {statement.line}: {error}") from None

    def _declare_labels(self, body: list[Statement], index: int) -> None:
        depth = 0
        for statement in body[index:]:
            if statement.kind == "open":
                depth += 1
            elif statement.kind == "close":
                depth -= 1
                if depth == 0:
                    return
            elif statement.kind == "label" and depth == 1:
                self.scopes.declare(statement.text)

    def _text(self, statement: Statement) -> None:
        text = statement.text
        if text.startswith(".reg"):
            _declare_registers(text, self.scopes, self.entry.registers)
        elif text.startswith(".pragma"):
            return
        elif text.startswith("."):
            variable = parse_variable(text)
            if variable is None:
                raise PtxSyntaxError(f"directive {text.split()[0]!r} is not modelled in a body")
            self.entry.variables.append(variable)
        else:
            self._instruction(text, statement.line)

    def _instruction(self, text: str, line: int) -> None:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise PtxSyntaxError(f"{text!r} is not an instruction")
        negated, guard, opcode, rest = match.groups()
        operands = tuple(parse_operand(item) for item in split_commas(rest))
        if self.scopes.active:
            operands = tuple(self.scopes.rename(operand) for operand in operands)
        register = Reg(self.scopes.resolve(guard)) if guard else None
        self.entry.instructions.append(
            Instruction(opcode, tuple(opcode.split(".")), operands, register, bool(negated), line)
        )


def _parse_entry(text: str, match: re.Match[str], line_of: LineIndex) -> tuple[Entry, int]:
    entry = Entry(match.group(1), line=line_of(match.start()))
    position = match.end()
    if text[position] == "(":
        close = text.index(")", position)
        entry.params = _parse_params(text[position:close])
        position = close + 1
    brace = text.index("{", position)
    for directive in _DIRECTIVE.finditer(text, position, brace):
        numbers = tuple(int(n) for n in re.findall(r"\d+", directive.group(2)))
        entry.directives[directive.group(1)] = numbers
    body = list(statements(text, brace + 1, line_of))
    _Body(entry).parse(body)
    return entry, brace


def parse_ptx(text: str) -> PtxModule:
    """Parse a PTX file.

    Raises PtxSyntaxError (a ValueError) that names the line for text this reader does not know.
    """
    text = strip_comments(text)
    line_of = LineIndex(text)
    if match := _FUNC.search(text):
        raise PtxSyntaxError(f"line {line_of(match.end())}: device functions are not modelled")
    version = re.search(r"^\s*\.version\s+(\S+)", text, re.M)
    target = re.search(r"^\s*\.target\s+([\w]+)", text, re.M)
    if version is None or target is None:
        raise PtxSyntaxError("line 1: no .version and .target directives")
    matches = list(_ENTRY.finditer(text))
    if not matches:
        raise PtxSyntaxError("line 1: no .entry")
    module = PtxModule(version.group(1), target.group(1), [], [])
    for match in matches:
        entry, _ = _parse_entry(text, match, line_of)
        module.entries.append(entry)
    module.variables = _module_variables(text, matches[0].start())
    return module


def _module_variables(text: str, end: int) -> list[Variable]:
    head = re.sub(r"^\s*\.(version|target|address_size|file)\b[^\n]*", "", text[:end], flags=re.M)
    found = (parse_variable(piece) for piece in head.split(";"))
    return [variable for variable in found if variable is not None]
