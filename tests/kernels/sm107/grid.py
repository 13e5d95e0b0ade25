"""The grid of the sm_107a kernels: raw accumulators bit for bit, codes between the GEMMs.

Operands lie on the format grid and are drawn so that every partial sum fits 24 bits (asserted):
any order of accumulation gives the same float32, and an accumulator has to equal the float64
product. FC2's kernel with alpha and router weights of one writes its accumulators as they are, so
it also shows those of FC1's operands, whose mainloop is the same.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rubin_moe.emulation import EmulatorLauncher
from rubin_moe.emulator.report import Report
from rubin_moe.formats.spec import FORMATS
from rubin_moe.kernels.sm107 import plan as plans
from rubin_moe.kernels.sm107.compiled import fc1_kernel, fc2_kernel
from rubin_moe.kernels.sm107.host import ROWS, make_work
from rubin_moe.kernels.sm107.work import Work
from rubin_moe.layouts.gate_up import GateUpRows
from rubin_moe.layouts.sm107_tiles import Sm107Tiles
from tests.emulator.peers.case import Comparison
from tests.emulator.peers.operands import (
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_UE5M3,
    Operand,
    check_exact,
    draw,
)
from tests.oracles.moe import sigmoid

from .codes import compare_codes
from .routing import reference_work

OPERANDS = {
    "nvfp4-ue4m3": (NVFP4, NVFP4),
    "nvfp4-ue5m3": (NVFP4_UE5M3, NVFP4_UE5M3),
    "mxfp8": (MXFP4, MXFP8),
}
"""Weights and tokens, by activation format."""
BOUNDS = {"silu": 2.0**-17, "swigluoai": 2.0**-16}
"""Of the activation's relative error, where |gate| <= 27 (gather_gemm_swiglu)."""
PARAMETERS = {"silu": (np.inf, 1.0, 0.0), "swigluoai": (7.0, 1.702, 1.0)}
"""Limit, alpha, beta."""
TOKENS = (1, 7, 16, 23, 64, 129, 300)
SIZES = ((256, 256), (352, 352), (2880, 96))
ROUTINGS = ((1, "all"), (4, "random"), (9, "some_empty"), (9, "all_to_one"))
"""Experts, and how tokens choose among them."""
NUM_CTAS = 4


@dataclass(frozen=True)
class GridCase:
    """One point: activation format, batch, routing, sizes of the layer, activation (``swigluoai``
    has biases), CTAs that share a tile."""

    fmt: str
    tokens: int
    experts: int
    routing: str
    hidden: int
    intermediate: int
    activation: str = "silu"
    cta_group: int = 1

    def __str__(self) -> str:
        sizes = f"{self.hidden}x{self.intermediate}"
        more = f"{self.activation}-{self.cta_group}cta"
        return f"{self.fmt}-{self.tokens}t-{self.experts}e-{self.routing}-{sizes}-{more}"

    @property
    def top_k(self) -> int:
        return 2 if self.routing in ("random", "some_empty") else 1

    @property
    def tile_n(self) -> int:
        """Tokens of a tile, as the host chooses them."""
        return plans.choose_tile_n(self.tokens, self.top_k, self.experts)

    @property
    def plan(self) -> plans.GemmPlan:
        return plans.plan_gemm(self.fmt, self.tile_n, self.cta_group)

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


VARIANTS = (("swigluoai", 1), ("silu", 2), ("swigluoai", 2))
"""Activation and CTAs of a tile beside silu and one, over some batches and sizes."""
VARIANT_TOKENS = (7, 23, 129, 300)


