"""How bytes get from source to output: codes copied unread, checksums of every file, leftovers."""

import json
import os
import random
import zlib

import pytest
from safetensors.torch import load_file

from rubin_moe.convert import checksum, run
from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.convert.source import Source
from rubin_moe.errors import CheckpointError, ConvertError
from rubin_moe.loader.dialect import Reading
from rubin_moe.loader.dialects import DIALECTS
from tests.loader.checkpoints import Style, folder, layer

from .sources import write_fp4


def test_a_checksum_follows_from_those_of_the_parts():
    data = random.Random(0).randbytes(100_003)
    cuts = sorted(random.Random(1).choices(range(len(data)), k=40))
    parts = [data[a:b] for a, b in zip([0, 0, *cuts], [0, *cuts, len(data)], strict=True)]
    assert checksum.whole((len(p), zlib.crc32(p)) for p in parts) == zlib.crc32(data)
    assert checksum.whole([]) == zlib.crc32(b"")


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_record_has_the_checksum_of_every_file(tmp_path, jobs):
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    convert(source, tmp_path / "b", Options("nvfp4-ue5m3", max_shard_bytes=8000), jobs=jobs)
    record = json.loads((tmp_path / "b" / "conversion.json").read_text())
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    assert len(files) > 3
    assert record["files"] == {
        p.name: {"bytes": p.stat().st_size, "crc32": zlib.crc32(p.read_bytes())} for p in files
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("modelopt", Options("nvfp4-ue5m3")),
        ("modelopt", Options("nvfp4-ue4m3", names="compressed-tensors")),
        ("compressed_nvfp4", Options("nvfp4-ue4m3", names="modelopt", fold="full", force=True)),
        ("deepseek_v4", Options("mxfp4", names="compressed-tensors")),
    ],
)
def test_codes_are_copied_and_never_values(tmp_path, monkeypatch, name, options):
    source, _ = write_fp4(tmp_path / "a", name)
    read, real = set(), Source.tensor

    def tensor(self, entry, row=None):
        read.add(entry.name)
        return real(self, entry, row)

    monkeypatch.setattr(Source, "tensor", tensor)
    convert(source, tmp_path / "b", options, jobs=1)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    scales = [n for n in before if ".experts." in n and n.endswith("scale")]
    assert read >= set(scales)
    codes = _codes(before)
    assert len(codes) == 12
    assert not read & codes.keys()
    assert sorted(codes.values()) == sorted(_codes(after).values())


def _codes(tensors):
    """Name -> bytes of the experts' codes, whoever spelled them."""
    leaves = {
        leaf
        for d in DIALECTS.values()
        for leaf in ("weight", "weight_packed")
        if isinstance(r := d.read(leaf), Reading) and r.part == "qdata"
    }
    return {
        n: t.contiguous().numpy().tobytes()
        for n, t in tensors.items()
        if ".experts." in n and n.rpartition(".")[2] in leaves
    }


def test_a_nan_scale_is_told_with_the_block_it_is_on(tmp_path):
    source = layer("nvfp4-ue4m3")
    source.w2.sf[1, 5, 0] = 0x7F
    path = folder(source, Style()).write(tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"1.down_proj.weight_scale: block scale \[5, 0\].*not"
    ):
        convert(path, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)


def test_a_kill_after_the_output_appeared_leaves_it_whole(tmp_path, monkeypatch):
    """The journal goes last, so that no moment is without one of the two."""
    source, _ = write_fp4(tmp_path / "a", "modelopt")

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    convert_again = tmp_path / "c"
    monkeypatch.undo()
    convert(source, convert_again, Options("nvfp4-ue5m3"), jobs=1)
    assert {p.name for p in (tmp_path / "b").iterdir()} == {p.name for p in convert_again.iterdir()}


def test_a_file_that_cannot_be_read_back_is_no_output(tmp_path, monkeypatch):
    source, _ = write_fp4(tmp_path / "a", "modelopt")
    real = os.preadv

    def preadv(fd, buffers, offset):
        if "b.partial" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ConvertError, match=r"cannot be read back.*Input/output error"):
        convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    assert not (tmp_path / "b").exists()


def test_an_error_of_the_disk_that_comes_with_fsync_is_no_output(tmp_path, monkeypatch):
    source, _ = write_fp4(tmp_path / "a", "modelopt")

    def fsync(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConvertError, match="cannot be written: No space left on device"):
        convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    assert not (tmp_path / "b").exists()
