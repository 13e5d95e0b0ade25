"""``torch.ops.rubin_moe.moe_experts``: the experts as one opaque operator.

torch.compile (also ``fullgraph``), CUDA graphs and vLLM's compiler see a single functional op whose
weights are looked up by layer name. Nothing happens at import: `register` defines the op, `bind`
gives a layer its name.
"""

import threading
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError
from rubin_moe.layers.experts import MoEExperts

_SCHEMA = (
    "moe_experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? expert_map, str name)"
    " -> Tensor"
)
_lock = threading.Lock()
_library: list[Any] = []
_layers: WeakValueDictionary[str, MoEExperts] = WeakValueDictionary()


def register() -> None:
    """Defines the operator; any further call does nothing."""
    with _lock:
        if _library:
            return
        make: Any = torch.library.Library  # untyped in torch
        library = make("rubin_moe", "FRAGMENT")
        library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("moe_experts", _run, "CompositeExplicitAutograd")
        torch.library.register_fake("rubin_moe::moe_experts", _fake, lib=library)
        _library.append(library)


def bind(name: str, layer: MoEExperts) -> None:
    """Gives ``layer`` the name under which the op finds it, as long as the layer lives.

    Raises:
        ConfigError: another living layer has that name. `unbind` first to replace one.
    """
    register()
    with _lock:
        if _layers.get(name, layer) is not layer:
            raise ConfigError(f"{name}: two layers of one name; the op could not tell them apart")
        _layers[name] = layer


def unbind(name: str) -> None:
    """Forgets a name; an unknown one is no error."""
    with _lock:
        _layers.pop(name, None)


def moe_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
    name: str,
) -> Tensor:
    """`MoEExperts.__call__` of the layer bound to ``name``; same arguments, a new tensor.

    May be called inside a compiled or captured region.
    """
    out: Tensor = torch.ops.rubin_moe.moe_experts(x, topk_ids, topk_weights, expert_map, name)
    return out


def _run(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, name: str
) -> Tensor:
    layer = _layers.get(name)
    if layer is None:
        raise ConfigError(f"no layer is bound to {name!r}; bound: {sorted(_layers)[:8]}")
    return layer(x, topk_ids, topk_weights, expert_map)


def _fake(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert_map: Tensor | None, name: str
) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
