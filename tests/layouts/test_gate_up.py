"""Orders of gate and up rows, and padding each half for itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rubin_moe.errors import LayoutError
from rubin_moe.layouts.gate_up import GateUpRows


def rows_of(layout: GateUpRows, half: int) -> list[int]:
    """Where each row went: gate rows are 1..half, up rows 101..., padding 0."""
    logical = torch.cat([torch.arange(1, half + 1), 100 + torch.arange(1, half + 1)])
    return layout.pack(logical[:, None]).flatten().tolist()


@pytest.mark.parametrize(
    ("layout", "half", "expected"),
    [
        (GateUpRows(), 2, [1, 2, 101, 102]),
        (GateUpRows(first="up"), 2, [101, 102, 1, 2]),
        (GateUpRows(stripe=1), 3, [1, 101, 2, 102, 3, 103]),
        (GateUpRows(stripe=2, first="up"), 4, [101, 102, 1, 2, 103, 104, 3, 4]),
        (GateUpRows(half_multiple=4), 3, [1, 2, 3, 0, 101, 102, 103, 0]),
        (GateUpRows(stripe=2), 3, [1, 2, 101, 102, 3, 0, 103, 0]),
        (GateUpRows(stripe=2, half_multiple=3), 1, [1, 0, 101, 0] + [0] * 8),
    ],
)
def test_golden_permutations(layout, half, expected):
    assert rows_of(layout, half) == expected


@pytest.mark.parametrize("stripe", [16, 64])
@pytest.mark.parametrize("half", [64, 128, 192, 96])
def test_stripes_of_hardware_width(stripe, half):
    """Rubin's FC1: up stripe, gate stripe; 96 rows in stripes of 64 pad each half to 128."""
    got = rows_of(GateUpRows(stripe=stripe, first="up"), half)
    padded = -(-half // stripe) * stripe
    assert len(got) == 2 * padded
    for i in range(padded):
        at = i // stripe * 2 * stripe + i % stripe
        assert got[at] == (101 + i if i < half else 0)
        assert got[at + stripe] == (1 + i if i < half else 0)


@given(
    stripe=st.sampled_from([None, 1, 2, 16]),
    first=st.sampled_from(["gate", "up"]),
    multiple=st.sampled_from([1, 3, 16]),
    half=st.integers(0, 40),
    width=st.integers(0, 3),
    lead=st.sampled_from([(), (2,), (0,)]),
)
def test_round_trip(stripe, first, multiple, half, width, lead):
    layout = GateUpRows(stripe, first, multiple)
    logical = torch.randint(0, 256, (*lead, 2 * half, width), dtype=torch.uint8)
    stored = layout.pack(logical)
    assert tuple(stored.shape) == layout.storage_shape(tuple(logical.shape))
    assert torch.equal(layout.unpack(stored, tuple(logical.shape)), logical)
    assert int((stored != 0).sum()) == int((logical != 0).sum())


@given(stripe=st.sampled_from([None, 1, 4]), half=st.integers(0, 20))
def test_a_bias_goes_where_its_rows_go(stripe, half):
    rows = torch.rand(2, 2 * half, 1)
    bias = rows[..., 0].clone()
    by_rows = GateUpRows(stripe, "up").pack(rows)[..., 0]
    layout = GateUpRows(stripe, "up", axis=-1)
    assert torch.equal(layout.pack(bias), by_rows)
    assert torch.equal(layout.unpack(by_rows, (2, 2 * half)), bias)


def test_bad_shapes_and_parameters():
    with pytest.raises(LayoutError, match="gate and up rows expected"):
        GateUpRows().pack(torch.zeros(3, 2))
    with pytest.raises(LayoutError, match=r"expected \[8, 1\]"):
        GateUpRows(stripe=4).unpack(torch.zeros(6, 1), (6, 1))
    with pytest.raises(LayoutError, match="at least 1"):
        GateUpRows(stripe=0)
    with pytest.raises(LayoutError, match="axis -2 or -1"):
        GateUpRows(axis=0)
