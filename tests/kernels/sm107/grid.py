"""The grid of the sm_107a kernels: raw accumulators bit for bit, codes between the GEMMs.

Operands lie on the format grid and are drawn so that every partial sum fits 24 bits (asserted):
any order of accumulation gives the same float32, and an accumulator has to equal the float64
product. FC2's kernel with alpha and router weights of one writes its accumulators as they are, so
it also shows those of FC1's operands, whose mainloop is the same.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.emulator.report import Report
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.compiled import fc1_kernel, fc2_kernel
from rubin_moe.kernels.sm107.host import ROWS, make_work
from rubin_moe.kernels.sm107.work import Work
from rubin_moe.layouts.sm107_tiles import Sm107Tiles
from tests.emulator.peers.case import Comparison, compare_nvfp4
from tests.emulator.peers.operands import (
    NVFP4,
    NVFP4_UE5M3,
    Format,
    Operand,
    check_exact,
    draw,
)

from .routing import reference_work

SCALES = {"ue4m3": NVFP4, "ue5m3": NVFP4_UE5M3}
TOKENS = (1, 7, 16, 23, 64, 129)
SIZES = ((256, 256), (352, 352), (2880, 96))
ROUTINGS = ((1, "all"), (4, "random"), (9, "some_empty"), (9, "all_to_one"))
"""Experts, and how tokens choose among them."""
NUM_CTAS = 3


@dataclass(frozen=True)
class GridCase:
    """One point: scale type of both operands, batch, routing, sizes of the layer."""

    scale: str
    tokens: int
    experts: int
    routing: str
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        sizes = f"{self.hidden}x{self.intermediate}"
        return f"{self.scale}-{self.tokens}t-{self.experts}e-{self.routing}-{sizes}"

    @property
    def top_k(self) -> int:
        return 2 if self.routing in ("random", "some_empty") else 1

    @property
    def tile_n(self) -> int:
        """Tokens of a tile, as the host chooses them."""
        return plans.choose_tile_n(self.tokens, self.top_k, self.experts)

    @property
    def fmt(self) -> Format:
        return SCALES[self.scale]

    def ids(self, rng: np.random.Generator) -> Tensor:
        """int64 ``[tokens, top_k]``."""
        if self.routing == "all_to_one":
            chosen = np.full((self.tokens, 1), self.experts // 2)
        else:
            candidates = range(0, self.experts, 2 if self.routing == "some_empty" else 1)
            chosen = np.stack(
                [rng.permutation(candidates)[: self.top_k] for _ in range(self.tokens)]
            )
        return torch.from_numpy(chosen.astype(np.int64))


def cases() -> list[GridCase]:
    """The whole grid."""
    return [
        GridCase(scale, tokens, experts, routing, hidden, intermediate)
        for scale in SCALES
        for hidden, intermediate in SIZES
        for experts, routing in ROUTINGS
        for tokens in TOKENS
    ]


@dataclass(frozen=True)
class Outputs:
    """Accumulators float32 ``[rows, features]`` of both GEMMs, and FC1's codes and scales."""

    acc13: Tensor
    acc2: Tensor
    codes: Tensor
    scales: Tensor

    def equal(self, other: "Outputs") -> bool:
        """Bit for bit; poison that nobody wrote is equal too."""
        return all(
            torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            for mine, theirs in (
                (getattr(self, n), getattr(other, n)) for n in self.__dataclass_fields__
            )
        )


