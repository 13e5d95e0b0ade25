"""What a conversion will write, decided from headers and configs: names, dtypes, shapes, files.

The unit of work is a group: one expert, one matrix (or those that share a scale), or one tensor
that is copied. Groups whose tensors are the same, a stacked module's experts, stay in one file.
torch is not imported.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeAlias

import rubin_moe
from rubin_moe.convert.options import Options
from rubin_moe.convert.output import OutTensor, Shape, Stacked
from rubin_moe.errors import ConvertError
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.loader.checkpoint import DTYPE_BITS, TensorEntry
from rubin_moe.loader.dialect import Dialect, Stacking
from rubin_moe.loader.spec import ExpertsSpec

ALIGNMENT = 8  # of a header, as the safetensors library writes it


@dataclass(frozen=True)
class ModuleJob:
    """What is done to every expert of one module.

    Attributes:
        module: its path; source: how it is stored, for messages.
        spec: of FP4 sources, None for 16-bit and FP8 ones; lie: of stacked unquantized tensors.
        fmt, dialect: what is written; None for bfloat16.
        stacked: where one tensor holds all experts of the output.
        num_experts: of the module.
    """

    module: str
    source: str
    spec: ExpertsSpec | None
    lie: Stacking | None
    fmt: BlockFormat | None
    dialect: Dialect | None
    stacked: Stacked | None
    num_experts: int


@dataclass(frozen=True)
class ExpertGroup:
    """One expert; ``entries`` are its tensors and the stacked ones, ``nbytes`` its share.

    ``inputs``: projection -> calibrated input scale, of 16-bit sources.
    """

    job: ModuleJob
    expert: int
    entries: tuple[TensorEntry, ...]
    shapes: dict[str, Shape]
    nbytes: int
    inputs: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.job.module}.{self.expert}"


@dataclass(frozen=True)
class LinearGroup:
    """Matrices outside the experts that share a global scale.

    Attributes:
        dialect: of the source, None for 16-bit and FP8; target: None for bfloat16.
        entries: module -> leaf -> tensor; shapes: module -> what is written.
    """

    dialect: Dialect | None
    target: Dialect | None
    entries: dict[str, dict[str, TensorEntry]]
    shapes: dict[str, Shape]
    nbytes: int

    def __str__(self) -> str:
        return ", ".join(self.entries)


@dataclass(frozen=True)
class CopyGroup:
    """A tensor that is copied byte for byte, under a name of its own where names change.

    ``reciprocal``: a scalar that the other producer stores as ``1 / value``.
    """

    entry: TensorEntry
    out: OutTensor
    reciprocal: bool = False

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes

    def __str__(self) -> str:
        return self.entry.name


Group: TypeAlias = ExpertGroup | LinearGroup | CopyGroup


@dataclass(frozen=True)
class Bundle:
    """Groups that write the same tensors."""

    outputs: tuple[OutTensor, ...]
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        return sum(o.nbytes for o in self.outputs)


@dataclass(frozen=True)
class Shard:
    """One output file.

    Attributes:
        header: bytes before the first tensor, complete; starts: tensor -> offset in the file.
        outputs: in order of the file; size: of the file.
    """

    name: str
    header: bytes
    outputs: tuple[OutTensor, ...]
    starts: dict[str, int]
    groups: tuple[Group, ...]
    size: int


@dataclass(frozen=True)
class Plan:
    """A whole conversion.

    Attributes:
        options: as asked for; source_bytes: tensor bytes that are read.
        shards: files in order; modules: what becomes of every experts module.
        converted_linears: modules outside the experts that change.
        rest: quantized modules that are copied -> algorithm, for the config.
        uncalibrated: module -> experts without an input scale of their own.
        calibration: digest of what was measured on a text.
        notes: what the reader should know.
    """

    options: Options
    shards: tuple[Shard, ...]
    modules: tuple[ModuleJob, ...]
    converted_linears: tuple[str, ...]
    rest: dict[str, str]
    uncalibrated: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calibration: str = ""
    notes: tuple[str, ...] = ()

    @property
    def source_bytes(self) -> int:
        return sum(g.nbytes for s in self.shards for g in s.groups)

    @property
    def output_bytes(self) -> int:
        return sum(s.size for s in self.shards)

    @property
    def tensors(self) -> dict[str, OutTensor]:
        """Every output tensor by name."""
        return {o.name: o for s in self.shards for o in s.outputs}

    def fingerprint(self, source: Sequence[tuple[str, int, int]]) -> str:
        """Tells one conversion from another: version, options, headers, source files.

        Args:
            source: name, size and modification time of the source's files.
        """
        told = json.dumps(
            [rubin_moe.__version__, self.options.record(), self.calibration, list(source)]
        )
        digest = sha256(told.encode())
        for shard in self.shards:
            digest.update(shard.name.encode() + shard.header)
        return digest.hexdigest()

    def lines(self) -> Iterator[str]:
        """The plan for people; ``--dry-run`` prints it."""
        kinds = Counter((j.source, _target(j)) for j in self.modules)
        for (source, target), count in kinds.items():
            yield f"{count} layers of experts: {source} -> {target}"
        if self.converted_linears:
            yield f"{len(self.converted_linears)} other matrices converted"
        copied = [g for s in self.shards for g in s.groups if isinstance(g, CopyGroup)]
        yield f"{len(copied)} tensors copied, {sum(g.nbytes for g in copied):,} bytes"
        yield f"reads {self.source_bytes:,} bytes, writes {self.output_bytes:,} bytes"
        for shard in self.shards:
            yield f"  {shard.name}: {len(shard.outputs)} tensors, {shard.size:,} bytes"
        for module, experts in self.uncalibrated.items():
            yield f"  no input scale of their own: {module} experts {list(experts)}"
        yield from (f"  note: {n}" for n in self.notes)


def _target(job: ModuleJob) -> str:
    if job.fmt is None:
        return "bf16" + (", stacked" if job.stacked else "")
    return f"{job.fmt} ({job.dialect})"


def lay_out(bundles: Sequence[Bundle], max_bytes: int, stem: str = "model") -> tuple[Shard, ...]:
    """Files of at most ``max_bytes`` each, unless one bundle alone is larger.

    Raises:
        ConvertError: two groups write a tensor of the same name.
    """
    parts: list[list[Bundle]] = [[]]
    filled = 0
    for bundle in bundles:
        if parts[-1] and filled + bundle.nbytes > max_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(bundle)
        filled += bundle.nbytes
    seen: set[str] = set()
    for bundle in bundles:
        for out in bundle.outputs:
            if out.name in seen:
                raise ConvertError(f"tensor {out.name!r} would be written twice")
            seen.add(out.name)
    if len(parts) == 1:
        return (_shard(f"{stem}.safetensors", parts[0]),)
    return tuple(
        _shard(f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors", part)
        for i, part in enumerate(parts, 1)
    )


def _shard(name: str, bundles: Sequence[Bundle]) -> Shard:
    """Wide dtypes first, so that every tensor is aligned to its own."""
    outputs = [o for b in bundles for o in b.outputs]
    outputs.sort(key=lambda o: -DTYPE_BITS[o.dtype])
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for out in outputs:
        table[out.name] = {
            "dtype": out.dtype,
            "shape": list(out.shape),
            "data_offsets": [end, end + out.nbytes],
        }
        end += out.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    starts, at = {}, len(header)
    for out in outputs:
        starts[out.name] = at
        at += out.nbytes
    groups = tuple(g for b in bundles for g in b.groups)
    return Shard(name, header, tuple(outputs), starts, groups, at)
