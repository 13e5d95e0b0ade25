"""Saves launches of the emulator with the memory they leave."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rubin_moe.emulation import EmulatorLauncher, aligned, storages
from rubin_moe.emulator.ptx import parse_ptx
from rubin_moe.emulator.saved import SavedBuffer, SavedLaunch
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import MXFP4, BlockFormat
from rubin_moe.kernels.launch import Argument, CompiledKernel, pack
from rubin_moe.replay.file import Bytes, Named, add_expected

_GEMM = ("work", "num_work", "row_index", "codes", "scales", "weights", "alpha", "bias")
NAMES = {
    "sm107_gather_gemm_swiglu": (
        *_GEMM, "activation", "sorted out_codes", "sorted out_scales", "norm",
    ),
    "sm107_gemm_finalize": (*_GEMM, "out", "out_row", "router_weight"),
}  # fmt: skip
"""What kernels call their arguments. ``sorted``: in the rows of the work list."""
TILES = {"sorted out_codes": (32, 32), "sorted out_scales": (32, 4)}
"""Bytes of 64 features and 32 tokens, what an epilogue writes at once; else 32 x 128."""
PLAIN_TILE = 4096  # bytes, where memory has no name


class RecordingLauncher:
    """A launcher that saves each launch as ``<number>_<kernel>.launch`` in ``folder``."""

    def __init__(self, folder: Path, inner: EmulatorLauncher) -> None:
        self.folder = folder
        self.saved: list[Path] = []
        self._inner = inner
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, kernel: CompiledKernel) -> None:
        """Nothing is saved of it."""
        self._inner.load(kernel)

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        """Runs it on the emulator."""
        ranges = storages(args)
        before = [SavedBuffer(at, ctypes.string_at(at, size)) for at, size in ranges]
        parts = aligned(pack(args))
        self._inner.launch(kernel, grid, args)
        path = self.folder / f"{len(self.saved):03}_{kernel.name}.launch"
        SavedLaunch(
            kernel.arch,
            kernel.ptx,
            kernel.entry,
            (grid, 1, 1),
            (kernel.block, 1, 1),
            (kernel.cluster, 1, 1),
            kernel.smem_bytes,
            b"".join(parts),
            tuple(before),
            kernel.cubin,
        ).save(path)
        after = [np.frombuffer(ctypes.string_at(at, size), np.uint8) for at, size in ranges]
        add_expected(path, after, _layout(kernel.ptx, kernel.entry), _named(kernel, args, ranges))
        self.saved.append(path)


def expect(path: Path) -> None:
    """Runs a saved launch on the emulator and puts the memory that it leaves into the file."""
    _, after = SavedLaunch.load(path).run()
    attach(path, after)


def attach(path: Path, after: Sequence[Bytes]) -> None:
    """Puts ``after``, the buffers as the emulator left them, into a saved launch."""
    saved = SavedLaunch.load(path)
    tensors = [
        Named(f"buffer {i}", i, 0, (1, data.size), 1, (1, PLAIN_TILE))
        for i, data in enumerate(after)
    ]
    add_expected(path, list(after), _layout(saved.ptx, saved.kernel), tensors)


def _layout(ptx: str, kernel: str) -> list[tuple[int, int]]:
    (entry,) = [e for e in parse_ptx(ptx).entries if e.name == kernel]
    return [(param.offset, param.size) for param in entry.params]


def _named(
    kernel: CompiledKernel, args: Sequence[Argument], ranges: list[tuple[int, int]]
) -> list[Named]:
    names = NAMES.get(kernel.name, ())
    out = []
    for index, value in enumerate(args):
        if not isinstance(value, Tensor) or not value.numel():
            continue
        at = value.data_ptr()
        buffer = next(i for i, (start, size) in enumerate(ranges) if start <= at < start + size)
        name = names[index] if index < len(names) else f"argument {index}"
        shape, tile = tuple(value.shape) or (1,), TILES.get(name, (32, 128))
        offset = at - ranges[buffer][0]
        out.append(Named(name, buffer, offset, shape, value.element_size(), tile))
    return out


def layer(
    fmt: BlockFormat, gated: bool = True, experts: int = 4, width: int = 256
) -> ExpertWeights:
    """Random experts of ``width`` x ``width`` whose products are exact in float32: codes of every
    value, scales of one and a half. MXFP4 has biases, as gpt-oss, where it is ``gated``."""
    generator = torch.Generator().manual_seed(6)
    one = {"ue4m3": 0x38, "ue5m3": 0x78, "ue8m0": 127}[fmt.scale]
    step = 1 if fmt.scale == "ue8m0" else 8

    def projection(rows: int, halves: int) -> ProjectionWeights:
        shape = (experts, rows, width)
        qdata = torch.randint(0, 256, (*shape[:2], width // 2), generator=generator)
        halved = torch.randint(0, 2, (*shape[:2], width // fmt.sf_vec_size), generator=generator)
        bias = torch.randint(-4, 5, shape[:2], generator=generator) / 4
        return ProjectionWeights(
            qdata.to(torch.uint8),
            (one - step * halved).to(torch.uint8),
            torch.full((experts, halves), 2.0**-6 if gated else 1.0),
            bias.float() if fmt == MXFP4 and gated else None,
            torch.full((experts, halves), 2.0**-6) if fmt.has_global else None,
        )

    halves = 2 if gated else 1
    w13, w2 = projection(halves * width, halves), projection(width, 1)
    return ExpertWeights(fmt, width, width, gated, w13, w2, tuple(range(experts)))


def batch(
    tokens: int, one_hot: bool = False, experts: int = 4, width: int = 256
) -> tuple[Tensor, Tensor, Tensor]:
    """Small whole numbers as bfloat16 ``[tokens, width]``, two experts a token and weights.

    ``one_hot``: one element a token is 1, the others 0; then `relu2` and FC2 are exact as well, in
    whatever order a device adds.
    """
    generator = torch.Generator().manual_seed(7)
    if one_hot:
        column = torch.randint(0, width, (tokens,), generator=generator)
        x = torch.nn.functional.one_hot(column, width).bfloat16()
    else:
        x = torch.randint(-4, 5, (tokens, width), generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    return x, ids, torch.tensor([0.75, 0.25]).repeat(tokens, 1)
