"""Block quantization and its inverse, in torch.

Rounding contract, for a block of ``sf_vec_size`` elements along K with magnitude ``amax``:

| format | block scale | rounding of the scale |
|---|---|---|
| ``nvfp4-ue4m3`` | ``amax / 6 / dec`` | to nearest, ties to even, saturating at 448 |
| ``nvfp4-ue5m3`` | ``amax / 6 / dec`` | up, saturating at 114688 |
| ``mxfp4`` | a power of two by ``mx_rule`` | see `MxRule` |
| ``mxfp8`` | ``amax / 448`` | up to a power of two |

Elements are divided, truly and not by a reciprocal, by the *rounded* scale (times ``dec``) and
rounded to nearest, ties to even, saturating. A block whose rounded scale is zero has zero codes;
a block that holds a NaN has the NaN scale. Work is chunked: memory beyond the result is bounded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rubin_moe.errors import FormatError
from rubin_moe.formats import e2m1, e4m3
from rubin_moe.formats.scales import CODECS
from rubin_moe.formats.spec import BlockFormat

MxRule = Literal["floor", "even", "ceil"]
"""How MXFP4 picks its power of two ``s``. ``floor``: ``2^(floor(log2 amax) - 2)`` (OCP MX 1.0), an
element above 6 s saturates; ``even``: the smallest with ``amax < 7 s``, so that rounding to E2M1
does not saturate; ``ceil``: the smallest with ``amax <= 6 s``."""

MX_RULES: tuple[MxRule, ...] = ("floor", "even", "ceil")
SEARCH_WINDOW = {"ue4m3": range(-4, 7), "ue5m3": range(-4, 7), "ue8m0": range(-1, 2)}
"""Codes around the rule's own scale that a search tries: from a third below (clipping the
largest) to amax mapped on 4 instead of 6 and a little more."""

_CHUNK = 1 << 17  # float32 elements that a second-level cache holds
_DECODED = 1 << 19  # elements decoded at a time: few passes, where calls cost more than a cache


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """Codes and block scales of a tensor ``[..., K]``.

    Attributes:
        qdata: uint8 ``[..., K / 2]`` (E2M1 pairs) or ``[..., K]`` (E4M3).
        sf: uint8 ``[..., K / sf_vec_size]`` raw scale codes.
    """

    qdata: Tensor
    sf: Tensor


def global_dec(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """The float32 scale that maps ``amax`` on the largest value of ``fmt``; 1 where amax is 0.

    Only NVFP4 with UE4M3 scales has one: ``amax / (6 * 448)``.
    """
    if not fmt.has_global:
        return torch.ones_like(amax, dtype=torch.float32)
    dec = (amax.double() / (e2m1.MAX * e4m3.MAX)).float()
    return torch.where(dec > 0, dec, torch.ones_like(dec))


def quantize(
    x: Tensor,
    fmt: BlockFormat,
    dec: Tensor | float | None = None,
    mx_rule: MxRule = "ceil",
    search: bool = False,
) -> QuantizedBlocks:
    """Quantizes ``x`` ``[..., K]`` along its last axis.

    Args:
        x: any float dtype; computed in float32, or in float64 where ``dec`` is given.
        dec: global decode scale, a number or a tensor that broadcasts to ``x.shape[:-1]``.
        mx_rule: MXFP4 only.
        search: choose among the scales of `SEARCH_WINDOW` the one of least squared error.

    Raises:
        FormatError: K is no multiple of the block, or an unknown rule.
    """
    if mx_rule not in MX_RULES:
        raise FormatError(f"mx_rule {mx_rule!r} is unknown; known: {', '.join(MX_RULES)}")
    k = x.shape[-1]
    qdata = x.new_empty((*x.shape[:-1], fmt.packed_k(k)), dtype=torch.uint8)
    sf = x.new_empty((*x.shape[:-1], fmt.scales_k(k)), dtype=torch.uint8)
    if sf.numel() == 0:
        return QuantizedBlocks(qdata, sf)
    rows, row_dec = x.reshape(-1, k), _per_row(dec, x)
    blocks_per_row = sf.shape[-1]
    flat_q, flat_sf = qdata.view(-1, qdata.shape[-1]), sf.view(-1, sf.shape[-1])
    for part in _chunks(len(rows), k, _CHUNK):
        blocks = _widen(rows[part], row_dec is not None)
        blocks = blocks.reshape(-1, blocks_per_row, fmt.sf_vec_size)
        part_dec = None if row_dec is None else row_dec[part, None]
        base = _block_scales(blocks.abs().amax(-1).double(), fmt, part_dec, mx_rule)
        scales = _best_scales(blocks, base, fmt, part_dec) if search else base
        codes = _elements(blocks, scales, fmt, part_dec).flatten(-2)
        flat_sf[part] = scales
        flat_q[part] = e2m1.pack(codes) if fmt.element == "e2m1" else codes
    return QuantizedBlocks(qdata, sf)


def dequantize(
    qdata: Tensor,
    sf: Tensor,
    fmt: BlockFormat,
    dec: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``element(q) * scale(sf) * dec`` as ``dtype`` ``[..., K]``.

    Element times block scale is exact in float32; ``dec`` (as in `quantize`) rounds once, the
    cast to ``dtype`` once more: what float64, exact throughout, gives when cast by way of float32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k = sf.shape[-1] * fmt.sf_vec_size
    out = torch.empty((*qdata.shape[:-1], k), dtype=dtype, device=qdata.device)
    if out.numel() == 0:
        return out
    flat = out.view(-1, k)
    q_rows, sf_rows = qdata.reshape(-1, qdata.shape[-1]), sf.reshape(-1, sf.shape[-1])
    row_dec = _per_row(dec, out)
    for part in _chunks(len(flat), k, _DECODED):
        value = _decode_elements(q_rows[part], fmt).to(wide)
        value = value.reshape(-1, sf.shape[-1], fmt.sf_vec_size)
        value *= CODECS[fmt.scale].decode(sf_rows[part], wide)[..., None]
        if row_dec is not None:
            value *= row_dec[part, None, None].to(wide)
        flat[part] = value.flatten(-2)
    return out


def _chunks(num_rows: int, k: int, elements: int) -> Iterator[slice]:
    step = max(1, elements // max(1, k))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


def _per_row(dec: Tensor | float | None, x: Tensor) -> Tensor | None:
    """float64 ``[rows]``, or None."""
    if dec is None:
        return None
    given = torch.as_tensor(dec, dtype=torch.float64, device=x.device)
    return given.broadcast_to(x.shape[:-1]).reshape(-1)


def _widen(rows: Tensor, exact: bool) -> Tensor:
    return rows.double() if exact or rows.dtype == torch.float64 else rows.float()


def _decode_elements(q: Tensor, fmt: BlockFormat) -> Tensor:
    return e2m1.decode_packed(q) if fmt.element == "e2m1" else e4m3.decode(q)


def _block_scales(amax: Tensor, fmt: BlockFormat, dec: Tensor | None, mx_rule: MxRule) -> Tensor:
    """float64 ``[rows, blocks]`` -> uint8 codes."""
    codec = CODECS[fmt.scale]
    top = e2m1.MAX if fmt.element == "e2m1" else e4m3.MAX
    ratio = amax / top if dec is None else amax / top / dec
    if fmt.scale == "ue4m3":
        return codec.encode(ratio, "rn")
    if fmt.scale == "ue5m3" or fmt.element == "e4m3" or mx_rule == "ceil":
        return codec.encode(ratio, "rp")
    if mx_rule == "floor":
        return codec.encode(amax / 4, "rz")
    below = codec.encode(amax / 7, "rz")
    step_up = (amax / 7 >= codec.table[0]) & (below < codec.max_code)
    return torch.where(step_up, below + 1, below)


def _scale_values(
    scales: Tensor, fmt: BlockFormat, dec: Tensor | None, dtype: torch.dtype
) -> Tensor:
    value = CODECS[fmt.scale].decode(scales, dtype)
    return value if dec is None else value * dec


def _elements(blocks: Tensor, scales: Tensor, fmt: BlockFormat, dec: Tensor | None) -> Tensor:
    """``[rows, blocks, vec]`` -> uint8 codes of the same shape."""
    ratio = _ratios(blocks, _scale_values(scales, fmt, dec, blocks.dtype))
    return e2m1.encode(ratio) if fmt.element == "e2m1" else e4m3.encode(ratio)


def _ratios(blocks: Tensor, scale: Tensor) -> Tensor:
    """Elements over their scale value; zero where that is zero or NaN."""
    dead = (scale == 0) | scale.isnan()
    ratio = blocks / scale.masked_fill(dead, 1.0)[..., None]
    return ratio.masked_fill_(dead[..., None], 0.0) if dead.any() else ratio


def _best_scales(blocks: Tensor, base: Tensor, fmt: BlockFormat, dec: Tensor | None) -> Tensor:
    """Scales of least squared error, judged in float32; a tie keeps the one nearest to the rule."""
    scaled = (blocks if dec is None else blocks / dec[..., None]).float()
    last = CODECS[fmt.scale].max_code
    alive = (base > 0) & (base <= last)
    least = torch.full(base.shape, torch.inf, device=blocks.device)
    scales = base
    for step in sorted(SEARCH_WINDOW[fmt.scale], key=abs):
        tried = torch.where(alive, (base.int() + step).clamp(1, last), base.int()).to(torch.uint8)
        value = _scale_values(tried, fmt, None, torch.float32)
        ratio = _ratios(scaled, value)
        nearest = e2m1.nearest(ratio) if fmt.element == "e2m1" else e4m3.nearest(ratio)
        error = nearest.sub_(ratio).square_().sum(-1) * value.square()
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, tried, scales)
    return scales
