"""What a kill, a full disk, a bad disk and missing rights leave behind."""

import errno
import json
import os
import random
import shutil

import pytest

from rubin_moe.convert import stream
from rubin_moe.convert.options import Options
from rubin_moe.convert.run import convert
from rubin_moe.errors import ConvertError

from .crashes import cut_short, digest, killed, reports
from .sources import write_dense, write_fp4

LAYERS = 12
OPTIONS = Options("nvfp4-ue4m3", max_shard_bytes=20_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("crash") / "a", "bf16", layers=LAYERS, shards=3)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_kill_at_any_moment_gives_the_same_bytes_in_the_end(source, tmp_path, jobs):
    before, out = digest(source), tmp_path / "out"
    count = reports(source, tmp_path / "whole", OPTIONS, jobs)
    for moment in random.Random(jobs).sample(range(count), 3):
        hit = killed(source, out, OPTIONS, jobs, moment)
        # One that goes on from finished files has fewer reports, and may end before.
        assert out.exists() != hit
        if not hit:
            break
    else:
        reports(source, out, OPTIONS, jobs)
    assert digest(out) == digest(tmp_path / "whole")
    assert digest(source) == before
    assert not (tmp_path / "out.partial").exists()


def test_finished_files_are_not_written_again(source, tmp_path, monkeypatch):
    """Dies in the fourth file: the first three stay, and only the rest is written."""
    options, out = Options("nvfp4-ue5m3", max_shard_bytes=20_000), tmp_path / "b"
    real, calls = stream.Writer.written, []

    def written(self, index, progress):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(index)
        return real(self, index, progress)

    monkeypatch.setattr(stream.Writer, "written", written)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, options, jobs=1)
    assert not out.exists()
    monkeypatch.setattr(stream.Writer, "written", real)
    outcome = convert(source, out, options, jobs=1)
    assert outcome.resumed == 3
    convert(source, tmp_path / "whole", options, jobs=1)
    assert digest(out) == digest(tmp_path / "whole")


def test_a_torn_journal_line_and_a_changed_file_are_noticed(source, tmp_path, monkeypatch):
    options, out = Options("nvfp4-ue5m3", max_shard_bytes=20_000), tmp_path / "b"
    monkeypatch.setattr("rubin_moe.convert.run._write_rest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, out, options, jobs=1)
    monkeypatch.undo()
    partial = tmp_path / "b.partial"
    journal = partial / "journal.jsonl"
    journal.write_text(journal.read_text()[:-10])  # the last line is torn
    first = sorted(partial.glob("files/*.safetensors"))[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(ConvertError, match="reads back with other bytes"):
        convert(source, out, options, jobs=1)
    assert not out.exists()


def test_another_conversion_in_the_work_folder_is_not_mixed_in(source, tmp_path, monkeypatch):
    monkeypatch.setattr("rubin_moe.convert.run._write_rest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    monkeypatch.undo()
    with pytest.raises(ConvertError, match="finished files of another conversion"):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)


def test_what_another_conversion_only_began_is_no_obstacle_and_not_in_the_output(source, tmp_path):
    assert cut_short(source, tmp_path / "b", OPTIONS, 5_000).startswith("ConvertError")
    assert list((tmp_path / "b.partial" / "files").iterdir())
    convert(source, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    convert(source, tmp_path / "whole", Options("nvfp4-ue5m3"), jobs=1)
    assert digest(tmp_path / "b") == digest(tmp_path / "whole")


@pytest.mark.parametrize("limit", [0, 5_000, 15_000])
def test_a_full_disk_is_a_clear_error_and_no_checkpoint(source, tmp_path, limit):
    before = digest(source)
    error = cut_short(source, tmp_path / "b", OPTIONS, limit)
    assert error.startswith("ConvertError"), error
    assert "cannot be written: File too large" in error
    assert not (tmp_path / "b").exists()
    assert digest(source) == before
    convert(source, tmp_path / "b", OPTIONS, jobs=1)  # goes on when there is room


def test_too_little_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConvertError, match="1,000 free; nothing was written"):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
    assert not list(tmp_path.iterdir())


def test_a_read_error_names_the_tensor(source, tmp_path, monkeypatch):
    real = os.preadv

    def preadv(fd, buffers, offset):
        if offset > 50_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ConvertError, match=r"model-0000.*cannot be read: Input/output error"):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
    assert not (tmp_path / "b").exists()


def test_a_source_cut_short_under_the_conversion_names_the_tensor(tmp_path, monkeypatch):
    path, _ = write_fp4(tmp_path / "a", "modelopt")
    real = stream.Writer.written

    def written(self, index, progress):
        with (path / "model.safetensors").open("r+b") as f:
            f.truncate(30_000)
        return real(self, index, progress)

    monkeypatch.setattr(stream.Writer, "written", written)
    with pytest.raises(ConvertError, match="ends within tensor"):
        convert(path, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)


def test_a_dead_worker_is_told(source, tmp_path, monkeypatch):
    monkeypatch.setattr(stream.Writer, "run", lambda *_: os._exit(9))
    with pytest.raises(ConvertError, match="a worker process died"):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=2)
    assert not (tmp_path / "b").exists()


