"""A whole conversion: plan, write, verify, appear.

Everything is written to a folder in ``OUT.partial``, beside its journal, and that folder becomes
``OUT`` only when every file is on disk and was read back. Until then there is no ``OUT``; a later
call with the same source and options goes on after the last finished file, to the same bytes.
"""

import fcntl
import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rubin_moe.convert.config import configs
from rubin_moe.convert.journal import FILES, Journal
from rubin_moe.convert.options import Options
from rubin_moe.convert.plan import Plan
from rubin_moe.convert.planner import make_plan
from rubin_moe.convert.stream import WORKER_BYTES, Writer
from rubin_moe.convert.tally import Tally
from rubin_moe.convert.verify import verify
from rubin_moe.errors import ConvertError
from rubin_moe.loader.load import ModelCheckpoint

Stage: TypeAlias = Literal["calibrate", "convert", "verify"]
Report: TypeAlias = Callable[[Stage, int, int], None]
"""Called with the stage, bytes (tokens of ``calibrate``) that were just done, and all of them."""

RECORD = "conversion.json"
_LOCK = "lock"
LOCK_SECONDS = 5.0
_CONFIGS = frozenset({"config.json", "hf_quant_config.json", "params.json", RECORD})
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".pkl", ".gguf")
_MARGIN = 64 << 20  # beside the tensors: configs, tokenizer, journal


@dataclass(frozen=True)
class Outcome:
    """What was written: the folder, the plan, the sums over all experts, files of this call."""

    folder: Path
    plan: Plan
    tally: Tally
    resumed: int


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    options: Options,
    *,
    jobs: int | None = None,
    report: Report | None = None,
) -> Outcome:
    """Converts a checkpoint folder.

    Args:
        out: must not exist; appears whole.
        jobs: processes; default one a core, fewer for small checkpoints.
        report: progress.

    Raises:
        ConvertError: cannot be done or not be written; the source is as it was.
        CheckpointError, ConfigError, FoldError: the source would not load, or would lose too much.
    """
    told: Report = report or (lambda stage, done, total: None)
    out = Path(out)
    if jobs is not None and jobs < 1:
        raise ConvertError(f"jobs = {jobs} is no number of processes")
    with _frozen_heap() as freeze, ModelCheckpoint(source) as checkpoint:
        partial = _work_folder(checkpoint.folder, out)
        plan = make_plan(checkpoint, options)
        freeze()
        if options.calibrate is not None:  # after the plan that tells what cannot be
            from rubin_moe.convert.calibrate import calibrate

            seen = calibrate(
                checkpoint.folder,
                Path(options.calibrate),
                lambda n, all_: told("calibrate", n, all_),
            )
            plan = make_plan(checkpoint, options, seen)
        written = configs(checkpoint, plan)
        if options.target.startswith("nvfp4") and not options.force:
            from rubin_moe.convert.survey import refuse_misfits

            refuse_misfits(checkpoint, plan)
        with _held(partial):
            return _run(checkpoint, plan, written, partial, out, jobs, told)


@contextmanager
def _frozen_heap() -> Iterator[Callable[[], None]]:
    """Headers and the plan are no garbage, and many: they are made without a collection, and after
    the call of what is yielded none searches them, and their pages stay shared with forked workers.
    """
    enabled = gc.isenabled()
    gc.disable()

    def freeze() -> None:
        gc.freeze()
        if enabled:
            gc.enable()

    try:
        yield freeze
    finally:
        if enabled:
            gc.enable()
        gc.unfreeze()


def _run(
    checkpoint: ModelCheckpoint,
    plan: Plan,
    written: dict[str, dict[str, Any]],
    partial: Path,
    out: Path,
    jobs: int | None,
    report: Report,
) -> Outcome:
    journal, files = Journal(partial, plan.fingerprint(_source_files(checkpoint))), partial / FILES
    todo = [i for i, s in enumerate(plan.shards) if s.name not in journal.finished]
    _check_space(plan, files, todo)
    resumed = len(plan.shards) - len(todo)
    read, whole = plan.source_bytes, plan.output_bytes

    def reading(nbytes: int) -> None:
        report("convert", nbytes, read)

    def verifying(nbytes: int) -> None:
        report("verify", nbytes, whole)

    jobs = _jobs(jobs, plan)
    sums: dict[str, int] = {}
    tally = Tally()
    with Writer(checkpoint, plan.shards, files, plan.options, jobs).running() as writer:
        for index, shard in enumerate(plan.shards):
            before = journal.finished.get(shard.name)
            if before is not None:
                reading(sum(g.nbytes for g in shard.groups))
            with writer.written(index, reading) if before is None else nullcontext(before) as done:
                # while it goes to disk
                sums[shard.name] = verify(shard, files / shard.name, done, verifying, writer.map)
            if before is None:
                journal.add(done)
            tally.add(done.tally)
    _write_rest(checkpoint, plan, written, files, sums, tally)
    _appear(partial, out)
    return Outcome(out, plan, tally, resumed)


