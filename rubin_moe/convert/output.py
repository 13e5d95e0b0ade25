"""What is written: names, dtypes and shapes from headers alone, and bytes from converted experts.

A target is a dialect of the loader (names of leaves, dtypes, direction of global scales) or plain
bfloat16. Experts are written one by one, or all in one tensor where the model's own class wants
that (bfloat16 of stacked sources, gpt-oss' MXFP4).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3, NVFP4_UE5M3, BlockFormat
from rubin_moe.loader.checkpoint import DTYPE_BITS, TensorEntry
from rubin_moe.loader.compressed_tensors import COMPRESSED_MXFP4, COMPRESSED_NVFP4
from rubin_moe.loader.dialect import Dialect, Part, Reading, Stacking
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.modelopt import MODELOPT
from rubin_moe.loader.rubin_ue5m3 import RUBIN_UE5M3

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rubin_moe.convert.source import DenseExpert
    from rubin_moe.formats.experts import ExpertWeights

BY_NAMES: dict[tuple[str, str], Dialect] = {
    ("nvfp4-ue4m3", "modelopt"): MODELOPT,
    ("nvfp4-ue4m3", "compressed-tensors"): COMPRESSED_NVFP4,
    ("nvfp4-ue5m3", "rubin"): RUBIN_UE5M3,
    ("mxfp4", "compressed-tensors"): COMPRESSED_MXFP4,
    ("mxfp4", "gpt-oss"): GPT_OSS,
}
"""(format, producer) -> dialect that is written."""

FORMATS: dict[str, BlockFormat] = {f.name: f for f in (NVFP4_UE4M3, NVFP4_UE5M3, MXFP4)}


class OutTensor(NamedTuple):
    """A tensor of the output; dtype is a safetensors code."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class Piece(NamedTuple):
    """Bytes of a tensor from ``offset`` on; ``data`` is contiguous."""

    tensor: str
    offset: int
    data: "Tensor"


class Span(NamedTuple):
    """A whole tensor whose bytes are those of a source tensor."""

    tensor: str
    entry: TensorEntry


@dataclass(frozen=True)
class Shape:
    """One projection as it is written.

    Attributes:
        n, k: rows and columns; path: module path of the projection.
        dec, inputs: whether it has a global scale and an input scale; bias: its dtype or None.
    """

    path: str
    n: int
    k: int
    dec: bool = False
    inputs: bool = False
    bias: str | None = None


def leaves(dialect: Dialect | None, shape: Shape) -> Iterator[tuple[Part, OutTensor]]:
    """Tensors of one matrix; ``dialect`` None: bfloat16."""
    if shape.bias is not None:
        yield "bias", OutTensor(f"{shape.path}.bias", shape.bias, (shape.n,))
    if dialect is None:
        yield "qdata", OutTensor(f"{shape.path}.weight", "BF16", (shape.n, shape.k))
        return
    fmt = dialect.fmt
    sizes: dict[Part, tuple[int, ...]] = {
        "qdata": (shape.n, fmt.packed_k(shape.k)),
        "sf": (shape.n, fmt.scales_k(shape.k)),
    }
    if shape.dec:
        sizes["dec"] = ()
    if shape.inputs:
        sizes["input_dec"] = ()
    for part, size in sizes.items():
        leaf = dialect.leaf(part)
        reading = dialect.read(leaf)
        assert isinstance(reading, Reading)
        size = (1,) if reading.reciprocal else size
        yield part, OutTensor(f"{shape.path}.{leaf}", reading.dtypes[0], size)


def stores_divisor(dialect: Dialect | None) -> bool:
    """Whether a dialect stores the reciprocal of the global scale."""
    reading = None if dialect is None else dialect.read(dialect.leaf("dec"))
    return isinstance(reading, Reading) and reading.reciprocal


def reciprocal(value: "Tensor") -> "Tensor":
    """float32 scalar whose own reciprocal is nearest to ``value``; exactly it where one is.

    Rounding ``1 / value`` and back can be one unit off although a neighbour is not.
    """
    import numpy as np
    import torch

    wide = np.float64(value.item())
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        near = np.float32(1 / wide)
        if np.float32(1 / np.float64(near)) == wide:
            return torch.tensor(near)
        above, below = (np.nextafter(near, np.float32(d)) for d in (np.inf, -np.inf))
        best = min(near, above, below, key=lambda t: abs(np.float32(1 / np.float64(t)) - wide))
    return torch.tensor(best)


def keeps(dialect: Dialect, dec: "Tensor") -> bool:
    """Whether a global scale is read back from ``dialect`` to the bit."""
    if not stores_divisor(dialect):
        return True
    return float(reciprocal(reciprocal(dec))) == float(dec)


