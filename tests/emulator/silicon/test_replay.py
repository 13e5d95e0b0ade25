"""The emulator against the recorded answers of an H200, probe by probe.

``scripts/record_silicon.py`` records on a GPU; here CI replays without one. A sample runs by
default, every probe with the marker ``long``.
"""

from __future__ import annotations

import pytest

from rubin_moe.emulator.isa.legality import IllegalOperationError
from rubin_moe.emulator.state.tensormap import FORMATS, decode_tensormap

from .probe import Probe
from .recording import MAP_BYTES, PATH, Recording, all_maps, all_probes, digest
from .replay import compare, driver_maps, emulate, faults, refuses

RECORDING = Recording.load() if PATH.exists() else None
ANSWERED = set() if RECORDING is None else {*RECORDING.outputs, *RECORDING.errors}
PROBES = [p for p in all_probes() if digest(p) in ANSWERED]
SAMPLE = PROBES[::12]
ELSEWHERE = [p for p in PROBES if not any(p is q for q in SAMPLE)]

needs_recording = pytest.mark.skipif(RECORDING is None, reason="no recording of silicon yet")


DIFFERENCES = {
    # The tensor ends in the middle of a 16-byte chunk. An H200 writes the chunk whole; by the ISA
    # nothing past the end is written, and that is what the emulator does.
    "tma store 1d 8-bit 0": (50, 2),
}
"""Name -> first word and number of words where the emulator keeps to the ISA."""


def replay(probe: Probe) -> None:
    assert RECORDING is not None
    key = digest(probe)
    if probe.refused:
        assert RECORDING.errors[key].startswith("cuModuleLoadData")
        assert refuses(probe)
        return
    if probe.faults:
        assert RECORDING.errors[key].startswith("cuCtxSynchronize")
        assert faults(probe, driver_maps(probe))
        return
    assert key not in RECORDING.errors, f"the device ended the launch: {RECORDING.errors[key]}"
    recorded = RECORDING.outputs[key]
    emulated = emulate(probe, RECORDING.maps.get(key, b""))
    result = compare(probe, recorded, emulated)
    if probe.name in DIFFERENCES:
        assert (result.first, result.mismatches) == DIFFERENCES[probe.name]
        return
    word = slice(4 * result.first, 4 * result.first + 4)
    assert not result.mismatches, (
        f"{result.mismatches} of {result.cases} words differ, worst {result.worst:g}; word "
        f"{result.first}: silicon {recorded[word].tobytes()[::-1].hex()}, "
        f"emulator {emulated[word].tobytes()[::-1].hex()}"
    )


@needs_recording
def test_every_probe_was_recorded() -> None:
    missing = [p.name for p in all_probes() if digest(p) not in ANSWERED]
    assert not missing, "these probes changed since the recording: record them again"


@needs_recording
@pytest.mark.parametrize("probe", SAMPLE, ids=lambda p: p.name)
def test_sample(probe: Probe) -> None:
    replay(probe)


@needs_recording
@pytest.mark.long
@pytest.mark.parametrize("probe", ELSEWHERE, ids=lambda p: p.name)
def test_all_others(probe: Probe) -> None:
    replay(probe)


# CU_TENSOR_MAP_DATA_TYPE -> name of the format that the decoder should find
NAMES = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 8: "f64"}
NAMES |= {9: "bf16", 10: "f32.ftz", 11: "f32", 12: "f32.ftz"}


@needs_recording
def test_tensor_maps_as_the_driver_encodes_them() -> None:
    assert RECORDING is not None
    specs = [(s, e) for s, e in zip(all_maps(), RECORDING.encodings, strict=True) if e]
    for probe in PROBES:
        raw = RECORDING.maps.get(digest(probe), b"")
        for i, spec in enumerate(probe.maps if raw else ()):
            specs.append((spec, raw[MAP_BYTES * i : MAP_BYTES * (i + 1)]))
    assert len(specs) > 20
    for spec, encoded in specs:
        if any(step > 1 for step in spec.element_strides[1:]):
            with pytest.raises(IllegalOperationError, match="traversal stride"):
                decode_tensormap(encoded)
            continue
        t = decode_tensormap(encoded)
        assert t.fill_nan == spec.fill_nan
        assert t.dims == spec.dims
        assert t.strides == spec.strides
        assert t.box == spec.box
        assert t.swizzle == spec.swizzle
        assert t.format.name == NAMES[spec.dtype], spec
        assert t.format in FORMATS.values()