def _work_folder(source: Path, out: Path) -> Path:
    target, origin = out.resolve(), source.resolve()
    if target == origin or origin in target.parents:
        raise ConvertError(f"{out}: lies within the source, which is never written to")
    if out.exists() or out.is_symlink():
        raise ConvertError(f"{out}: exists already; a conversion never writes over anything")
    return out.with_name(out.name + ".partial")


@contextmanager
def _held(partial: Path) -> Iterator[None]:
    """Makes the work folder, for one conversion at a time; removes it if nothing came of it."""
    try:
        (partial / FILES).mkdir(parents=True, exist_ok=True)
        handle = (partial / _LOCK).open("w")
    except OSError as e:
        raise ConvertError(f"{partial}: cannot be written: {e.strerror}") from e
    with handle:
        # Workers hold the lock too, and those of a killed conversion end a moment after it.
        until = time.monotonic() + LOCK_SECONDS
        while not _locked(handle.fileno()):
            if time.monotonic() > until:
                raise ConvertError(f"{partial}: another conversion is writing it")
            time.sleep(0.05)
        try:
            yield
        except OSError as e:
            raise ConvertError(f"{partial.name}: cannot be written: {e.strerror}") from e
        finally:
            files = partial / FILES
            if files.is_dir() and not any(files.iterdir()):
                shutil.rmtree(partial, ignore_errors=True)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _source_files(checkpoint: ModelCheckpoint) -> list[tuple[str, int, int]]:
    stats = [(f.name, f.stat()) for f in checkpoint.files]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in stats]


def _check_space(plan: Plan, files: Path, todo: list[int]) -> None:
    there = [files / plan.shards[i].name for i in todo]
    held = sum(p.stat().st_blocks * 512 for p in there if p.exists())
    needed = sum(plan.shards[i].size for i in todo)
    free = shutil.disk_usage(files).free + held
    if needed and needed + min(_MARGIN, needed // 8) > free:
        raise ConvertError(
            f"{files.parent}: {needed:,} bytes needed, {free:,} free; nothing was written"
        )


def _jobs(asked: int | None, plan: Plan) -> int:
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, plan.source_bytes // WORKER_BYTES))


def _write_rest(
    checkpoint: ModelCheckpoint,
    plan: Plan,
    written: dict[str, dict[str, Any]],
    folder: Path,
    sums: dict[str, int],
    tally: Tally,
) -> None:
    """Index, configs, the record, and every other file of the source's folder."""
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_file() and path.name not in _CONFIGS and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, folder / path.name)
    files: dict[str, Any] = dict(written)
    if len(plan.shards) > 1:
        weight_map = {o.name: s.name for s in plan.shards for o in s.outputs}
        total = sum(o.nbytes for s in plan.shards for o in s.outputs)
        files["model.safetensors.index.json"] = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
    files[RECORD] = {
        "options": plan.options.record(),
        "result": tally.record(),
        "files": {s.name: {"bytes": s.size, "crc32": sums[s.name]} for s in plan.shards},
        "notes": list(plan.notes),
        "uncalibrated": {m: list(e) for m, e in plan.uncalibrated.items()},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _appear(partial: Path, out: Path) -> None:
    files = partial / FILES
    for path in files.iterdir():
        if path.suffix != ".safetensors":  # those are on disk
            _sync(path)
    _sync(files)
    if out.exists():
        raise ConvertError(f"{out}: appeared meanwhile; the result is in {partial.name}/{FILES}")
    files.rename(out)
    _sync(out.resolve().parent)
    shutil.rmtree(partial)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
