"""Rows to E4M3 on the emulator and on a GPU (--hw), bit for bit as `formats.fp8_rows`."""

import numpy as np
import pytest
import torch

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.formats.fp8_rows import quantize_rows
from rubin_moe.kernels.launch import Launcher, launcher
from rubin_moe.kernels.sm90.fp8_host import rows_kernel

from .layers import GPU, MACHINES, Machine

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def launcher_of(machine: Machine) -> Launcher:
    return launcher("driver") if machine is GPU else EmulatorLauncher(rules="enforce")


def places(steps: tuple[int, int, int]) -> np.ndarray:
    """Where element 16 t + 4 j + 2 e + i of 64 goes: 16 j + steps . (t, e, i)."""
    n = np.arange(64)
    t, j, e, i = n // 16, n % 16 // 4, n % 4 // 2, n % 2
    return 16 * j + steps[0] * t + steps[1] * e + steps[2] * i


def reordered(x: torch.Tensor, steps: tuple[int, int, int]) -> torch.Tensor:
    """``[..., K]``, K a multiple of 64."""
    out = torch.empty_like(x).view(*x.shape[:-1], -1, 64)
    out[..., places(steps)] = x.view(out.shape)
    return out.view(x.shape)


def wild_rows(num_rows: int, k: int, dtype: str) -> torch.Tensor:
    """Magnitudes over many octaves, rows of zeros, of NaN, of the least and the largest."""
    generator = torch.Generator().manual_seed(k)
    octaves = torch.randint(-14, 7, (num_rows, k), generator=generator)
    x = torch.randn(num_rows, k, generator=generator) * torch.exp2(octaves.float())
    x = (x * torch.exp2(torch.randint(-6, 6, (num_rows, 1), generator=generator).float())).to(
        DTYPES[dtype]
    )
    x[1], x[2, k // 2] = 0, torch.nan
    x[3] = torch.finfo(DTYPES[dtype]).tiny / 4
    x[4], x[5] = -torch.finfo(DTYPES[dtype]).max, 448.0
    return x


def expected(x: torch.Tensor, k_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[rows, whole 128 of K]`` in the kernel's order, and scales."""
    rows = quantize_rows(x)
    codes = torch.zeros(len(x), -(-k_blocks // 2) * 128, dtype=torch.uint8)
    codes[:, : 64 * k_blocks] = reordered(rows.codes, (4, 2, 1))
    return codes, rows.scale


def same(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, k_blocks: int) -> None:
    want, scale = expected(x, k_blocks)
    numbers = ~scale.isnan()
    assert torch.equal(codes[numbers], want[numbers])
    assert torch.equal(scales[numbers], scale[numbers])
    assert bool(scales[~numbers].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k_blocks", [1, 3, 9])
@pytest.mark.parametrize("machine", MACHINES)
def test_tokens(machine, k_blocks, dtype):
    x = wild_rows(21, 64 * k_blocks, dtype)
    device = machine.device
    codes = torch.full((21, -(-k_blocks // 2) * 128), 0x7F, dtype=torch.uint8, device=device)
    scales = torch.full((21,), -1.0, device=device)
    there = reordered(x.view(torch.int16), (2, 8, 1)).to(device)
    args = [there, None, codes, scales, 21]
    launcher_of(machine).launch(rows_kernel(k_blocks, dtype), 2, args)
    same(codes.cpu(), scales.cpu(), x, k_blocks)


@pytest.mark.parametrize("held", [True, False], ids=["held", "read twice"])
@pytest.mark.parametrize("machine", MACHINES)
def test_tiles(machine, held, monkeypatch):
    """Three passes of at most eight rows; what lies behind a pass's rows is neither read nor
    written."""
    k_blocks, t, counts = (3, 8, (8, 1, 6)) if held else (59, 8, (8, 8, 8))
    x = wild_rows(sum(counts), 64 * k_blocks, "bfloat16")
    device, chunks = machine.device, -(-k_blocks // 2)
    source = torch.full((3, k_blocks, t, 8, 8), -1, dtype=torch.int16)
    ordered = reordered(x.view(torch.int16), (2, 8, 1)).view(-1, k_blocks, 8, 8)
    homes = [(p, place) for p, count in enumerate(counts) for place in range(count)]
    piece = torch.arange(8)
    for row, (p, place) in enumerate(homes):
        source[p, :, place, piece ^ (place & 7)] = ordered[row]
    first = [sum(counts[:p]) for p in range(3)]
    records = [[9, f, c, 0] for f, c in zip(first, counts, strict=True)]
    passes = torch.tensor([[3, sum(counts), 0, 0], *records]).int()
    codes = torch.full((3, chunks, t, 8, 16), 0x7F, dtype=torch.uint8, device=device)
    scales = torch.full((len(x) + 3,), -1.0, device=device)
    args = [source.to(device), passes.to(device), codes, scales, 0]
    launcher_of(machine).launch(rows_kernel(k_blocks, "bfloat16", t), 2, args)
    codes, scales = codes.cpu(), scales.cpu()
    found = torch.stack([codes[p, :, place, piece ^ (place & 7)] for p, place in homes])
    same(found.reshape(len(x), -1), scales[: len(x)], x, k_blocks)
    assert bool((scales[len(x) :] == -1).all())
    for p, count in enumerate(counts):
        assert bool((codes[p, :, count:] == 0x7F).all())
