"""Kernels of others, compiled by NVIDIA's compiler, against float64: a few in CI, all on demand.

`pytest -m peers tests/emulator/peers` runs the others; `scripts/emulator_peers.py` runs and records
every case.
"""

import pytest

from rubin_moe.emulator.dsl import emulated_device
from tests.emulator.peers.case import PeerCase
from tests.emulator.peers.suite import CASES

#: One of each kind: NVFP4 with UE5M3 over a CTA pair, mixed FP8 x FP4 (packed on sm_107, unpacked
#: on sm_100), K = 96, gather + SwiGLU by cp.async and by TMA, finalize, wgmma.
IN_CI = (
    "sm_107a-dense_nvfp4_ue5m3_2cta_256x128",
    "sm_107a-dense_mxfp8_x_mxfp4_128x128",
    "sm_103a-dense_nvfp4_128x128",
    "sm_100a-dense_nvfp4_128x128",
    "sm_100a-swap_ab_fc1_nvfp4_128x64",
    "sm_100a-swap_ab_fc2_rows_mxfp4_x_mxfp8_128x128",
    "sm_107a-fc1_gather_swiglu_cpasync",
    "sm_107a-fc2_finalize",
    "sm_90a-fc2_finalize_128x128",
)


def _run(case: PeerCase) -> None:
    """Once with asynchronous operations done at issue, once with them delayed by a seed."""
    with emulated_device(case.target) as gpu:
        prepared = case.prepare()
        at_issue = prepared.run(gpu)
    assert at_issue.passed, at_issue
    with emulated_device(case.target, seed=3) as gpu:
        delayed = prepared.run(gpu)
    assert delayed.passed, delayed


def _case(key: str) -> PeerCase:
    (case,) = [case for case in CASES if case.key == key]
    return case


@pytest.mark.parametrize("key", IN_CI)
def test_peer_matches_float64(key: str) -> None:
    _run(_case(key))


@pytest.mark.peers
@pytest.mark.parametrize("key", [case.key for case in CASES if case.key not in IN_CI])
def test_every_other_peer_matches_float64(key: str) -> None:
    _run(_case(key))


def test_a_changed_nibble_is_seen() -> None:
    """The comparison can fail: one FP4 code of A is changed after the reference was made."""
    case = _case("sm_107a-dense_nvfp4_ue4m3_128x64")
    with emulated_device(case.target) as gpu:
        prepared = case.prepare()
        prepared.inputs[0][3, 5] ^= 1
        comparison = prepared.run(gpu)
    assert not comparison.passed
    assert 0 < comparison.elements - comparison.bit_equal <= 192  # row 3 of C at most
