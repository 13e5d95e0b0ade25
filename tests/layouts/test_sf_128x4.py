"""128 x 4 chunks of block scales: where a byte goes, and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.sf_128x4 import Sf128x4

LAYOUT = Sf128x4()


@pytest.mark.parametrize(
    ("row", "scale", "offset"),
    [
        (0, 0, 0),
        (0, 3, 3),
        (1, 0, 16),  # the next lane
        (31, 0, 496),
        (32, 0, 4),  # 32 rows on: beside row 0
        (96, 1, 13),
        (127, 3, 511),
        (0, 4, 512),  # the next chunk along K
        (128, 0, 1024),  # below both chunks of the first 128 rows
    ],
)
def test_golden_offsets(row, scale, offset):
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    scales[row, scale] = 7
    stored = LAYOUT.pack(scales).flatten()
    assert stored.nonzero().flatten().tolist() == [offset]


def test_a_whole_chunk_by_hand():
    r = torch.arange(128)[:, None]
    k = torch.arange(4)[None, :]
    scales = (r + k * 2).to(torch.uint8)
    expected = torch.empty(512, dtype=torch.uint8)
    for row in range(128):
        for column in range(4):
            expected[row % 32 * 16 + row // 32 * 4 + column] = scales[row, column]
    assert torch.equal(LAYOUT.pack(scales).flatten(), expected)


@given(
    lead=st.sampled_from([(), (1,), (3,), (0,)]),
    rows=st.integers(0, 300),
    scales=st.integers(0, 13),
)
def test_round_trip(lead, rows, scales):
    logical = torch.randint(0, 256, (*lead, rows, scales), dtype=torch.uint8)
    before = logical.clone()
    stored = LAYOUT.pack(logical)
    assert tuple(stored.shape) == LAYOUT.storage_shape(tuple(logical.shape))
    assert stored.is_contiguous()
    back = LAYOUT.unpack(stored, tuple(logical.shape))
    assert torch.equal(back, logical)
    assert torch.equal(logical, before)
    assert int((stored != 0).sum()) == int((logical != 0).sum())  # padding is zero


def test_rows_and_columns_that_fill_no_chunk():
    """576 rows x 9 scales: the report of a crash on reshaping back to the unpadded size."""
    logical = torch.randint(1, 256, (576, 9), dtype=torch.uint8)
    assert LAYOUT.storage_shape((576, 9)) == (5, 3, 512)
    assert torch.equal(LAYOUT.unpack(LAYOUT.pack(logical), (576, 9)), logical)


def test_wrong_shapes_are_refused():
    with pytest.raises(LayoutError, match=r"\[..., rows, scales\]"):
        LAYOUT.pack(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(LayoutError, match=r"expected \[2, 1, 512\]"):
        LAYOUT.unpack(torch.zeros(1, 1, 512, dtype=torch.uint8), (129, 4))