def cases() -> list[GridCase]:
    """The whole grid."""
    plain = [
        GridCase(fmt, tokens, experts, routing, hidden, intermediate)
        for fmt in OPERANDS
        for hidden, intermediate in SIZES
        for experts, routing in ROUTINGS
        for tokens in TOKENS
    ]
    return plain + [
        replace(case, activation=activation, cta_group=cta_group)
        for case in plain
        for activation, cta_group in VARIANTS
        if case.tokens in VARIANT_TOKENS and case.hidden != SIZES[0][0]
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
        h, i = case.hidden, case.intermediate
        weight, token = OPERANDS[case.fmt]
        self.x = draw(rng, case.tokens, h, token)
        self.w13 = [draw(rng, 2 * i, h, weight) for _ in range(case.experts)]
        self.w2 = [draw(rng, h, i, weight) for _ in range(case.experts)]
        self.ids = ids = case.ids(rng)
        self.work: Work = reference_work(ids, None, case.experts, case.tile_n)
        self.h = draw(rng, ids.numel(), i, token)
        self.expert = ids.flatten()[self.work.choice.long()].numpy()
        self.token = self.work.token.numpy()
        # |gate| stays below 8, where the activation's bound holds (gather_gemm_swiglu)
        top = np.abs(self.product13).max() or 1.0
        self.alpha = (rng.uniform(4, 8, (case.experts, 2)) / top).astype(np.float32)
        self.dec = np.ones(case.experts, np.float32)
        if case.fmt == "nvfp4-ue4m3":
            self.dec = (rng.uniform(1, 3, case.experts) * 2.0**-9).astype(np.float32)
        self.bias = np.zeros((case.experts, 2 * i), np.float32)
        if case.activation == "swigluoai":
            self.bias = rng.normal(0, 0.5, self.bias.shape).astype(np.float32)

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
    def slack(self) -> np.ndarray:
        """float64 ``[rows, I]``: what rounding a product, a bias and ``up + beta`` to float32 may
        add where they cancel, over the output's global scale. The derivative of g sigmoid(a g) is
        at most 1.1."""
        alpha = np.repeat(self.alpha[self.expert].astype(np.float64), self.case.intermediate, 1)
        products, bias = self.product13 * alpha, self.bias[self.expert]
        gate, up = np.split(products + bias, 2, axis=1)
        limit, slope, beta = (float(np.float32(p)) for p in PARAMETERS[self.case.activation])
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        of_gate, of_up = np.split(np.abs(products) + np.abs(bias), 2, axis=1)
        error = np.abs(gate * sigmoid(slope * gate)) * (of_up + beta)
        error += 1.1 * np.abs(up + beta) * of_gate
        return 2.0**-23 * error / self.dec[self.expert].astype(np.float64)[:, None]

    @cached_property
    def activation(self) -> np.ndarray:
        """In float64 ``[rows, I]``, over the output's global scale."""
        alpha = np.repeat(self.alpha[self.expert].astype(np.float64), self.case.intermediate, 1)
        gate, up = np.split(self.product13 * alpha + self.bias[self.expert], 2, axis=1)
        limit, slope, beta = (float(np.float32(p)) for p in PARAMETERS[self.case.activation])
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        dec = self.dec[self.expert].astype(np.float64)[:, None]
        return (up + beta) * gate * sigmoid(slope * gate) / dec

    def run(self, launcher: EmulatorLauncher) -> Outputs:
        """Four launches: routing, accumulators of FC1's operands, of FC2's, and FC1."""
        case, plan = self.case, self.case.plan
        work = make_work(launcher, self.ids, None, case.experts, case.tile_n)
        assert torch.equal(work.choice, self.work.choice)
        rows = work.token.numel()
        tiles13, tiles2 = self._tiles(self.w13, True), self._tiles(self.w2, False)
        padded = 2 * ROWS.padded_half(case.intermediate)
        acc13 = torch.full((rows, padded), torch.nan)
        acc2 = torch.full((rows, case.hidden), torch.nan)
        count = torch.arange(rows, dtype=torch.int32)
        x, h = self._padded(self.x), self._padded(self.h)
        ones, weight = torch.ones(case.experts), torch.ones(rows)
        for out, index, operand, tiles in (
            (acc13, work.token, x, tiles13),
            (acc2, None, h, tiles2),
        ):
            none = torch.zeros(case.experts, 128 * tiles.shape[1])
            launcher.launch(
                fc2_kernel(plan, atomic=False),
                NUM_CTAS,
                [
                    work.items, work.num_items, index, *operand, tiles, ones, none, out, count,
                    weight, tiles.shape[2], tiles.shape[1], out.shape[1],
                ],
            )  # fmt: skip
        k_tiles = plans.tiles_of(case.fmt, case.intermediate)
        codes = torch.zeros(rows, 128 * k_tiles, dtype=torch.uint8)
        scales = torch.zeros(rows, plan.operands.scales_k * k_tiles, dtype=torch.uint8)
        bias = GateUpRows(ROWS.stripe, half_multiple=ROWS.half_multiple, axis=-1)
        launcher.launch(
            fc1_kernel(plan),
            NUM_CTAS,
            [
                work.items, work.num_items, work.token, *x, tiles13, torch.from_numpy(self.alpha),
                bias.pack(torch.from_numpy(self.bias)), torch.tensor(PARAMETERS[case.activation]),
                codes, scales, torch.from_numpy(self.dec), tiles13.shape[2], tiles13.shape[1],
                k_tiles,
            ],
        )  # fmt: skip
        return Outputs(acc13, acc2, codes, scales)

    def _tiles(self, experts: list[Operand], gated: bool) -> Tensor:
        qdata = torch.from_numpy(np.stack([w.qdata for w in experts]))
        sf = torch.from_numpy(np.stack([w.sf for w in experts]))
        if gated:
            qdata, sf = ROWS.pack(qdata), ROWS.pack(sf)
        weights = "mxfp4" if self.case.fmt == "mxfp8" else self.case.fmt
        return Sm107Tiles(FORMATS[weights]).pack(qdata, sf)

    def _padded(self, operand: Operand) -> tuple[Tensor, Tensor]:
        """Codes and scales with K padded by zeros to whole tiles."""
        o = self.case.plan.operands
        tiles = plans.tiles_of(self.case.fmt, operand.values.shape[1])
        codes = torch.zeros(len(operand.qdata), 128 * tiles, dtype=torch.uint8)
        scales = torch.zeros(len(operand.sf), o.scales_k * tiles, dtype=torch.uint8)
        codes[:, : operand.qdata.shape[1]] = torch.from_numpy(operand.qdata)
        scales[:, : operand.sf.shape[1]] = torch.from_numpy(operand.sf)
        return codes, scales

    def accumulators_equal(self, out: Outputs) -> tuple[int, int]:
        """(equal bit for bit, all). Padding rows of the weights have to give zeros."""
        want13 = ROWS.pack(torch.from_numpy(self.product13.T.copy())).T.float()
        want2 = torch.from_numpy(self.product2).float()
        pairs = ((out.acc13, want13), (out.acc2, want2))
        equal = sum(int((got == want).sum()) for got, want in pairs)
        return equal, sum(want.numel() for _, want in pairs)

    def compare_codes(self, out: Outputs) -> Comparison:
        """Codes and scales, and how far past a rounding boundary a differing one lies."""
        fmt, i = FORMATS[self.case.fmt], self.case.intermediate
        widths = (fmt.packed_k(i), fmt.scales_k(i))
        parts = (out.codes, out.scales)
        assert not any(part[:, n:].any() for part, n in zip(parts, widths, strict=True)), (
            "padding between the GEMMs is not zero"
        )
        codes, scales = (p[:, :n].numpy() for p, n in zip(parts, widths, strict=True))
        bound = BOUNDS[self.case.activation]
        return compare_codes(codes, scales, self.activation, fmt.name, bound, self.slack)

    def useful_macs(self) -> int:
        """Of the two GEMMs' accumulators and FC1."""
        return len(self.expert) * self.case.hidden * self.case.intermediate * 5


def padded_macs(reports: list[Report]) -> int:
    """Multiply-adds issued."""
    return sum(report.mma_macs for report in reports)