class GridProblem:
    """Operands, routing and references of a case."""

    def __init__(self, case: GridCase) -> None:
        self.case = case
        rng = np.random.default_rng(17)
        h, i, fmt = case.hidden, case.intermediate, case.fmt
        self.x = draw(rng, case.tokens, h, fmt)
        self.w13 = [draw(rng, 2 * i, h, fmt) for _ in range(case.experts)]
        self.w2 = [draw(rng, h, i, fmt) for _ in range(case.experts)]
        self.ids = ids = case.ids(rng)
        self.work: Work = reference_work(ids, None, case.experts, case.tile_n)
        self.h = draw(rng, ids.numel(), i, fmt)
        self.expert = ids.flatten()[self.work.choice.long()].numpy()
        self.token = self.work.token.numpy()
        # |gate| stays below 8, where the activation's bound holds (gather_gemm_swiglu)
        top = np.abs(self.product13).max() or 1.0
        self.alpha = (rng.uniform(4, 8, (case.experts, 2)) / top).astype(np.float32)
        self.dec = np.ones(case.experts, np.float32)
        if case.scale == "ue4m3":
            self.dec = (rng.uniform(1, 3, case.experts) * 2.0**-9).astype(np.float32)

    def _product(self, rows: np.ndarray, experts: list[Operand]) -> np.ndarray:
        out = np.empty((len(rows), len(experts[0].qdata)))
        for e in np.unique(self.expert):
            mine = self.expert == e
            check_exact(rows[mine], experts[e].values)
            out[mine] = rows[mine] @ experts[e].values.T
        return out

    @cached_property
    def product13(self) -> np.ndarray:
        """float64 ``[rows, 2 I]``, exact; gate features first."""
        return self._product(self.x.values[self.token], self.w13)

    @cached_property
    def product2(self) -> np.ndarray:
        """float64 ``[rows, H]``, exact."""
        return self._product(self.h.values, self.w2)

    @cached_property
    def activation(self) -> np.ndarray:
        """``up * silu(gate)`` in float64 ``[rows, I]``, over the output's global scale."""
        alpha = np.repeat(self.alpha[self.expert].astype(np.float64), self.case.intermediate, 1)
        gate, up = np.split(self.product13 * alpha, 2, axis=1)
        dec = self.dec[self.expert].astype(np.float64)[:, None]
        return up * gate / (1 + np.exp(-gate)) / dec

    def run(self, launcher: EmulatorLauncher) -> Outputs:
        """Four launches: routing, accumulators of FC1's operands, of FC2's, and FC1."""
        case = self.case
        work = make_work(launcher, self.ids, None, case.experts, case.tile_n)
        assert torch.equal(work.choice, self.work.choice)
        plan = plans.plan_gemm(case.tile_n, case.scale)
        rows = work.token.numel()
        tiles13 = _tiles(self.w13, True)
        tiles2 = _tiles(self.w2, False)
        padded = 2 * ROWS.padded_half(case.intermediate)
        acc13 = torch.full((rows, padded), torch.nan)
        acc2 = torch.full((rows, case.hidden), torch.nan)
        count = torch.arange(rows, dtype=torch.int32)
        x, h = _padded(self.x), _padded(self.h)
        ones, weight = torch.ones(case.experts), torch.ones(rows)
        for out, index, operand, tiles in (
            (acc13, work.token, x, tiles13),
            (acc2, count, h, tiles2),
        ):
            launcher.launch(
                fc2_kernel(plan, atomic=False),
                NUM_CTAS,
                [
                    work.items, work.num_items, index, *operand, tiles, ones, out, count, weight,
                    tiles.shape[2], tiles.shape[1], out.shape[1],
                ],
            )  # fmt: skip
        k_tiles = plans.tiles_of(case.intermediate)
        codes = torch.zeros(rows, 128 * k_tiles, dtype=torch.uint8)
        scales = torch.zeros(rows, 16 * k_tiles, dtype=torch.uint8)
        launcher.launch(
            fc1_kernel(plan),
            NUM_CTAS,
            [
                work.items, work.num_items, work.token, *x, tiles13, torch.from_numpy(self.alpha),
                codes, scales, torch.from_numpy(self.dec), tiles13.shape[2], tiles13.shape[1],
                k_tiles,
            ],
        )  # fmt: skip
        return Outputs(acc13, acc2, codes, scales)

    def accumulators_equal(self, out: Outputs) -> tuple[int, int]:
        """(equal bit for bit, all). Padding rows of the weights have to give zeros."""
        want13 = ROWS.pack(torch.from_numpy(self.product13.T.copy())).T.float()
        want2 = torch.from_numpy(self.product2).float()
        pairs = ((out.acc13, want13), (out.acc2, want2))
        equal = sum(int((got == want).sum()) for got, want in pairs)
        return equal, sum(want.numel() for _, want in pairs)

    def compare_codes(self, out: Outputs) -> Comparison:
        """Codes and scales, and how far past a rounding boundary a differing one lies."""
        i = self.case.intermediate
        padding = torch.cat([out.codes[:, i // 2 :], out.scales[:, i // 16 :]], dim=1)
        assert not padding.any(), "padding between the GEMMs is not zero"
        codes, scales = out.codes[:, : i // 2].numpy(), out.scales[:, : i // 16].numpy()
        return compare_nvfp4(codes, scales, self.activation, self.case.scale)

    def useful_macs(self) -> int:
        """Of the two GEMMs' accumulators and FC1."""
        return len(self.expert) * self.case.hidden * self.case.intermediate * 5


def padded_macs(reports: list[Report]) -> int:
    """Multiply-adds issued."""
    return sum(report.mma_macs for report in reports)


def _tiles(experts: list[Operand], gated: bool) -> Tensor:
    qdata = torch.from_numpy(np.stack([w.qdata for w in experts]))
    sf = torch.from_numpy(np.stack([w.sf for w in experts]))
    if gated:
        qdata, sf = ROWS.pack(qdata), ROWS.pack(sf)
    return Sm107Tiles().pack(qdata, sf)


def _padded(operand: Operand) -> tuple[Tensor, Tensor]:
    """Codes and scales with K padded by zeros to whole tiles."""
    rows, columns = operand.sf.shape
    tiles = plans.tiles_of(16 * columns)
    codes = torch.zeros(rows, 128 * tiles, dtype=torch.uint8)
    scales = torch.zeros(rows, 16 * tiles, dtype=torch.uint8)
    codes[:, : 8 * columns] = torch.from_numpy(operand.qdata)
    scales[:, :columns] = torch.from_numpy(operand.sf)
    return codes, scales
