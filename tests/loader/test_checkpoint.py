"""Files: what is wrong with one is said before anything of it is allocated."""

import json
import math
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.checkpoint import Checkpoint, read_header


def raw_file(path, header, data=b""):
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(body)) + body + data)
    return path


def entry(dtype="U8", shape=(2, 2), start=0, stop=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_reads_what_safetensors_wrote(tmp_path):
    tensors = {
        "a": torch.arange(6, dtype=torch.uint8).view(2, 3),
        "b": torch.tensor(0.5),
        "c": torch.zeros(0, 4, dtype=torch.bfloat16),
        "d": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Checkpoint(tmp_path) as checkpoint:
        assert {e.name: (e.dtype, e.shape) for e in checkpoint} == {
            "a": ("U8", (2, 3)),
            "b": ("F32", ()),
            "c": ("BF16", (0, 4)),
            "d": ("F8_E8M0", (4,)),
        }
        for name, tensor in tensors.items():
            got = checkpoint.tensor(name)
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
            assert torch.equal(got.flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"t": entry()}, b"123", "truncated, .* bytes of"),
        ({"t": entry()}, b"12345", "1 bytes after the last tensor"),
        ({"t": entry(shape=(2**40, 2**40), stop=4)}, b"1234", "its range has 4"),
        ({"t": entry(shape=(2**31, 2**33), stop=2**62)}, b"", "its range has"),
        ({"t": entry(shape=(-2, -2))}, b"1234", "shape .* is no list"),
        ({"t": entry(shape=(True, 4))}, b"1234", "shape .* is no list"),
        ({"t": entry(shape=[1] * 9)}, b"1", "shape .* is no list"),
        ({"t": entry(dtype="U7")}, b"1234", "unknown dtype 'U7'"),
        ({"t": entry(dtype=["U8"])}, b"1234", "unknown dtype"),
        ({"t": entry(start=4, stop=0)}, b"1234", "no byte range"),
        ({"t": entry(start=1, stop=5)}, b"12345", "leaves a gap"),
        ({"t": entry(), "u": entry(start=2, stop=6)}, b"123456", "overlaps another"),
        ({"t": [1, 2]}, b"", "needs dtype, shape and data_offsets"),
        ([1], b"", "expected an object"),
        (b'{"t": 1, "t": 2}', b"", "'t' occurs twice"),
        (b'{"t": ', b"", "no valid JSON"),
        (b"[" * 100_000, b"", "no valid JSON: nested deeper than 64"),
        (b'{"t": ' * 65 + b"1" + b"}" * 65, b"", "no valid JSON: nested deeper than 64"),
        (b"[" * 65 + b"]" * 65, b"", "no valid JSON: nested deeper than 64"),
        (b"[" * 64 + b"]" * 64, b"", "a JSON list, expected an object"),
        (b'{"' + b"]" * 99 + b'": ' + b"[" * 65, b"", "no valid JSON: nested deeper than 64"),
        (b'{"' + b"[" * 99, b"", "no valid JSON: Unterminated string"),
        (("[" * 99).encode("utf-16"), b"", "no valid JSON: nested deeper than 64"),
        (b"\xff\xfe", b"", "no valid JSON"),
    ],
)
def test_bad_headers_are_named(tmp_path, header, data, message):
    path = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert "x.safetensors" in str(caught.value)


