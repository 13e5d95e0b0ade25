"""The container refuses tensors that are not what it says."""

import dataclasses

import pytest
import torch

from rubin_moe.errors import CheckpointError, FormatError
from rubin_moe.formats.experts import ExpertWeights, ProjectionWeights
from rubin_moe.formats.spec import FORMATS, MXFP4, NVFP4_UE4M3, NVFP4_UE5M3, is_nvfp4


def projection(fmt, e, n, k, halves, bias=False):
    return ProjectionWeights(
        torch.zeros(e, n, k // 2, dtype=torch.uint8),
        torch.zeros(e, n, k // fmt.sf_vec_size, dtype=torch.uint8),
        torch.ones(e, halves),
        torch.zeros(e, n) if bias else None,
    )


def experts(fmt=NVFP4_UE4M3, e=2, hidden=64, intermediate=32, gated=True, **fields):
    halves = 2 if gated else 1
    parts = {
        "w13": projection(fmt, e, halves * intermediate, hidden, halves),
        "w2": projection(fmt, e, hidden, intermediate, 1),
        "expert_ids": tuple(range(e)),
        "name": "layers.3.experts",
        **fields,
    }
    return ExpertWeights(fmt, hidden, intermediate, gated, **parts)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("fmt", [NVFP4_UE4M3, NVFP4_UE5M3, MXFP4], ids=str)
def test_right_shapes_are_taken(fmt, gated):
    w = experts(fmt, gated=gated)
    assert (w.num_experts, w.halves, w.has_bias) == (2, 2 if gated else 1, False)
    rows = (2 if gated else 1) * 32
    scales = 64 // fmt.sf_vec_size
    w13 = 2 * (rows * 32 + rows * scales + (2 if gated else 1) * 4)
    w2 = 2 * (64 * 16 + 64 * (32 // fmt.sf_vec_size) + 4)
    assert w.nbytes() == w13 + w2


@pytest.mark.parametrize(
    ("proj", "change", "message"),
    [
        (
            "w13",
            {"qdata": torch.zeros(2, 64, 64, dtype=torch.uint8)},
            r"w13.qdata: .*\[2, 64, 32\]",
        ),
        ("w13", {"qdata": torch.zeros(2, 64, 32, dtype=torch.int8)}, "w13.qdata: torch.int8"),
        ("w13", {"dec": torch.ones(2, 1)}, r"w13.dec: torch.float32 \[2, 1\], expected .*\[2, 2\]"),
        ("w2", {"sf": torch.zeros(2, 64, 4, dtype=torch.uint8)}, r"w2.sf: .*\[2, 64, 2\]"),
        ("w2", {"bias": torch.zeros(2, 64, dtype=torch.bfloat16)}, "w2.bias: torch.bfloat16"),
        ("w2", {"input_dec": torch.ones(2)}, r"w2.input_dec: .*\[2, 1\]"),
    ],
)
def test_wrong_tensors_are_named(proj, change, message):
    w = experts()
    broken = dataclasses.replace(getattr(w, proj), **change)
    with pytest.raises(CheckpointError, match=f"layers.3.experts.{message}"):
        dataclasses.replace(w, **{proj: broken})


def test_blocks_must_fit_and_formats_know_what_they_are():
    with pytest.raises(FormatError, match="mxfp4: K = 48 is no multiple of 32"):
        MXFP4.packed_k(48)
    assert [f.packed_k(64) for f in FORMATS.values()] == [32, 32, 32, 64]
    assert [f.scales_k(64) for f in FORMATS.values()] == [4, 4, 2, 2]
    assert [f.name for f in FORMATS.values() if is_nvfp4(f)] == ["nvfp4-ue4m3", "nvfp4-ue5m3"]
