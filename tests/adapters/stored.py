"""The experts of one layer as each producer stores them: names, dtypes, orders, from the oracle's
arrays and the formats' descriptions alone."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tests.oracles.moe import Projection
from tests.oracles.quant import pack_e2m1

Layer = tuple[Projection, Projection]


def _t(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    t = torch.from_numpy(np.ascontiguousarray(array))
    return t if dtype is None else t.view(dtype)


def _matrices(layer: Layer) -> Iterator[tuple[int, str, np.ndarray, np.ndarray, float]]:
    """Expert, projection, codes, scales and decode scale of every matrix."""
    w13, w2 = layer
    half = w13.qdata.shape[1] // 2
    for e in range(w13.qdata.shape[0]):
        yield e, "gate_proj", w13.qdata[e, :half], w13.sf[e, :half], w13.dec[e, 0]
        yield e, "up_proj", w13.qdata[e, half:], w13.sf[e, half:], w13.dec[e, 1]
        yield e, "down_proj", w2.qdata[e], w2.sf[e], w2.dec[e, 0]


def modelopt(module: str, layer: Layer, calibrated: bool = True) -> dict[str, Tensor]:
    """ModelOpt NVFP4, a tensor per expert; ``input_scale`` only where calibrated."""
    out = {}
    for e, proj, codes, scales, dec in _matrices(layer):
        name = f"{module}.{e}.{proj}"
        out[f"{name}.weight"] = _t(codes)
        out[f"{name}.weight_scale"] = _t(scales, torch.float8_e4m3fn)
        out[f"{name}.weight_scale_2"] = torch.tensor(float(dec))
        if calibrated:
            out[f"{name}.input_scale"] = torch.tensor(0.01 * (1 + e))
    return out


def ue5m3(module: str, layer: Layer) -> dict[str, Tensor]:
    """This project's UE5M3 form: uint8 scales, no global."""
    out = {}
    for e, proj, codes, scales, _ in _matrices(layer):
        out[f"{module}.{e}.{proj}.weight"] = _t(codes)
        out[f"{module}.{e}.{proj}.weight_scale"] = _t(scales)
    return out


def compressed_nvfp4(module: str, layer: Layer) -> dict[str, Tensor]:
    """compressed-tensors nvfp4-pack-quantized: globals are divisors of shape [1]."""
    out = {}
    for e, proj, codes, scales, dec in _matrices(layer):
        name = f"{module}.{e}.{proj}"
        out[f"{name}.weight_packed"] = _t(codes)
        out[f"{name}.weight_scale"] = _t(scales, torch.float8_e4m3fn)
        out[f"{name}.weight_global_scale"] = torch.tensor([1 / float(dec)])
        out[f"{name}.input_global_scale"] = torch.tensor([300.0])
    return out


def compressed_mxfp4(module: str, layer: Layer) -> dict[str, Tensor]:
    """compressed-tensors mxfp4-pack-quantized."""
    out = {}
    for e, proj, codes, scales, _ in _matrices(layer):
        out[f"{module}.{e}.{proj}.weight_packed"] = _t(codes)
        out[f"{module}.{e}.{proj}.weight_scale"] = _t(scales)
    return out


def gpt_oss_mxfp4(module: str, layer: Layer) -> dict[str, Tensor]:
    """gpt-oss MXFP4: all experts in one tensor, gate and up rows alternate."""
    out = {}
    for proj, w, interleaved in _stacked(layer):
        e, n, packed = w.qdata.shape
        codes, scales, bias = (interleaved(a) for a in (w.qdata, w.sf, w.bias))
        out[f"{module}.{proj}_blocks"] = _t(codes.reshape(e, n, packed // 16, 16))
        out[f"{module}.{proj}_scales"] = _t(scales)
        out[f"{module}.{proj}_bias"] = _t(bias).bfloat16()
    return out


def gpt_oss_modelopt(module: str, layer: Layer) -> dict[str, Tensor]:
    """ModelOpt NVFP4 of gpt-oss: ``[E, K/2, N]`` packed along the middle axis, one global."""
    out = {}
    for proj, w, interleaved in _stacked(layer):
        codes, scales, bias = (interleaved(a) for a in (w.qdata, w.sf, w.bias))
        elements = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:2], -1)
        packed = pack_e2m1(elements)  # [E, N, K/2], the pair is along K in both orientations
        out[f"{module}.{proj}"] = _t(packed.transpose(0, 2, 1))
        out[f"{module}.{proj}_weight_scale"] = _t(scales.transpose(0, 2, 1), torch.float8_e4m3fn)
        out[f"{module}.{proj}_weight_scale_2"] = torch.tensor(float(w.dec.flat[0]))
        out[f"{module}.{proj}_input_scale"] = torch.tensor(0.02)
        out[f"{module}.{proj}_bias"] = _t(bias).bfloat16()
    return out


def gpt_oss_ue5m3(module: str, layer: Layer) -> dict[str, Tensor]:
    """The UE5M3 form of the same, as a converter writes it from ModelOpt's."""
    out = gpt_oss_modelopt(module, layer)
    for name in list(out):
        if name.endswith(("_weight_scale_2", "_input_scale")):
            del out[name]
        elif name.endswith("_weight_scale"):
            out[name] = out[name].view(torch.uint8)
    return out


def _stacked(
    layer: Layer,
) -> Iterator[tuple[str, Projection, Callable[[np.ndarray], np.ndarray]]]:
    def as_is(rows: np.ndarray) -> np.ndarray:
        return rows

    def alternate(rows: np.ndarray) -> np.ndarray:
        gate, up = np.split(rows, 2, axis=1)
        return np.stack([gate, up], axis=2).reshape(rows.shape)

    yield "gate_up_proj", layer[0], alternate
    yield "down_proj", layer[1], as_is
