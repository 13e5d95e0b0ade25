"""Scales as int32 words, MN-major, TMA-aligned; from the folded weights to the words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.sf_int32_mn import SfInt32Mn
from rubin_moe.loader.fold import fold
from tests.loader.fold_cases import random_weights

PLAIN, UTCCP = SfInt32Mn(utccp=False), SfInt32Mn()


def test_four_scales_make_a_word_and_rows_are_innermost():
    scales = torch.arange(1, 25, dtype=torch.uint8).view(3, 8)
    expected = torch.tensor(
        [
            [0x04030201, 0x0C0B0A09, 0x14131211, 0],
            [0x08070605, 0x100F0E0D, 0x18171615, 0],
        ],
        dtype=torch.int32,
    )
    assert torch.equal(PLAIN.pack(scales), expected)


def test_a_k_that_is_no_multiple_of_four_is_filled_with_zero_bytes():
    scales = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.uint8)
    assert PLAIN.pack(scales)[:, 0].tolist() == [0x04030201, 0x00000005]


@pytest.mark.parametrize(
    ("row", "column"), [(0, 0), (1, 4), (31, 124), (32, 1), (33, 5), (127, 127), (128, 128)]
)
def test_utccp_order_of_rows(row, column):
    """Row 32 q + l of each 128 goes to 4 l + q."""
    scales = torch.zeros(256, 4, dtype=torch.uint8)
    scales[row, 0] = 9
    assert UTCCP.pack(scales)[0].nonzero().flatten().tolist() == [column]


@given(
    utccp=st.booleans(),
    lead=st.sampled_from([(), (2,), (0,)]),
    rows=st.integers(0, 200),
    scales=st.integers(0, 13),
)
def test_round_trip(utccp, lead, rows, scales):
    layout = SfInt32Mn(utccp)
    logical = torch.randint(0, 256, (*lead, rows, scales), dtype=torch.uint8)
    stored = layout.pack(logical)
    assert tuple(stored.shape) == layout.storage_shape(tuple(logical.shape))
    assert stored.dtype == torch.int32
    assert stored.is_contiguous()
    assert stored.shape[-1] * 4 % 16 == 0  # the TMA stride unit
    assert torch.equal(layout.unpack(stored, tuple(logical.shape)), logical)
    assert int((stored.flatten().view(torch.uint8) != 0).sum()) == int((logical != 0).sum())


def test_the_two_orders_have_keys_of_their_own():
    assert PLAIN.key != UTCCP.key
    assert SfInt32Mn() == UTCCP


def test_wrong_storage_is_refused():
    with pytest.raises(LayoutError, match=r"expected torch.int32 \[1, 4\]"):
        PLAIN.unpack(torch.zeros(1, 8, dtype=torch.int32), (3, 4))
    with pytest.raises(LayoutError, match=r"torch.uint8 \[1, 4\], expected torch.int32"):
        PLAIN.unpack(torch.zeros(1, 4, dtype=torch.uint8), (3, 4))


@pytest.mark.parametrize("target", ["ue4m3", "ue5m3"])
def test_from_a_checkpoints_scales_to_words_and_back(target):
    """Fold, pack four to an int32, transpose, align: no byte is lost on the way, and 16-element
    blocks stay 16-element blocks."""
    weights = random_weights()
    folded, report = fold(weights, "exact", target)
    assert report.lossless
    for proj, rows, k in (("w13", 64, 64), ("w2", 64, 32)):
        sf = getattr(folded, proj).sf
        words = UTCCP.pack(sf)
        assert tuple(words.shape) == (4, -(-k // 64), -(-rows // 128) * 128)
        assert torch.equal(UTCCP.unpack(words, tuple(sf.shape)), sf)
        one = words[2, 0, 4 * (5 % 32)]  # row 5 of expert 2: its first four scales
        expected = [*sf[2, 5, :4].tolist(), 0, 0][:4]
        assert list(int(one).to_bytes(4, "little", signed=True)) == expected
