"""What a peer kernel's case is, and how its output is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rubin_moe.emulator.dsl import EmulatedDevice
from tests.oracles.quant import E2M1, SCALES, encode_e2m1, nearest_even, round_up

#: Relative error of a SwiGLU in float32 with ex2.approx and rcp.approx (2^-22 and 2^-23 by the PTX
#: ISA), where |gate| <= 32: the rounded exponent adds 32 * 2^-24 * log2(e), three products 2^-24.
APPROXIMATION = 2.0**-17


@dataclass(frozen=True)
class Comparison:
    """Output against reference, over `elements` values.

    max_error: largest absolute difference; bit_equal: values that are identical; bound: what
    max_error may be (0: every value has to be identical); text: what was compared with what.
    """

    elements: int
    bit_equal: int
    max_error: float
    bound: float
    text: str

    @property
    def passed(self) -> bool:
        return self.bit_equal == self.elements or self.max_error <= self.bound


def device_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy of `array` in torch's own memory, aligned as device memory is."""
    return torch.from_numpy(np.ascontiguousarray(array)).clone()


def stack(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """`device_tensor` of the arrays along a new first axis."""
    return device_tensor(np.stack(arrays))


def pointer(dtype: str, tensor: torch.Tensor, align: int) -> Any:
    """A CuTe DSL pointer to a tensor's data, of DSL type `dtype`."""
    import cutlass
    from cutlass.cute.runtime import make_ptr

    return make_ptr(
        getattr(cutlass, dtype),
        tensor.data_ptr(),
        cutlass.cute.AddressSpace.gmem,
        assumed_align=align,
    )


def compare_equal(got: torch.Tensor, want: np.ndarray, text: str) -> Comparison:
    """`got` has to be `want` (float64) rounded to its type, value for value."""
    rounded = torch.from_numpy(np.ascontiguousarray(want)).to(got.dtype)
    error = (got.double() - rounded.double()).abs()
    equal = int((got == rounded).sum())
    worst = float(error.max()) if not torch.isnan(error).any() else float("nan")
    return Comparison(got.numel(), equal, worst, 0.0, text)


def compare_rounded(got: torch.Tensor, want: np.ndarray) -> Comparison:
    """16-bit `got` has to be the rounding of a value within APPROXIMATION of `want`; `max_error` is
    the largest relative distance from `want` to what rounds to `got`."""
    down = torch.nextafter(got, torch.full_like(got, -float("inf"))).double()
    up = torch.nextafter(got, torch.full_like(got, float("inf"))).double()
    centre, value = got.double(), torch.from_numpy(want)
    outside = torch.maximum((centre + down) / 2 - value, value - (centre + up) / 2).clamp(min=0)
    error = outside / value.abs().clamp(min=2.0**-100)
    return Comparison(
        got.numel(),
        int((got == value.to(got.dtype)).sum()),
        float(error.max()) if not torch.isnan(error).any() else float("nan"),
        APPROXIMATION,
        f"{str(got.dtype).removeprefix('torch.')} output with up * silu(gate) in float64; error: "
        "relative distance past a rounding boundary",
    )


def compare_nvfp4(qdata: np.ndarray, sf: np.ndarray, want: np.ndarray, scale: str) -> Comparison:
    """Quantized output [rows, n / 2] and scales [rows, n / 16] against the recipe on `want`.

    The recipe: sf is amax / 6, an element is its value / sf, each rounded to nearest even, but sf
    upwards if it is UE5M3 (the kernels convert it with cvt.rp). A code may differ where float64 is
    so close to a rounding boundary that the approximate functions can cross it; `max_error` is the
    largest relative distance to the boundary that a differing code would need, over scales and
    elements.
    """
    table = SCALES[scale]
    blocks = want.reshape(want.shape[0], -1, 16)
    amax = np.abs(blocks).max(axis=-1) / 6
    if scale == "ue4m3":
        want_sf, edges = nearest_even(amax, table[:127]), _midpoints(table[:127])
    else:
        want_sf, edges = round_up(amax, table[:255]), np.append(-np.inf, table[:255])
    error_sf = _outside(amax, sf.astype(np.int64), edges)
    value = blocks / table[sf][..., None]  # with the scales that the kernel chose
    codes = np.stack([qdata & 15, qdata >> 4], axis=-1).reshape(value.shape).astype(np.int64)
    want_codes = encode_e2m1(value)
    error_codes = _outside(np.abs(value), codes & 7, _midpoints(E2M1[:8]))
    wrong_sign = ((codes ^ want_codes) & 8 != 0) & (codes & 7 != 0)
    error_codes[wrong_sign] = np.inf
    return Comparison(
        codes.size + sf.size,
        int((codes == want_codes).sum() + (sf == want_sf).sum()),
        float(max(error_sf.max(), error_codes.max())),
        APPROXIMATION,
        f"E2M1 codes and {scale.upper()} scales with up * silu(gate) in float64; error: relative "
        "distance past a rounding boundary",
    )


def _midpoints(table: np.ndarray) -> np.ndarray:
    return np.concatenate([[-np.inf], (table[1:] + table[:-1]) / 2, [np.inf]])


def _outside(value: np.ndarray, code: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How far `value` lies outside [edges[code], edges[code + 1]], relative to value."""
    known = np.minimum(code, edges.size - 2)
    outside = np.maximum(edges[known] - value, value - edges[known + 1])
    error = np.maximum(outside, 0) / np.maximum(np.abs(value), 2.0**-100)
    return np.where(code < edges.size - 1, error, np.inf)


@dataclass
class PreparedPeer:
    """A compiled peer kernel with its operands on the CPU.

    launch() runs the compiled host function once; inputs, outputs are all device memory;
    reset() puts outputs in their state before the launch; check() judges them after it.
    """

    launch: Callable[[], Any]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    reset: Callable[[], Any]
    check: Callable[[], Comparison]

    def run(self, gpu: EmulatedDevice) -> Comparison:
        """One run on `gpu`; may be repeated, also in a later `emulated_device` block."""
        gpu.register(*self.inputs, *self.outputs)
        self.reset()
        self.launch()
        return self.check()


@dataclass(frozen=True)
class PeerCase:
    """One row of the conformance suite; `prepare` compiles inside an `emulated_device(target)`."""

    name: str
    target: str
    formats: str
    shape: str
    prepare: Callable[[], PreparedPeer]

    @property
    def key(self) -> str:
        """Unique name."""
        return f"{self.target}-{self.name}"