def test_brackets_in_names_are_no_nesting(tmp_path):
    name = '"[\\' + "[{" * 99
    path = raw_file(tmp_path / "x.safetensors", {name: entry()}, b"1234")
    assert list(read_header(path)) == [name]


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**63) + b"{}"])
def test_no_safetensors_file_at_all(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or no safetensors"):
        Checkpoint(tmp_path)


def sharded(tmp_path, weight_map, files=None):
    for name, tensors in (files or {}).items():
        save_file({t: torch.zeros(2) for t in tensors}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize(
    "file",
    ["../a.safetensors", "/etc/a.safetensors", "x/../../a.safetensors", "..\\a.safetensors",
     "a.bin", "model.pkl", "a\0.safetensors", ""],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(tmp_path, file):
    with pytest.raises(CheckpointError, match="refuses file"):
        Checkpoint(sharded(tmp_path, {"t": file}))


def test_only_the_files_of_the_index_are_read(tmp_path):
    files = {"a.safetensors": ["t"], "b.safetensors": ["u"], "extra.safetensors": ["t", "u", "v"]}
    path = sharded(tmp_path, {"t": "a.safetensors", "u": "b.safetensors"}, files)
    (path / "broken.safetensors").write_bytes(b"junk")
    assert set(Checkpoint(path).tensors) == {"t", "u"}


@pytest.mark.parametrize(
    ("weight_map", "files", "message"),
    [
        ({"t": "a.safetensors"}, {}, "not in the folder"),
        ({"t": "a.safetensors", "x": "a.safetensors"}, {"a.safetensors": ["t"]}, "'x' is not in a"),
        ({"t": "a.safetensors", "u": "a.safetensors", "v": "b.safetensors"},
         {"a.safetensors": ["t"], "b.safetensors": ["u", "v"]}, "'u' .* but in b.safetensors"),
        ({"t": "a.safetensors", "u": "b.safetensors"},
         {"a.safetensors": ["t"], "b.safetensors": ["u", "t"]}, "'t' is in both"),
        ({"t": 5}, {}, "no table of file names"),
        ([1], {}, "no table of file names"),
    ],
)  # fmt: skip
def test_index_and_files_must_agree(tmp_path, weight_map, files, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(sharded(tmp_path, weight_map, files))


def test_a_linked_file_is_the_users_own_business(tmp_path):
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir(), snapshot.mkdir()
    save_file({"t": torch.ones(3)}, store / "a1b2")
    (snapshot / "a.safetensors").symlink_to("../blobs/a1b2")
    sharded(snapshot, {"t": "a.safetensors"})
    assert Checkpoint(snapshot).tensor("t").tolist() == [1, 1, 1]


def test_pickles_are_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"no safetensors files; pytorch_model.bin would run"):
        Checkpoint(tmp_path)
    assert not (tmp_path / "exploded").exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@st.composite
def files(draw):
    """A valid file, with up to two things about it changed."""
    header, data = {}, b""
    for name in draw(st.lists(st.text(max_size=4), unique=True, max_size=3)):
        dtype, size = draw(st.sampled_from([("U8", 1), ("F8_E4M3", 1), ("BF16", 2), ("F32", 4)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        stop = len(data) + math.prod(shape) * size
        header[name] = entry(dtype, shape, len(data), stop)
        data = data.ljust(stop, b"x")
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*header, "new"]))
        if isinstance(header.get(name), dict) and draw(st.booleans()):
            key = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            header[name][key] = draw(
                st.sampled_from(["F4", "I8"]) | st.lists(st.integers(-1, 2**65)) | json_values
            )
        else:
            header[name] = draw(json_values)
    body = draw(st.just(json.dumps(header).encode()) | st.binary(max_size=9))
    data = draw(st.sampled_from([data, data[:-1], data + b"y"]))
    length = draw(st.just(len(body)) | st.integers(0, 2**64 - 1))
    return struct.pack("<Q", length) + body + data


@settings(max_examples=500, deadline=None)
@given(content=files())
def test_any_file_is_read_or_refused_by_name(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "f.safetensors"
    path.write_bytes(content)
    refused = None
    try:
        tensors = read_header(path)
    except CheckpointError as e:
        refused = str(e)
    if refused is not None:
        assert "f.safetensors" in refused
        return
    assert all(8 <= t.start <= t.stop <= len(content) for t in tensors.values())
    with safe_open(str(path), "pt") as theirs:  # what we accept, the library accepts
        assert set(theirs.keys()) == set(tensors)
