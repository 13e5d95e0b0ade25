"""The table of rules is complete: for the code, for the README, for the tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rubin_moe.emulator.native.blocks import FAULT_RULES, FAULTS
from rubin_moe.emulator.rules import RULES, TABLE

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "rubin_moe" / "emulator"

#: Calls that name a rule, and the position of the name.
_NAMING = {"require": 1, "refuse": 0, "found": 0, "EmulationError": 2}


def named_rules() -> set[str]:
    """Every rule that a literal of the package names."""
    names = set(FAULT_RULES.values())
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("codegen.py", "rules.py"):  # codegen's refuse is another function
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            position = _NAMING.get(name)
            if position is None or len(node.args) <= position:
                continue
            value = node.args[position]
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                names.add(value.value)
    return {name for name in names if ": " in name or name == "trap"}


def test_every_rule_that_the_code_names_is_in_the_table() -> None:
    assert named_rules() - RULES.keys() == set()
    assert FAULT_RULES.keys() == FAULTS.keys()


def test_every_rule_is_broken_by_a_test() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests/emulator").rglob("*.py"))
    assert [rule.id for rule in TABLE if f'"{rule.id}"' not in text] == []


def test_the_readme_lists_each_rule_with_its_source() -> None:
    text = (PACKAGE / "README.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| (.+?) \| (.+?) \|$", text, re.M)
    assert rows == [(r.id, r.profile, r.sentence, r.source) for r in TABLE]
