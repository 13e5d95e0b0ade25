"""Which weights an activation format wants, and that getting there loses nothing."""

import pytest
import torch

from rubin_moe.errors import FoldError
from rubin_moe.formats.spec import FORMATS, MXFP4, NVFP4_UE4M3, NVFP4_UE5M3, WEIGHT_FORMATS
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import Target
from rubin_moe.layers.experts import MoEExperts, problem_of
from rubin_moe.loader.for_activations import default_activations, fit, weight_format_for
from tests.loader.fold_cases import decoded, random_weights


@pytest.mark.parametrize("stored", WEIGHT_FORMATS, ids=str)
def test_16_bit_activations_take_what_is_stored(stored):
    assert weight_format_for(stored, "16bit") == weight_format_for(stored, "int8") == stored


@pytest.mark.parametrize("stored", WEIGHT_FORMATS, ids=str)
def test_ue5m3_activations_take_every_checkpoint_without_loss(stored):
    weights = random_weights(0, stored.name)
    out, report = fit(weights, "nvfp4-ue5m3")
    assert out.fmt == weight_format_for(stored, "nvfp4-ue5m3") == NVFP4_UE5M3
    assert report.lossless
    for which in ("w13", "w2"):
        assert torch.equal(decoded(out, which), decoded(weights, which))
    problem = problem_of(
        out, 2, Activation(), activation_format="nvfp4-ue5m3", global_num_experts=14
    )  # the random experts carry the global ids 10 to 13
    assert MoEExperts(out, problem, Target("cpu")).selection.backend == "cpu-tcgen05"


def test_matching_formats_stay():
    pairs = ((NVFP4_UE4M3, "nvfp4-ue4m3"), (MXFP4, "mxfp8"), (MXFP4, "fp8-e4m3"))
    for stored, activations in pairs:
        out, _ = fit(random_weights(1, stored.name), activations)
        assert out.fmt == stored


def test_what_cannot_be_is_refused_with_the_reason():
    for stored in (NVFP4_UE4M3, NVFP4_UE5M3):
        for wants_mxfp4 in ("mxfp8", "fp8-e4m3"):
            with pytest.raises(FoldError, match=f"experts stay NVFP4, and {wants_mxfp4}"):
                weight_format_for(stored, wants_mxfp4)
    for stored in (MXFP4, NVFP4_UE5M3):
        with pytest.raises(FoldError, match="want nvfp4-ue4m3 weights"):
            weight_format_for(stored, "nvfp4-ue4m3")
    with pytest.raises(FoldError, match="'fp6' is unknown; known: 16bit, int8"):
        weight_format_for(MXFP4, "fp6")


@pytest.mark.parametrize(
    ("fmt", "scheme", "capability", "expected"),
    [
        ("nvfp4-ue4m3", "w4a4", None, "16bit"),
        ("nvfp4-ue4m3", "w4a4", (9, 0), "16bit"),
        ("nvfp4-ue4m3", "w4a4", (12, 0), "16bit"),  # no tcgen05 there
        ("nvfp4-ue4m3", "w4a4", (10, 7), "nvfp4-ue4m3"),
        ("nvfp4-ue4m3", "w4a4-dynamic", (10, 7), "nvfp4-ue5m3"),
        ("nvfp4-ue4m3", "w4a16", (10, 7), "16bit"),  # the user has to name one
        ("mxfp4", "w4a16", (10, 0), "mxfp8"),
        ("mxfp4", "w4a16", None, "16bit"),
    ],
)
def test_default_activations(fmt, scheme, capability, expected):
    assert default_activations(FORMATS[fmt], scheme, capability) == expected
