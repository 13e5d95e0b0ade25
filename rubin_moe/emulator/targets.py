"""Which architectures have a modelled instruction.

``missing_on(opcode, target)`` is a sentence, or None where the target has the form. The table holds
the forms that not every target has; sources: PTX ISA, "Target ISA Notes", and what ptxas and an
H200's driver refuse to load.
"""

from __future__ import annotations

import re
from functools import cache

_BLACKWELL = ("sm_100a", "sm_103a", "sm_107a")

#: Pattern of the opcode -> targets that have it; the first that matches counts.
_FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"wgmma\.", ("sm_90a",)),
    (r"tcgen05\.(alloc|dealloc)\.exclusive\.", ("sm_107a",)),
    (r"tcgen05\.mma\..*collector::b", ("sm_107a",)),
    (r"tcgen05\.", _BLACKWELL),
    (r"cvt\..*(ue5m3|scaled::)", ("sm_107a",)),
    (r"cvt\..*(e2m1|e2m3|e3m2|ue8m0)", _BLACKWELL),
    (r"(add|sub|mul|fma)\..*f32x2", _BLACKWELL),
    (r"(add|sub|fma)\.rn\.f32\.(f16|bf16)", _BLACKWELL),
    (r"redux\.sync\..*f32", _BLACKWELL),
    (r"cp\..*(cta_group::|tile::gather4|tile::scatter4)", _BLACKWELL),
    (r"(ld|st)\..*\.v8\.", _BLACKWELL),
)


@cache
def missing_on(opcode: str, target: str) -> str | None:
    """Why ``target`` does not have ``opcode``, or None."""
    for pattern, targets in _FORMS:
        if re.match(pattern, opcode):
            return None if target in targets else f"{target} lacks it (has: {', '.join(targets)})"
    return None
