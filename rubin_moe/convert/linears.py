"""Matrices outside the experts: copied, or converted where that was asked for.

With bfloat16 as the target every quantized one is decoded. With an FP4 target, ``linears`` asks
for attention, shared-expert and dense MLP projections; routers, embeddings, heads and norms are
never touched. Where only names change (ModelOpt and compressed-tensors), they follow the experts.
"""

from collections.abc import Mapping

from rubin_moe.convert.options import Options
from rubin_moe.convert.output import OutTensor, Shape, leaves, stores_divisor
from rubin_moe.convert.plan import Bundle, CopyGroup, LinearGroup
from rubin_moe.errors import CheckpointError, ConvertError
from rubin_moe.loader.checkpoint import TensorEntry
from rubin_moe.loader.dense_leaves import FP8_LEAVES, FP8_SCALES, needed_leaves
from rubin_moe.loader.dialect import Dialect, Reading
from rubin_moe.loader.dialects import DIALECTS, LEAVES, identify
from rubin_moe.loader.load import ModelCheckpoint
from rubin_moe.loader.names import module_layer, parse
from rubin_moe.loader.patterns import Patterns

_LEAVES = LEAVES.union(FP8_LEAVES)
_SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_QUANTIZED = frozenset((*(p for group in _SHARED for p in group), "o_proj", "down_proj", "w2"))
_FLOATS = ("BF16", "F16", "F32")