def encode(
    dialect: Dialect, shape: Shape, parts: "dict[Part, Tensor]"
) -> Iterator[tuple[str, "Tensor"]]:
    """(tensor name, values as stored) of one matrix from those canonical parts that are given."""
    for part, out in leaves(dialect, shape):
        if part not in parts:
            continue
        tensor = parts[part]
        if part in ("dec", "input_dec"):
            if stores_divisor(dialect):
                tensor = reciprocal(tensor)
            tensor = tensor.reshape(out.shape).float()
        yield out.name, tensor.to(_bias_dtype(out.dtype)) if part == "bias" else tensor


def _bias_dtype(code: str) -> "torch.dtype":
    from rubin_moe.convert.source import TORCH_DTYPES

    return TORCH_DTYPES[code]


def expert_parts(weights: "ExpertWeights", name: str) -> "dict[Part, Tensor]":
    """Canonical parts of one projection of the only expert of ``weights``."""
    proj = weights.w2 if name == "down" else weights.w13
    half = 1 if name == "up" and weights.gated else 0
    rows = proj.qdata.shape[1] // proj.dec.shape[1]
    cut = slice(half * rows, (half + 1) * rows)
    found: dict[Part, Tensor] = {
        "qdata": proj.qdata[0, cut], "sf": proj.sf[0, cut], "dec": proj.dec[0, half],
    }  # fmt: skip
    if proj.bias is not None:
        found["bias"] = proj.bias[0, cut]
    if proj.input_dec is not None:
        found["input_dec"] = proj.input_dec[0, half]
    return found


# -- all experts in one tensor ---------------------------------------------------------------------


@dataclass(frozen=True)
class Stacked:
    """Tensors that hold every expert of a module.

    Attributes:
        dialect: gpt-oss, or None for bfloat16; stacking: how they lie.
    """

    dialect: Dialect | None
    stacking: Stacking

    def outputs(self, module: str, experts: int, shapes: dict[str, Shape]) -> list[OutTensor]:
        """All of one module; ``shapes`` by ``gate``, ``up``, ``down``."""
        found = []
        for joined, names in _joined(shapes):
            n = sum(shapes[p].n for p in names)
            k, bias = shapes[names[0]].k, shapes[names[0]].bias
            if bias is not None:
                found.append(OutTensor(f"{module}.{joined}_bias", bias, (experts, n)))
            if self.dialect is None:
                size = (experts, k, n) if self.stacking.transposed else (experts, n, k)
                found.append(OutTensor(f"{module}.{joined}", "BF16", size))
                continue
            blocks = self.dialect.fmt.scales_k(k)
            found.append(OutTensor(f"{module}.{joined}_blocks", "U8", (experts, n, blocks, 16)))
            found.append(OutTensor(f"{module}.{joined}_scales", "U8", (experts, n, blocks)))
        return found

    def pieces(
        self, module: str, row: int, expert: "ExpertWeights | DenseExpert", shapes: dict[str, Shape]
    ) -> Iterator[Piece]:
        """One expert's rows of those tensors."""
        for joined, names in _joined(shapes):
            parts = [self._parts(expert, n) for n in names]
            for suffix in parts[0]:
                both = [p[suffix] for p in parts]
                slab = self._join(both)
                if suffix == "_bias":
                    bias = shapes[names[0]].bias
                    assert bias is not None
                    slab = slab.to(_bias_dtype(bias))
                elif self.stacking.transposed:
                    slab = slab.transpose(0, 1)
                slab = slab.contiguous()
                offset = row * slab.numel() * slab.element_size()
                yield Piece(f"{module}.{joined}{suffix}", offset, slab)

    def _parts(self, expert: "ExpertWeights | DenseExpert", name: str) -> "dict[str, Tensor]":
        import torch

        from rubin_moe.convert.source import DenseExpert

        if isinstance(expert, DenseExpert):
            found = {"": expert.matrices[name].to(torch.bfloat16)}
            bias = expert.biases.get(name)
        else:
            parts = expert_parts(expert, name)
            found = {"_blocks": parts["qdata"], "_scales": parts["sf"]}
            bias = parts.get("bias")
        return found if bias is None else {**found, "_bias": bias}

    def _join(self, both: "list[Tensor]") -> "Tensor":
        import torch

        if len(both) == 1:
            return both[0]
        if self.stacking.interleaved:
            return torch.stack(both, 1).flatten(0, 1)
        return torch.cat(both)


def _joined(shapes: dict[str, Shape]) -> list[tuple[str, tuple[str, ...]]]:
    first = ("gate_up_proj", ("gate", "up")) if "gate" in shapes else ("up_proj", ("up",))
    return [first, ("down_proj", ("down",))]
