"""Reading and writing memory at an address from code that numba compiles."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def _pointer_to(element: Any) -> Any:
    pointer = types.CPointer(element)

    @intrinsic
    def pointer_to(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return pointer(types.int64), generate

    return pointer_to


#: ``wide(address)[i]`` and ``word(address)[i]``: int64 and int32 at an address.
wide = _pointer_to(types.int64)
word = _pointer_to(types.int32)
half = _pointer_to(types.uint16)