class Linears:
    """Plans every tensor that belongs to no routed expert.

    Attributes:
        converted: modules that change; rest: quantized ones that do not -> algorithm.
    """

    def __init__(
        self, checkpoint: ModelCheckpoint, options: Options, target: Dialect | None
    ) -> None:
        self.checkpoint, self.options, self.target = checkpoint, options, target
        self.converted: list[str] = []
        self.rest: dict[str, str] = {}
        self._excluded = Patterns(options.exclude)
        self._modules: dict[str, dict[str, TensorEntry]] = {}
        for entry in checkpoint:
            module, _, leaf = entry.name.rpartition(".")
            if parse(entry.name) is None and leaf in _LEAVES:
                self._modules.setdefault(module, {})[leaf] = entry
        self._bundles: dict[str, list[Bundle]] = {}
        self._taken: set[str] = set()
        for module in self._modules:
            if module not in self._taken:
                self._plan(module)

    def bundle(self, entry: TensorEntry) -> list[Bundle] | None:
        """What is written for a tensor: None: a copy; empty: it was part of an earlier one."""
        module, _, leaf = entry.name.rpartition(".")
        if module not in self._taken or leaf not in _LEAVES:
            return None
        return self._bundles.pop(module, [])

    def _plan(self, module: str) -> None:
        stored = self._modules[module]
        kind = self._kind(module)
        if kind == "plain" and not self._wanted(module):
            return
        if kind == "plain" or (self.options.with_linears and self._convertible(kind, module)):
            self._convert(module, kind)
        elif kind != "fp8" and self.target is not None and self.target.name != kind:
            self._rename(module, kind, stored)
        else:
            self.rest[module] = self._algo(kind, stored)

    def _kind(self, module: str) -> str:
        """``plain``, ``fp8`` or a dialect's name."""
        stored = self._modules[module]
        if not any(leaf in stored for leaf in ("weight", "weight_packed", "blocks")):
            return "plain"
        quant = self.checkpoint.quant
        scale_format = "ue4m3" if quant is None else quant.scale_format
        found = identify(((n, e.dtype) for n, e in stored.items()), scale_format, module)
        if isinstance(found, Dialect):
            return found.name
        if found.kind in ("unquantized", "unknown"):
            return "plain"
        if found.kind == "fp8":
            return "fp8"
        if self.options.with_linears:
            raise ConvertError(f"{found.reason}; exclude it to copy it as it is")
        return "plain"

    def _wanted(self, module: str) -> bool:
        """Whether a 16-bit matrix is quantized."""
        stored = self._modules[module].get("weight")
        return (
            self.target is not None
            and self.options.with_linears
            and stored is not None
            and stored.dtype in _FLOATS
            and len(stored.shape) == 2
            and module.rpartition(".")[2] in _QUANTIZED
            and module_layer(module) is not None
            and stored.shape[1] % self.target.fmt.sf_vec_size == 0
            and self._excluded.match(module) is None
        )

    def _convertible(self, kind: str, module: str) -> bool:
        if self._excluded.match(module) is not None:
            return False
        return self.target is None or kind == "fp8"

    def _convert(self, module: str, kind: str) -> None:
        members = self._sharing(module, kind) if self.target is not None else [module]
        dialect = None if kind in ("plain", "fp8") else DIALECTS[kind]
        entries, shapes = {}, {}
        for member in members:
            stored = self._modules[member]
            plain = kind == "plain"
            needed = {"weight"} if plain else needed_leaves(dialect, stored, member)
            entries[member] = {n: e for n, e in stored.items() if n in needed}
            shapes[member] = self._shape(member, dialect, stored)
        outputs = tuple(o for s in shapes.values() for _, o in leaves(self.target, s))
        nbytes = sum(e.nbytes for table in entries.values() for e in table.values())
        group = LinearGroup(dialect, self.target, entries, shapes, nbytes)
        bundles = [Bundle(outputs, (group,))]
        for member in members:
            self._taken.add(member)
            self._bundles[member] = bundles
            bundles = []
            bias = self._modules[member].get("bias")
            if bias is not None:
                out = OutTensor(bias.name, bias.dtype, bias.shape)
                self._bundles[member].append(Bundle((out,), (CopyGroup(bias, out),)))
        self.converted += members

    def _sharing(self, module: str, kind: str) -> list[str]:
        """Siblings that servers multiply as one matrix, itself first in their order."""
        parent, _, last = module.rpartition(".")
        for group in _SHARED:
            if last in group:
                names = [f"{parent}.{p}" for p in group]
                return [
                    n for n in names
                    if n in self._modules
                    and self._kind(n) == kind
                    and (kind == "fp8" or self._wanted(n))
                ]  # fmt: skip
        return [module]

    def _shape(
        self, module: str, dialect: Dialect | None, stored: Mapping[str, TensorEntry]
    ) -> Shape:
        leaf = "weight" if dialect is None else dialect.leaf("qdata")
        shape = stored[leaf].shape
        if len(shape) != 2:
            raise CheckpointError(f"{stored[leaf].name}: shape {list(shape)} is no matrix")
        k = shape[1] * (1 if dialect is None else 2)
        if self.target is not None and k % self.target.fmt.sf_vec_size:
            raise ConvertError(f"{module}: K = {k} is no multiple of {self.target.fmt.sf_vec_size}")
        dec = self.target is not None and self.target.fmt.has_global
        return Shape(module, shape[0], k, dec=dec)

    def _rename(self, module: str, kind: str, stored: Mapping[str, TensorEntry]) -> None:
        """Leaves of one dialect under the names of another of the same format."""
        source, target = DIALECTS[kind], self.target
        assert target is not None
        if source.fmt != target.fmt:
            self.rest[module] = self._algo(kind, stored)
            return
        needed_leaves(source, stored, module)  # or it is incomplete
        bundles = []
        for leaf, entry in stored.items():
            reading = source.read(leaf)
            if not isinstance(reading, Reading):
                continue
            scalar = reading.part in ("dec", "input_dec")
            new = "bias" if reading.part == "bias" else target.leaf(reading.part)
            shape = ((1,) if stores_divisor(target) else ()) if scalar else entry.shape
            out = OutTensor(f"{module}.{new}", "F32" if scalar else entry.dtype, shape)
            turned = scalar and stores_divisor(source) != stores_divisor(target)
            bundles.append(Bundle((out,), (CopyGroup(entry, out, reciprocal=turned),)))
        self._taken.add(module)
        self._bundles[module] = bundles
        self.converted.append(module)

    @staticmethod
    def _algo(kind: str, stored: Mapping[str, TensorEntry]) -> str:
        """ModelOpt's name of what a copied matrix is."""
        if kind != "fp8":
            return "MXFP4" if "mxfp4" in kind else "NVFP4"
        scale = next((stored[leaf] for leaf in FP8_SCALES if leaf in stored), None)
        block = scale is not None and len(scale.shape) == 2 and scale.shape[1] > 1
        return "FP8_PB_WO" if block else "FP8"
