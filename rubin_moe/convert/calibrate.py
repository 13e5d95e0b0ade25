"""Input scales of 4-bit activations from a text: transformers runs the 16-bit source on it.

The largest magnitude that FC1 and FC2 of each expert read becomes ``amax / (6 * 448)``, ModelOpt's
rule. An expert that no token of the text reached gets the largest amax of its layer's experts, and
is listed. The whole model has to fit into memory, unlike in the conversion itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rubin_moe.errors import ConvertError
from rubin_moe.formats.quantize import global_dec
from rubin_moe.formats.spec import NVFP4_UE4M3
from rubin_moe.loader.names import module_layer

WINDOW = 512
MAX_TOKENS = 1 << 17

_PRODUCTS = frozenset(
    {torch.nn.functional.linear, torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__}
)


@dataclass(frozen=True)
class LayerInputs:
    """What the experts of one layer read; float32 and int64 ``[E]``.

    Attributes:
        fc1, fc2: largest magnitudes; tokens: how many reached each expert.
    """

    fc1: Tensor
    fc2: Tensor
    tokens: Tensor

    @property
    def unseen(self) -> tuple[int, ...]:
        """Experts without a token."""
        return tuple(torch.nonzero(self.tokens == 0).flatten().tolist())

    def scale(self, expert: int, projection: str) -> float:
        """The input scale of ``gate``, ``up`` or ``down``."""
        amax = self.fc2 if projection == "down" else self.fc1
        own = amax.max() if self.tokens[expert] == 0 else amax[expert]
        return float(global_dec(own, NVFP4_UE4M3))


@dataclass(frozen=True)
class Calibration:
    """Of a whole model: layer such as ``layers.3`` -> its inputs; tokens that were read."""

    layers: Mapping[str, LayerInputs]
    tokens: int

    def digest(self) -> str:
        """Tells one calibration from another."""
        found = sha256()
        for name, layer in sorted(self.layers.items()):
            found.update(name.encode())
            for tensor in (layer.fc1, layer.fc2, layer.tokens):
                found.update(tensor.numpy().tobytes())
        return found.hexdigest()


def calibrate(
    source: Path, text: Path, report: Callable[[int, int], None] = lambda done, total: None
) -> Calibration:
    """Runs the model of a 16-bit checkpoint folder on at most `MAX_TOKENS` tokens of a text.

    Args:
        report: called with tokens that were just read, and all of them.

    Raises:
        ConvertError: transformers is missing or cannot load or run the model, the text cannot be
            read, or none of it reaches the experts.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ConvertError(f"calibration text {text}: no UTF-8 at byte {e.start}") from None
    except OSError as e:
        raise ConvertError(f"calibration text {text}: {e.strerror}") from None
    model, ids = _load(source, content)
    watch = _Watch(model)
    with torch.inference_mode(), watch:
        for start in range(0, ids.numel(), WINDOW):
            window = ids[start : start + WINDOW]
            model(input_ids=window[None])
            report(window.numel(), ids.numel())
    return Calibration(watch.layers(), ids.numel())


def _load(source: Path, content: str) -> tuple[Any, Tensor]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as e:
        raise ConvertError(f"calibration needs transformers 5: {e}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
        model.set_experts_implementation("eager")
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError) as e:
        raise ConvertError(f"{source.name}: transformers cannot load it: {e}") from e
    ids = torch.tensor(tokenizer.encode(content, verbose=False), dtype=torch.int64)[:MAX_TOKENS]
    if not ids.numel():
        raise ConvertError("the calibration text has no token")
    return model, ids


class _Watch(TorchFunctionMode):
    """Sees every product with an expert's matrix; which one, by its place in the parameter."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._layers: dict[str, LayerInputs] = {}
        self._matrices: dict[int, tuple[Tensor, LayerInputs, Tensor]] = {}
        for name, module in model.named_modules():
            fc1: Any = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
            fc2: Any = getattr(module, "down_proj", None)
            if not name.endswith(".experts") or not all(_stacked(m) for m in (fc1, fc2)):
                continue
            count = fc1.shape[0]
            amax = (torch.zeros(count), torch.zeros(count))
            made = LayerInputs(*amax, torch.zeros(count, dtype=torch.int64))
            self._layers[str(module_layer(name))] = made
            for matrix, largest in zip((fc1, fc2), amax, strict=True):
                self._matrices[matrix.untyped_storage().data_ptr()] = matrix, made, largest

    def layers(self) -> dict[str, LayerInputs]:
        """What was seen."""
        seen = {n: x for n, x in self._layers.items() if bool(x.tokens.any())}
        if not seen or len(seen) < len(self._layers):
            raise ConvertError(
                f"calibration saw {len(seen)} of {len(self._layers)} layers of experts at work; "
                "this model's class computes them in a way that is not followed"
            )
        for name, layer in seen.items():
            if not bool(torch.isfinite(layer.fc1).all() and torch.isfinite(layer.fc2).all()):
                raise ConvertError(f"{name}: an expert's input is not finite on this text")
        return seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) > 1 and isinstance(args[1], Tensor):
            self._see(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _see(self, x: Tensor, matrix: Tensor) -> None:
        found = self._matrices.get(matrix.untyped_storage().data_ptr())
        if found is None or not x.numel():
            return
        whole, layer, largest = found
        expert = (matrix.storage_offset() - whole.storage_offset()) // whole.stride(0)
        largest[expert] = max(float(largest[expert]), float(x.abs().max()))
        if largest is layer.fc1:
            layer.tokens[expert] += x.numel() // x.shape[-1]


def _stacked(matrix: object) -> bool:
    return isinstance(matrix, Tensor) and matrix.dim() == 3
