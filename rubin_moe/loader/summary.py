"""What a checkpoint holds and whether it would load, from headers and configs alone.

No tensor is read and torch is not imported; the rules are those of loading (`accounting`), so that
a layer without a reason against it fails at load only for the values of its scales.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rubin_moe.errors import CheckpointError, ConfigError
from rubin_moe.loader.accounting import Account, no_input_scales
from rubin_moe.loader.dialects import NotFp4
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.names import module_layer, parse
from rubin_moe.loader.sharding import Shard, legal_tp_sizes
from rubin_moe.loader.spec import ExpertsSpec


@dataclass(frozen=True)
class LayerSummary:
    """One ``experts`` module.

    Attributes:
        layer: ``layers.3`` or ``mtp.0``; module: its path.
        spec: what it is; None if it is not FP4 or cannot be told.
        unquantized: whether it is another loader's to read, which is no fault.
        faults: why it would not load, a sentence each.
        without_input_scale: projection -> global ids of experts without one, whether or not the
            scheme reads it.
        nbytes: on disk.
    """

    layer: str
    module: str
    spec: ExpertsSpec | None
    unquantized: bool
    faults: tuple[str, ...]
    without_input_scale: Mapping[str, tuple[int, ...]]
    nbytes: int

    def __str__(self) -> str:
        """How it is stored: ``modelopt nvfp4-ue4m3 w4a4``."""
        if self.spec is None:
            return "unquantized" if self.unquantized else "not loadable"
        return f"{self.spec.dialect} {self.spec.fmt} {self.spec.scheme}"

    @property
    def uncalibrated(self) -> Mapping[str, tuple[int, ...]]:
        """`without_input_scale` where the scheme reads them."""
        reads = self.spec is not None and self.spec.input_scales == "require"
        return self.without_input_scale if reads else {}

    def why_not_static(self) -> str | None:
        """None if activations can be quantized with calibrated input scales, else the sentence that
        loading such a layer ends with: of gate and up first, as it looks at them."""
        for projections in (("gate", "up"), ("down",)):
            lacking = {p: e for p, e in self.without_input_scale.items() if p in projections}
            if lacking:
                return no_input_scales(self.module, lacking)
        return None

    def rank_bytes(self, shard: Shard) -> int:
        """Bytes of codes and block scales on one rank, padding included; 0 if it is not FP4."""
        if self.spec is None:
            return 0
        spec = self.spec
        width = shard.columns(spec.intermediate, spec.fmt.sf_vec_size).padded
        return spec.nbytes(len(shard.experts(spec.num_experts)), width)


@dataclass(frozen=True)
class CheckpointSummary:
    """The whole checkpoint.

    Attributes:
        name: of its folder; files, tensors, nbytes: of the index's files.
        declared_by: where the quantization config was found; None if there is none.
        layers: every module of routed experts, in order.
        exclusions: entry of the exclude list -> modules that it names.
        other_bytes: dtype -> bytes of all tensors but routed experts.
    """

    name: str
    files: int
    tensors: int
    nbytes: int
    declared_by: str | None
    layers: tuple[LayerSummary, ...]
    exclusions: Mapping[str, int]
    other_bytes: Mapping[str, int]

    @property
    def loads(self) -> bool:
        """Whether there are FP4 experts and no layer has a fault."""
        return any(x.spec for x in self.layers) and not any(x.faults for x in self.layers)

    @cached_property
    def formats(self) -> dict[str, list[str]]:
        """How layers are stored -> which, for the table's first lines."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            found.setdefault(str(layer), []).append(layer.layer)
        return found

    def tp_sizes(self, *, pad: bool = True) -> tuple[int, ...]:
        """TP sizes that every FP4 layer can be cut to; without ``pad``, only even cuts."""
        sizes = [
            set(legal_tp_sizes(x.spec.intermediate, x.spec.fmt.sf_vec_size, pad=pad))
            for x in self.layers
            if x.spec is not None
        ]
        return tuple(sorted(set.intersection(*sizes))) if sizes else ()

    def ep_sizes(self) -> tuple[int, ...]:
        """EP sizes that give every rank the same number of experts."""
        counts = {x.spec.num_experts for x in self.layers if x.spec is not None}
        if not counts:
            return ()
        return tuple(s for s in range(1, min(counts) + 1) if not any(c % s for c in counts))

    def rank_bytes(self, shard: Shard) -> int:
        """Bytes of all routed FP4 experts on one rank."""
        return sum(layer.rank_bytes(shard) for layer in self.layers)


def summarize(checkpoint: ModelCheckpoint) -> CheckpointSummary:
    """Reads what is open already; a fault of one layer is noted and the next one looked at.

    Raises:
        ConfigError: exclude patterns that cannot be read.
    """
    modules = sorted(checkpoint.experts(), key=lambda m: (module_layer(m), m))
    other: Counter[str] = Counter()
    linear: set[str] = set()
    for entry in checkpoint:
        if parse(entry.name) is None:
            other[entry.dtype] += entry.nbytes
            linear.add(entry.name.rpartition(".")[0])
    exclusions: Counter[str] = Counter()
    if checkpoint.quant is not None:
        exclusions.update(dict.fromkeys(checkpoint.quant.exclude.entries, 0))
        for module in (*linear, *modules):
            found = checkpoint.quant.excluded(module)
            if found is not None:
                exclusions[found] += 1
    return CheckpointSummary(
        name=checkpoint.folder.resolve().name,
        files=len(checkpoint.files),
        tensors=len(checkpoint.tensors),
        nbytes=sum(e.nbytes for e in checkpoint),
        declared_by=None if checkpoint.quant is None else checkpoint.quant.source,
        layers=tuple(_layer(checkpoint, module) for module in modules),
        exclusions=exclusions,
        other_bytes=other,
    )


def _layer(checkpoint: ModelCheckpoint, module: str) -> LayerSummary:
    entries = checkpoint.experts()[module]
    spec, unquantized, faults = None, False, list[str]()
    without: dict[str, tuple[int, ...]] = {}
    try:
        kind = checkpoint.stored(module)
        unquantized = isinstance(kind, NotFp4) and kind.kind == "unquantized"
        spec = None if unquantized else checkpoint.spec(module)
    except (CheckpointError, ConfigError) as e:
        faults.append(str(e))
    if spec is not None:
        account = Account(spec, module, range(spec.num_experts), "keep")
        for entry in entries:
            try:
                _fill(account, entry.name, entry.dtype, entry.shape)
            except CheckpointError as e:
                faults.append(str(e))
        incomplete = account.why_incomplete()
        if incomplete is not None and not faults:
            faults.append(incomplete)
        lacking = {p: tuple(account.lacking(p, "input_dec")) for p in spec.projections}
        without = {p: experts for p, experts in lacking.items() if experts}
    return LayerSummary(
        layer=str(module_layer(module)),
        module=module,
        spec=spec,
        unquantized=unquantized,
        faults=tuple(faults),
        without_input_scale=without,
        nbytes=sum(e.nbytes for e in entries),
    )


def _fill(account: Account, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    admitted = account.admit(name)
    if admitted is None:
        return
    account.check(admitted, dtype, shape)
    for projection in admitted.projections:
        for _, local in account.targets(admitted, rows=1):
            account.mark(admitted, projection, local)
