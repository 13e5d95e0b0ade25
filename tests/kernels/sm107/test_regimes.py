"""When weights on M lose to tokens on M: counted by hand, and the limit's meaning."""

import pytest

from rubin_moe.kernels.sm107.regimes import (
    MOST_TOKENS,
    TOKENS_ON_M,
    swap_ab,
    swap_ab_loses_from,
    tokens_on_m,
)
from rubin_moe.shapes import model_names, model_shape


def test_counted_by_hand():
    """23 tokens, 256 features, K = 512: two K tiles, two row tiles, N = 24."""
    work = swap_ab("nvfp4-ue4m3", 23, 256, 512)
    assert work.macs == 256 * 24 * 512
    assert work.nbytes == 2 * 2 * 18_432 + 2 * 2 * 23 * (128 + 16)
    other = tokens_on_m("nvfp4-ue4m3", 23, 256, 512, 256)
    assert other.macs == 256 * 256 * 512
    assert other.nbytes == 2 * 23 * (128 + 16) + 2 * 256 * (128 + 2 * 16)


def test_a_pair_loads_its_tokens_once():
    """300 tokens are a tile of 256 and one of 44, whose N is 48; a pair shares their codes."""
    work = swap_ab("mxfp8", 300, 256, 128)
    assert work.macs == 256 * (256 + 48) * 128
    assert work.nbytes == 2 * 2 * 8_704 + 300 * 128 + 2 * 300 * 4


def better(fmt: str, tokens: int, features: int, k: int) -> bool:
    mine = swap_ab(fmt, tokens, features, k).product
    return any(tokens_on_m(fmt, tokens, features, k, m).product < mine for m in TOKENS_ON_M)


@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "mxfp8"])
def test_from_the_limit_on_and_not_before(fmt):
    limit = swap_ab_loses_from(fmt, 4096, 2048)
    assert limit is not None
    assert not better(fmt, limit - 1, 4096, 2048)
    assert all(better(fmt, t, 4096, 2048) for t in range(limit, MOST_TOKENS + 1, 37))


def test_decoding_is_far_below_the_limit_for_every_published_model():
    for name in model_names():
        shape = model_shape(name)
        fmt = "mxfp8" if shape.weight_format == "mxfp4" else shape.weight_format
        limit = swap_ab_loses_from(fmt, 2 * shape.intermediate, shape.hidden)
        assert limit is None or limit > 1000
