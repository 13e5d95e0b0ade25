"""The registry of runtime functions: each is written once with the IR builder and compiled once."""

from __future__ import annotations

from collections.abc import Callable

from rubin_moe.emulator.native.blocks import CLUSTER
from rubin_moe.emulator.native.ir import I64, Builder, Type, Val

FunctionBody = Callable[..., None]
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
    texts: list[str] = []
    for name, (result, params, body) in _FUNCTIONS.items():
        builder = Builder(declarations)
        builder.label("entry")
        body(builder, *(Val(builder, f"%{label}", ty) for label, ty in params))
        texts.append(builder.function(name, result, params))
    own = {f'@"{name}"' for name in _FUNCTIONS}
    external = sorted(d for d in declarations if not any(f"{name}(" in d for name in own))
    return "\n".join([*external, *texts])


def add_to_counter(b: Builder, cluster: Val, name: str, amount: Val | int) -> None:
    """Add to a 64-bit counter of the cluster; only the thread that runs it touches them."""
    counter = b.gep(cluster, CLUSTER[name])
    b.store(b.load(counter, I64) + amount, counter)


def count_effect(b: Builder, cluster: Val) -> None:
    """Count an event that another warp may wait for."""
    add_to_counter(b, cluster, "effects", 1)
