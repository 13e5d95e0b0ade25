"""A checkpoint's headers and the options -> a `plan.Plan`, or the reason why there is none."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from rubin_moe.convert.linears import Linears
from rubin_moe.convert.options import Options
from rubin_moe.convert.output import BY_NAMES, FORMATS, OutTensor, Shape, Stacked, leaves
from rubin_moe.convert.plan import Bundle, CopyGroup, ExpertGroup, ModuleJob, Plan, lay_out
from rubin_moe.convert.recode_rules import keeps_dec, why_not
from rubin_moe.errors import CheckpointError, ConvertError
from rubin_moe.formats.spec import is_nvfp4
from rubin_moe.loader.checkpoint import TensorEntry
from rubin_moe.loader.dialect import Dialect, Reading, Stacking
from rubin_moe.loader.dialects import NotFp4
from rubin_moe.loader.gpt_oss import GPT_OSS
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.modelopt_stacked import STACKINGS
from rubin_moe.loader.names import module_layer, parse, slot_of
from rubin_moe.loader.patterns import Patterns
from rubin_moe.loader.summary import LayerSummary, summarize

if TYPE_CHECKING:
    from rubin_moe.convert.calibrate import Calibration


def make_plan(
    checkpoint: ModelCheckpoint, options: Options, calibration: "Calibration | None" = None
) -> Plan:
    """The plan. No tensor is read.

    Args:
        calibration: where the options ask for one; without it the plan is only to look at.

    Raises:
        ConvertError: a direction that does not exist, names that cannot say the target, nothing to
            convert.
        CheckpointError, ConfigError: the source would not load; see `loader.summary`.
    """
    return _Planner(checkpoint, options, calibration).plan()


class _Planner:
    def __init__(
        self, checkpoint: ModelCheckpoint, options: Options, calibration: "Calibration | None"
    ) -> None:
        self.checkpoint, self.options, self.calibration = checkpoint, options, calibration
        self.exclude = Patterns(options.exclude)
        self.notes: list[str] = []
        self.uncalibrated: dict[str, tuple[int, ...]] = {}
        self.layers = {x.module: x for x in summarize(checkpoint).layers}
        jobs = (self._job(m, x) for m, x in self.layers.items())
        self.jobs = {j.module: j for j in jobs if j is not None}
        if not self.jobs and not options.with_linears:
            raise ConvertError(
                f"{checkpoint.folder.name}: nothing to convert to {options.target}: "
                + ("; ".join(self.notes) or "no routed experts")
            )

    def plan(self) -> Plan:
        self._check_excludes()
        self._check_fold()
        linears = Linears(self.checkpoint, self.options, self._linear_dialect())
        groups = {m: self._module(j) for m, j in self.jobs.items()}
        bundles: list[Bundle] = []
        started: set[str] = set()
        for entry in self.checkpoint:
            parsed = parse(entry.name)
            module = None if parsed is None else parsed.module
            if module in groups:
                if module not in started:
                    started.add(module)
                    bundles += groups[module]
                continue
            found = linears.bundle(entry) if parsed is None else None
            bundles += _copy(entry) if found is None else found
        return Plan(
            options=self.options,
            shards=lay_out(bundles, self.options.max_shard_bytes),
            modules=tuple(self.jobs.values()),
            converted_linears=tuple(linears.converted),
            rest=linears.rest,
            uncalibrated=self.uncalibrated,
            calibration="" if self.calibration is None else self.calibration.digest(),
            notes=tuple(self.notes),
        )

    def _check_excludes(self) -> None:
        """A misspelt entry would leave nothing as it is."""
        others = {e.name.rpartition(".")[0] for e in self.checkpoint if parse(e.name) is None}
        modules = others.union(self.layers)
        for entry in self.options.exclude:
            one = Patterns((entry,))
            if not any(one.match(module) for module in modules):
                raise ConvertError(
                    f"exclude {entry!r} matches no module; experts are one, such as "
                    f"{next(iter(self.layers), 'none')}"
                )

    def _check_fold(self) -> None:
        """What is asked for is done or refused."""
        nvfp4 = any(j.spec is not None and is_nvfp4(j.spec.fmt) for j in self.jobs.values())
        if self.options.fold is not None and (not nvfp4 or self.options.target == "bf16"):
            raise ConvertError(
                f"fold {self.options.fold!r}: folding is from NVFP4 experts to NVFP4, and "
                f"there is nothing to fold"
            )

    # -- modules of experts ----------------------------------------------------------------------

    def _job(self, module: str, layer: LayerSummary) -> ModuleJob | None:
        entry = self.exclude.match(module)
        if entry is not None:
            self.notes.append(f"{module}: left as it is ({entry})")
            return None
        stored = self.checkpoint.stored(module)
        lie = self.options.stacking or STACKINGS.get(self.checkpoint.sizes.model_type)
        if isinstance(stored, Dialect):
            if layer.faults:
                raise CheckpointError("\n".join(layer.faults))
            assert layer.spec is not None
            if self.options.calibrate is not None:
                raise ConvertError(
                    f"{module}: is {stored}; only 16-bit experts are calibrated, convert to bf16 "
                    "first"
                )
            if layer.uncalibrated:
                experts = sorted({e for ids in layer.uncalibrated.values() for e in ids})
                self.uncalibrated[module] = tuple(experts)
            return self._quantized_job(layer, stored)
        if stored.kind not in ("unquantized", "fp8"):
            raise ConvertError(f"{stored.reason}; exclude it to copy it as it is")
        if stored.kind == "unquantized" and self.options.target == "bf16":
            return None
        return self._dense_job(module, stored, lie)

    def _quantized_job(self, layer: LayerSummary, stored: Dialect) -> ModuleJob | None:
        spec = layer.spec
        assert spec is not None
        fmt = FORMATS.get(self.options.target)
        if fmt is not None:
            reason = why_not(spec.fmt, fmt)
            if reason is not None:
                raise ConvertError(f"{layer.module}: {reason}")
        stacked_in = self._stacked_in(layer.module)
        dialect, stacked = self._written(stored, stacked_in)
        if dialect is stored and self.options.fold in (None, "none"):
            self.notes.append(f"{layer.module}: is {stored} already, copied")
            return None
        return ModuleJob(
            layer.module, f"{spec.fmt} ({stored})", spec, None, fmt, dialect, stacked,
            spec.num_experts,
        )  # fmt: skip

    def _dense_job(self, module: str, stored: NotFp4, lie: Stacking | None) -> ModuleJob:
        stacked_in = self._stacked_in(module)
        if stacked_in and lie is None:
            raise ConvertError(
                f"{module}: stacked tensors whose orientation and row order are not known for "
                f"model_type {self.checkpoint.sizes.model_type!r}; give `stacking`"
            )
        dialect, stacked = self._written(None, stacked_in)
        dtypes = sorted({e.dtype for e in self.checkpoint.experts()[module]})
        source = "fp8" if stored.kind == "fp8" else dtypes[0].lower()
        return ModuleJob(
            module, source, None, lie if stacked_in else None, FORMATS.get(self.options.target),
            dialect, stacked, self.checkpoint.sizes.num_experts,
        )  # fmt: skip

    def _stacked_in(self, module: str) -> bool:
        return any(slot_of(e.name).expert is None for e in self.checkpoint.experts()[module])

    def _written(
        self, stored: Dialect | None, stacked_in: bool
    ) -> tuple[Dialect | None, Stacked | None]:
        """Dialect of the output, and how it stacks."""
        family = STACKINGS.get(self.checkpoint.sizes.model_type)
        if self.options.target == "bf16":
            lie = self.options.stacking or family
            return None, Stacked(None, lie) if stacked_in and lie is not None else None
        dialect = self._dialect(stored, stacked_in)
        if dialect is GPT_OSS:
            assert GPT_OSS.stacking is not None
            return dialect, Stacked(dialect, GPT_OSS.stacking)
        return dialect, None

    def _dialect(self, stored: Dialect | None, stacked_in: bool) -> Dialect:
        target, names = self.options.target, self.options.names
        if names == "auto":
            if stored is not None and stored.fmt.name == target:
                return stored
            gpt = self.checkpoint.sizes.model_type == "gpt_oss" and stacked_in
            names = {
                "nvfp4-ue4m3": "modelopt",
                "nvfp4-ue5m3": "rubin",
                "mxfp4": "gpt-oss" if gpt else "compressed-tensors",
            }[target]  # type: ignore[assignment]
        if (target, names) not in BY_NAMES:
            known = ", ".join(n for t, n in BY_NAMES if t == target)
            raise ConvertError(f"{names} has no names for {target}; known: {known}")
        return BY_NAMES[target, names]

    def _linear_dialect(self) -> Dialect | None:
        if self.options.target == "bf16":
            return None
        kinds = [self.checkpoint.stored(m) for m in self.layers]
        stored = next((k for k in kinds if isinstance(k, Dialect)), None)
        return self._dialect(stored, stacked_in=False)

    # -- groups of one module --------------------------------------------------------------------

    def _module(self, job: ModuleJob) -> list[Bundle]:
        own: dict[int, list[TensorEntry]] = {}
        stacked: list[TensorEntry] = []
        for entry in self.checkpoint.experts()[job.module]:
            expert = slot_of(entry.name).expert
            (stacked if expert is None else own.setdefault(expert, [])).append(entry)
        ids = sorted(own) if own else list(range(job.num_experts))
        if ids != list(range(job.num_experts)):
            missing = sorted(set(range(job.num_experts)) - set(ids))
            raise CheckpointError(
                f"{job.module}: config declares {job.num_experts} experts; "
                f"missing {missing[:8]}, beyond it {[i for i in ids if i >= job.num_experts][:8]}"
            )
        share = sum(e.nbytes for e in stacked) // job.num_experts
        groups = []
        for expert in ids:
            entries = (*own.get(expert, ()), *stacked)
            nbytes = share + sum(e.nbytes for e in own.get(expert, ()))
            shapes = self._shapes(job, expert, entries)
            groups.append(
                ExpertGroup(job, expert, entries, shapes, nbytes, self._inputs(job, expert, shapes))
            )
        if job.stacked is not None:
            outputs = job.stacked.outputs(job.module, job.num_experts, groups[0].shapes)
            return [Bundle(tuple(outputs), tuple(groups))]
        return [Bundle(tuple(_outputs(job, g.shapes)), (g,)) for g in groups]

    def _inputs(self, job: ModuleJob, expert: int, shapes: Mapping[str, Shape]) -> dict[str, float]:
        if self.calibration is None:
            return {}
        layer = self.calibration.layers.get(str(module_layer(job.module)))
        if layer is None:
            raise ConvertError(f"{job.module}: calibration saw no experts in this layer")
        if layer.unseen:
            self.uncalibrated[job.module] = layer.unseen
        return {name: layer.scale(expert, name) for name in shapes}

    def _shapes(
        self, job: ModuleJob, expert: int, entries: Sequence[TensorEntry]
    ) -> dict[str, Shape]:
        by_projection: dict[str, dict[str, TensorEntry]] = {}
        for entry in entries:
            slot = slot_of(entry.name)
            by_projection.setdefault(slot.projection, {})[slot.leaf] = entry
        sizes = _sizes(job, expert, by_projection, self.checkpoint.sizes.gated)
        shapes = {}
        for name, (n, k) in sizes.items():
            joined = "gate_up" if name != "down" and "gate_up" in by_projection else name
            found = by_projection[joined]
            shapes[name] = Shape(
                path=_path(job.module, expert, name, found),
                n=n,
                k=k,
                dec=_has_dec(job, found, self.options),
                inputs=self.options.calibrate is not None
                or (_has(job, found, "input_dec") and job.fmt is not None),
                bias=found["bias"].dtype if "bias" in found else None,
            )
        return shapes


def _sizes(
    job: ModuleJob,
    expert: int,
    found: Mapping[str, Mapping[str, TensorEntry]],
    gated: bool,
) -> dict[str, tuple[int, int]]:
    """``gate``, ``up``, ``down`` -> (N, K)."""
    if job.spec is not None:
        n, k = job.spec.intermediate, job.spec.hidden
        return {p: (k, n) if p == "down" else (n, k) for p in job.spec.projections}
    wanted = {"gate_up", "down"} if "gate_up" in found else {"gate", "up", "down"}
    wanted = wanted if gated else {"up", "down"}
    if set(found) != wanted or not all("weight" in found[p] for p in wanted):
        raise CheckpointError(
            f"{job.module}.{expert}: projections {sorted(found)}, expected {sorted(wanted)}, each "
            "with its weight"
        )
    sizes: dict[str, tuple[int, int]] = {}
    for projection in ("gate_up", "gate", "up", "down"):
        if projection not in found:
            continue
        entry = found[projection]["weight"]
        shape = entry.shape if slot_of(entry.name).expert is not None else entry.shape[1:]
        if len(shape) != 2 or not prod(shape):
            raise CheckpointError(f"{entry.name}: shape {list(entry.shape)} is no matrix")
        n, k = (shape[1], shape[0]) if job.lie is not None and job.lie.transposed else shape
        if projection == "gate_up":
            sizes |= {"gate": (n // 2, k), "up": (n // 2, k)}
        else:
            sizes[projection] = (n, k)
    _check_sizes(job, expert, sizes)
    return sizes


def _check_sizes(job: ModuleJob, expert: int, sizes: Mapping[str, tuple[int, int]]) -> None:
    hidden, intermediate = sizes["down"]
    for name, size in sizes.items():
        if name != "down" and size != (intermediate, hidden):
            raise CheckpointError(
                f"{job.module}.{expert}.{name}: {list(size)}, expected {[intermediate, hidden]} "
                f"beside a down projection of {[hidden, intermediate]}"
            )
        if job.fmt is not None:
            try:
                job.fmt.packed_k(size[1])
            except ValueError as e:
                raise ConvertError(f"{job.module}.{expert}.{name}: {e}") from None


def _path(module: str, expert: int, name: str, found: Mapping[str, TensorEntry]) -> str:
    """As the source spells it, or as most producers do where the source stacks."""
    own = [e for e in found.values() if slot_of(e.name).expert is not None]
    if own:
        return own[0].name.removesuffix(f".{slot_of(own[0].name).leaf}")
    return f"{module}.{expert}.{name}_proj"


def _has(job: ModuleJob, found: Mapping[str, TensorEntry], part: str) -> bool:
    if job.spec is None:
        return False
    readings = [job.spec.dialect.read(leaf) for leaf in found]
    return any(isinstance(r, Reading) and r.part == part for r in readings)


def _has_dec(job: ModuleJob, found: Mapping[str, TensorEntry], options: Options) -> bool:
    if job.fmt is None:
        return False
    if job.fmt.has_global:
        return True
    if job.spec is None:
        return False
    return keeps_dec(job.spec.fmt, job.fmt, _has(job, found, "dec"), options)


def _outputs(job: ModuleJob, shapes: Mapping[str, Shape]) -> list[OutTensor]:
    return [out for shape in shapes.values() for _, out in leaves(job.dialect, shape)]


def _copy(entry: TensorEntry) -> list[Bundle]:
    out = OutTensor(entry.name, entry.dtype, entry.shape)
    return [Bundle((out,), (CopyGroup(entry, out),))]
