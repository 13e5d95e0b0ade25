"""Quantized matrices outside the experts: what is decoded is finite, or refused by name."""

import pytest
import torch

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.dense import dense
from rubin_moe.loader.modelopt import MODELOPT


def nvfp4(scale: int, dec: float) -> dict[str, torch.Tensor]:
    """``[2, 32]`` of code 7 (6.0); ``scale`` is the last block's, others are 1."""
    scales = torch.full((2, 2), 0x38, dtype=torch.uint8)
    scales[-1, -1] = scale
    return {
        "weight": torch.full((2, 16), 0x77, dtype=torch.uint8),
        "weight_scale": scales.view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(dec),
    }


def test_values():
    decoded = dense(MODELOPT, nvfp4(0x40, 0.5), "q_proj")
    assert decoded.dtype == torch.float32
    assert decoded.unique().tolist() == [3.0, 6.0]


@pytest.mark.parametrize(("scale", "dec"), [(0x7F, 1.0), (0x7E, 1e38), (0x7E, -1e38)])
def test_one_value_that_is_not_finite_is_refused(scale, dec):
    with pytest.raises(CheckpointError, match="q_proj: NaN or infinity among its decoded values"):
        dense(MODELOPT, nvfp4(scale, dec), "q_proj")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_fp8_that_is_not_finite_is_refused(value):
    weight = torch.ones(4, 4)
    weight[1, 2] = value
    stored = {"weight": weight.to(torch.float8_e5m2), "weight_scale": torch.tensor(1.0)}
    with pytest.raises(CheckpointError, match="q_proj: NaN or infinity"):
        dense(None, stored, "q_proj")


def test_an_empty_matrix():
    none = {"weight": torch.empty(0, 16, dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
    assert dense(None, none, "q_proj").shape == (0, 16)
