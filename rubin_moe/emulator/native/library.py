"""The registry of runtime functions: each is written once with the IR builder and compiled once."""

from __future__ import annotations

from collections.abc import Callable

from rubin_moe.emulator.native.ir import I64, PTR, Builder, Type, Val

FunctionBody = Callable[..., None]
#: Process-wide counters of native code.
COUNTERS = ("emu.effects", "emu.cp_async_bytes")
_FUNCTIONS: dict[str, tuple[Type | None, list[tuple[str, Type]], FunctionBody]] = {}


def runtime_function(
    name: str, result: Type | None, **params: Type
) -> Callable[[FunctionBody], FunctionBody]:
    """Register ``body(builder, *values)`` as the runtime function ``name``."""

    def register(body: FunctionBody) -> FunctionBody:
        _FUNCTIONS[name] = (result, list(params.items()), body)
        return body

    return register


def function_names() -> list[str]:
    """All runtime functions."""
    return list(_FUNCTIONS)


def library_text() -> str:
    """LLVM IR of the whole runtime."""
    declarations: set[str] = set()
    texts = [f'@"{name}" = global i64 0, align 8' for name in COUNTERS]
    for name, (result, params, body) in _FUNCTIONS.items():
        builder = Builder(declarations)
        builder.label("entry")
        body(builder, *(Val(builder, f"%{label}", ty) for label, ty in params))
        texts.append(builder.function(name, result, params))
    own = {f'@"{name}"' for name in _FUNCTIONS}
    external = sorted(d for d in declarations if not any(f"{name}(" in d for name in own))
    return "\n".join([*external, *texts])


def count_effect(b: Builder) -> None:
    """Count an event that another warp may wait for."""
    counter = Val(b, '@"emu.effects"', PTR)
    b.store(b.load(counter, I64) + 1, counter)
