"""PTX that Triton 3.9 made of small kernels (`triton_kernels.py`), run on the emulator.

Inputs are integers or multiples of a power of two, so all but the softmax are exact.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rubin_moe.emulator.compile import load_ptx
from rubin_moe.emulator.launch import Device
from rubin_moe.emulator.report import Report
from tests.oracles.quant import E2M1, E4M3, encode_e4m3, pack_e2m1

HERE = Path(__file__).parent


@dataclass(frozen=True)
class TensorMap:
    """A row-major bfloat16 matrix read in 64 x 64 boxes with the 128-byte swizzle."""

    matrix: torch.Tensor

    def encode(self) -> bytes:
        """128 bytes, from the layout that compiled launches show (little-endian 64-bit words)."""
        rows, columns = self.matrix.shape
        bf16, swizzle_128, rank_minus_1 = 10, 3, 1
        flags = rank_minus_1 << 4 | bf16 << 7 | swizzle_128 << 13
        stride = columns * 2 // 16
        box = 63
        words = [self.matrix.data_ptr(), flags | stride << 32, 0, 0]
        words += [(columns - 1) | (rows - 1) << 32, 0, box << 56, box]
        return struct.pack("<8Q", *words).ljust(128, b"\0")


def launch(name: str, grid: tuple[int, ...], arguments: list[Any]) -> Report:
    """Runs a kernel of this folder; tensors are registered, sizes are 32-bit.

    Triton appends two pointers of its own (scratch, profile), null here.
    """
    facts = json.loads((HERE / f"{name}.json").read_text())
    kernel = load_ptx((HERE / f"{name}.ptx").read_text()).entry(facts["entry"])
    device = Device("sm_90a")
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, TensorMap):
            device.register(argument.matrix)
            values += [argument.encode(), *argument.matrix.shape, *argument.matrix.stride()]
        else:
            values.append(argument)
    return device.launch(
        kernel,
        grid,
        facts["block"],
        [*values, 0, 0],
        dynamic_smem=facts["dynamic_smem_bytes"],
    )


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def _integers(rng: np.random.Generator, *shape: int, top: int = 4) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-top, top + 1, shape).astype(np.float32))


def test_masked_add_leaves_the_tail_alone(rng: np.random.Generator) -> None:
    x, y = _integers(rng, 1300), _integers(rng, 1300)
    out = torch.full((1300,), 99.0)
    launch("masked_add", (3,), [x, y, out, 1201])
    assert torch.equal(out[:1201], (x + y)[:1201])
    assert torch.all(out[1201:] == 99)


def test_row_softmax(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.normal(0, 4, (5, 200)).astype(np.float32))
    out = torch.zeros_like(x)
    launch("row_softmax", (5,), [x, out, 200])
    # ex2.approx and the division's reciprocal are off by 2^-22 each, the sum of 200 by 2^-20.
    want = torch.softmax(x.double(), dim=1)
    assert ((out.double() - want).abs() / want).max() < 2.0**-18


def test_fp8_round_trip() -> None:
    ties = (E4M3[0x08:0x7D] + E4M3[0x09:0x7E]) / 2
    values = np.concatenate([E4M3[:127], -E4M3[:127], ties, -ties, [1e-9, -0.0, 460, -1e6]])
    values = np.resize(values, 512)
    x = torch.from_numpy(values.astype(np.float32))
    codes, back = torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.bfloat16)
    launch("fp8_round_trip", (2,), [x, codes, back])
    want = encode_e4m3(values)
    assert np.array_equal(codes.numpy(), want)
    assert np.array_equal(back.double().numpy(), E4M3[want])


def test_histogram_counts_across_blocks(rng: np.random.Generator) -> None:
    values = torch.from_numpy(rng.integers(0, 10, 700).astype(np.int32))
    counts = torch.zeros(10, dtype=torch.int32)
    launch("histogram", (3,), [values, counts, 650])
    assert torch.equal(counts.long(), torch.bincount(values[:650].long(), minlength=10))


def test_row_cumsum(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.integers(-1000, 1000, 512).astype(np.int32))
    out = torch.zeros_like(x)
    launch("row_cumsum", (2,), [x, out])
    assert torch.equal(out.view(2, 256).long(), x.view(2, 256).cumsum(1))


@pytest.mark.parametrize(
    ("name", "tile_m"), [("matmul_wgmma", 64), ("matmul_mma_sync", 16)], ids=["wgmma", "mma_sync"]
)
def test_matmul_with_tails(rng: np.random.Generator, name: str, tile_m: int) -> None:
    m, n, k = tile_m + 9, 64 + 24, 208
    a, b = (_integers(rng, rows, k).bfloat16() for rows in (m, n))
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    launch(name, (2, 2), [a, b, c, m, n, k])
    assert torch.equal(c, (a.float() @ b.float().T).bfloat16())


def test_matmul_fp8(rng: np.random.Generator) -> None:
    m, n, k = 64, 64, 256
    a, b = (_integers(rng, rows, k, top=8) for rows in (m, n))
    a8, b8 = (torch.from_numpy(encode_e4m3(x.double().numpy()).astype(np.uint8)) for x in (a, b))
    c = torch.zeros((m, n), dtype=torch.bfloat16)
    launch("matmul_wgmma_fp8", (1, 1), [a8, b8, c, m, n, k])
    assert torch.equal(c, (a @ b.T).bfloat16())


def test_matmul_that_decodes_fp4(rng: np.random.Generator) -> None:
    m, n, k = 64, 128, 128
    a, codes = _integers(rng, m, k).bfloat16(), rng.integers(0, 16, (n, k))
    packed, c = torch.from_numpy(pack_e2m1(codes)), torch.zeros((m, n))
    launch("matmul_upcast_fp4", (1, 2), [a, packed, c, n, k])
    assert np.array_equal(c.double().numpy(), a.double().numpy() @ E2M1[codes].T)


def test_matmul_through_tensor_maps(rng: np.random.Generator) -> None:
    m, n, k = 128, 96, 160  # boxes hang over n and k
    a, b = (_integers(rng, rows, k).bfloat16() for rows in (m, n))
    c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    launch("matmul_tma", (2, 2), [TensorMap(a), TensorMap(b), TensorMap(c), k])
    assert torch.equal(c, (a.float() @ b.float().T).bfloat16())