def test_errors_of_a_worker_are_its_own(tmp_path):
    """A refusal deep in a group comes through the pool as it is."""
    from rubin_moe.errors import FoldError

    path, _ = write_fp4(tmp_path / "a", "modelopt")
    with pytest.raises(FoldError, match="loses too much"):
        convert(path, tmp_path / "b", Options("nvfp4-ue4m3", fold="full"), jobs=2)


def test_a_folder_without_rights(source, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ConvertError, match="cannot be written: Permission denied"):
            convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
    finally:
        tmp_path.chmod(0o700)


def test_denied_writes_are_a_clear_error(source, tmp_path, monkeypatch):
    def pwrite(fd, data, offset):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ConvertError, match="cannot be written: Permission denied"):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)


def test_two_at_once_on_one_output_are_refused(source, tmp_path, monkeypatch):
    inner = []
    monkeypatch.setattr("rubin_moe.convert.run.LOCK_SECONDS", 0.1)

    def verify(*_):
        with pytest.raises(ConvertError) as caught:
            convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
        inner.append(str(caught.value))
        raise KeyboardInterrupt

    monkeypatch.setattr("rubin_moe.convert.run.verify", verify)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
    assert "another conversion is writing it" in inner[0]


def test_an_output_is_never_written_over_nor_inside_the_source(source, tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ConvertError, match="exists already"):
        convert(source, tmp_path / "b", Options("nvfp4-ue4m3"), jobs=1)
    with pytest.raises(ConvertError, match="within the source"):
        convert(source, source / "b", Options("nvfp4-ue4m3"), jobs=1)
    with pytest.raises(ConvertError, match="jobs = 0"):
        convert(source, tmp_path / "c", Options("nvfp4-ue4m3"), jobs=0)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_workers_give_the_bytes_of_one_process(source, tmp_path):
    for jobs in (1, 2):
        convert(source, tmp_path / str(jobs), Options("nvfp4-ue5m3"), jobs=jobs)
    assert digest(tmp_path / "1") == digest(tmp_path / "2")


def test_a_copied_tensor_that_is_not_finite_is_reported(tmp_path):
    from safetensors.torch import load_file, save_file

    path, _ = write_fp4(tmp_path / "a", "modelopt")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, path / "model.safetensors")
    outcome = convert(path, tmp_path / "b", Options("nvfp4-ue5m3"), jobs=1)
    assert outcome.tally.non_finite == ("model.norm.weight",)
    record = json.loads((tmp_path / "b" / "conversion.json").read_text())
    assert record["result"]["non_finite"] == ["model.norm.weight"]
