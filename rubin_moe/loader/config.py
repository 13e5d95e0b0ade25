"""What a checkpoint's config says about the precision of each module.

Where it is looked for, first found decides: ``quantization_config`` of config.json, the same key in
its text config, hf_quant_config.json, the same key (or ``quantization``) in params.json. A second
place with another algorithm is an error; two that agree are one.

Inside a config, for one module: the exclude list first; then ``quantized_layers``, the most exact
name; then a ``config_groups`` group that names the module; then one that targets ``Linear``; then
``moe_quant_algo`` (experts only) and ``quant_algo``. With ``quantized_layers`` there, a module that
nothing names is not quantized. ``quant_method`` alone decides nothing about experts: DeepSeek-V4
says ``fp8`` over FP4 experts. What is on disk is `dialects.identify`'s to say.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rubin_moe.errors import ConfigError
from rubin_moe.loader.names import ExpertSlot, parse
from rubin_moe.loader.patterns import Patterns, spellings

DeclaredActivations: TypeAlias = Literal["static", "dynamic", "none", "unsaid"]

FP4_ALGOS: Mapping[str, tuple[str, DeclaredActivations]] = {
    "NVFP4": ("nvfp4", "static"),
    "NVFP4_AWQ": ("nvfp4", "static"),
    "NVFP4_SVDQUANT": ("nvfp4", "static"),
    "W4A16_NVFP4": ("nvfp4", "none"),
    "NVFP4A16": ("nvfp4", "none"),
    "W4A8_NVFP4_FP8": ("nvfp4", "none"),
    "MXFP4": ("mxfp4", "unsaid"),
    "W4A16_MXFP4": ("mxfp4", "none"),
    "W4A8_MXFP4_FP8": ("mxfp4", "none"),
}
"""``quant_algo`` -> (format, activations)."""

OTHER_ALGOS = frozenset(
    (
        *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "FP8_BLOCK_SCALES"),
        *("FP8_BLOCK", "MXFP8", "INT8", "INT8_SQ", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16"),
        *("W4A8_AWQ", "W4A16_AWQ", "INT4_AWQ"),
    )
)
"""Known, and not FP4."""

_MIXED = "MIXED_PRECISION"
_EXCLUDES = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude")


@dataclass(frozen=True)
class Declared:
    """What a config says of one module's precision.

    Attributes:
        algo: upper-case name; ``format``: ``nvfp4``, ``mxfp4`` or None for something else.
        activations: ``unsaid`` where the config has no word on them.
        group_size: elements a block scale covers, None if unsaid.
        by: the place in the config, for messages; named: it speaks of this very module.
    """

    algo: str
    format: str | None
    activations: DeclaredActivations
    group_size: int | None
    by: str
    named: bool = False


@dataclass(frozen=True, eq=False)
class QuantConfig:
    """A parsed quantization config; `parse` makes it.

    Attributes:
        method: ``quant_method``, lower case, "" if absent.
        scale_format: ``ue5m3`` where block scales are bytes of that type, else ``ue4m3``.
        exclude: modules left alone.
        stacking: (transposed, interleaved) where the config itself says it.
        source: where it was found.
    """

    method: str
    source: str
    exclude: Patterns
    scale_format: Literal["ue4m3", "ue5m3"] = "ue4m3"
    stacking: tuple[bool, bool] | None = None
    default: Declared | None = None
    moe_default: Declared | None = None
    layers: Mapping[str, Declared] = field(default_factory=dict)
    groups: tuple[tuple[Patterns, bool, Declared], ...] = ()
    _slots: Mapping[str, Mapping[ExpertSlot, Declared]] = field(default_factory=dict)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "quantization_config") -> "QuantConfig":
        """Reads a ``quantization_config`` or the content of hf_quant_config.json.

        Raises:
            ConfigError: an unknown algorithm, ``MIXED_PRECISION`` without saying which, a value of
                the wrong type; names the key.
        """
        return _Parser(raw, source).config()

    def excluded(self, module: str) -> str | None:
        """The exclude entry that names ``module``, something above it, or all projections of an
        ``experts`` module; else None."""
        found = self.exclude.match(module)
        if found is None:
            for projections in _projections(module):
                entries = [self.exclude.match(p) for p in projections]
                if all(entries):
                    return entries[0]
        return found

    def declared(self, module: str) -> Declared | None:
        """What is said of an ``experts`` module (or any module); None: not quantized.

        Raises:
            ConfigError: its projections are given different algorithms.
        """
        if self.excluded(module) is not None:
            return None
        for name in spellings(module):
            found = self.layers.get(name) or self._of_projections(name)
            if found is not None:
                return found
        names = (module, *(p for projections in _projections(module) for p in projections))
        for targets, _, declared in self.groups:
            if any(targets.match(name) for name in names):
                return declared
        for _, everything, declared in self.groups:
            if everything:
                return declared
        return None if self.layers else self.moe_default or self.default

    def _of_projections(self, module: str) -> Declared | None:
        slots = self._slots.get(module)
        if not slots:
            return None
        kinds = {d.algo: s for s, d in slots.items()}
        if len(kinds) > 1:
            told = ", ".join(f"{slot} {algo}" for algo, slot in kinds.items())
            raise ConfigError(f"{self.source}: {module} has experts of several kinds: {told}")
        return next(iter(slots.values()))


def _projections(module: str) -> tuple[tuple[str, ...], ...]:
    """An expert's linears as lists of modules spell them; none below other modules."""
    if not module.endswith(".experts"):
        return ()
    spelled = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
    return tuple(tuple(f"{module}.0.{p}" for p in names) for names in spelled)


def find_config(
    config: Mapping[str, Any] | None,
    hf_quant: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
) -> QuantConfig | None:
    """The config that decides (module docstring: precedence); None where nothing is quantized.

    Args:
        config: config.json; hf_quant: hf_quant_config.json; params: params.json (Mistral).
    """
    found = [QuantConfig.parse(raw, where) for where, raw in _places(config, hf_quant, params)]
    if not found:
        return None
    first = found[0]
    for other in found[1:]:
        algos = [c.default.algo if c.default else None for c in (first, other)]
        if None not in algos and algos[0] != algos[1]:
            raise ConfigError(
                f"{first.source} says {algos[0]}, {other.source} says {algos[1]}: contradiction"
            )
    return first


def _places(
    config: Mapping[str, Any] | None,
    hf_quant: Mapping[str, Any] | None,
    params: Mapping[str, Any] | None,
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, quantization config), in order of precedence."""
    if config is not None:
        yield from _inside("config.json", config)
        for key in TEXT_CONFIGS:
            if isinstance(config.get(key), Mapping):
                yield from _inside(f"config.json: {key}", config[key])
    if hf_quant:
        yield "hf_quant_config.json", hf_quant
    if params is not None:
        yield from _inside("params.json", params)


def _inside(where: str, holder: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("quantization_config", "quantization"):
        raw = holder.get(key)
        if isinstance(raw, Mapping) and raw:
            dtype = holder.get("expert_dtype")  # DeepSeek-V4 keeps it beside, V4.1 inside
            beside = {} if dtype is None else {"expert_dtype": dtype}
            yield f"{where}: {key}", {**beside, **raw}
            return


TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where composite models keep the language model's own config."""


class _Parser:
    """One config's keys, unwrapped from ``quantization`` however deep."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.keys: dict[str, Any] = {}
        self._unwrap(raw, depth=0)

    def _unwrap(self, raw: Mapping[str, Any], depth: int) -> None:
        inner = raw.get("quantization")
        if isinstance(inner, Mapping) and depth < 4:
            self._unwrap(inner, depth + 1)
        for key, value in raw.items():
            if key != "quantization":
                self.keys.setdefault(key, value)

    def config(self) -> QuantConfig:
        method = str(self.keys.get("quant_method") or "").lower()
        layers = self._layers()
        groups = self._groups(method)
        slots: dict[str, dict[ExpertSlot, Declared]] = {}
        for name, declared in layers.items():
            parsed = parse(f"{name}.weight")
            if parsed is not None and parsed.slot is not None:
                slots.setdefault(parsed.module, {})[parsed.slot] = declared
        default = self._default(method, bool(layers or groups))
        moe = self.keys.get("moe_quant_algo") or self.keys.get("expert_dtype")
        return QuantConfig(
            method=method,
            source=self.source,
            exclude=Patterns(self._exclude()),
            scale_format=self._scale_format(),
            stacking=self._stacking(),
            default=default,
            moe_default=None if moe is None else self._moe(str(moe)),
            layers=layers,
            groups=groups,
            _slots=slots,
        )

    def _exclude(self) -> list[str]:
        entries: list[str] = []
        for key in _EXCLUDES:
            value = self.keys.get(key)
            if value is None:
                continue
            if not isinstance(value, list):
                raise ConfigError(f"{self.source}: {key} is no list")
            entries += value
        return entries

    def _scale_format(self) -> Literal["ue4m3", "ue5m3"]:
        value = str(self.keys.get("scale_format") or "ue4m3").lower()
        if value not in ("ue4m3", "ue5m3"):
            raise ConfigError(f"{self.source}: scale_format {value!r}, expected ue4m3 or ue5m3")
        return "ue5m3" if value == "ue5m3" else "ue4m3"

    def _stacking(self) -> tuple[bool, bool] | None:
        value = self.keys.get("stacking")
        if value is None:
            return None
        if not isinstance(value, Mapping) or set(value) != {"transposed", "interleaved"}:
            raise ConfigError(f"{self.source}: stacking needs transposed and interleaved")
        return bool(value["transposed"]), bool(value["interleaved"])

    def _default(self, method: str, mixed: bool) -> Declared | None:
        algo = self.keys.get("quant_algo")
        if algo is not None:
            if str(algo).upper() == _MIXED:
                if not mixed and not self.keys.get("moe_quant_algo"):
                    raise ConfigError(
                        f"{self.source}: quant_algo {_MIXED} without quantized_layers or "
                        "config_groups does not say which precision any layer has"
                    )
                return None
            return self._algo(str(algo), self.keys.get("group_size"), "quant_algo")
        if method == "mxfp4":
            return self._algo("W4A16_MXFP4", 32, "quant_method")
        form = str(self.keys.get("format") or "").lower()
        if form in ("nvfp4", "mxfp4"):
            return self._algo(form.upper(), self.keys.get("group_size"), "format")
        return None

    def _moe(self, algo: str) -> Declared | None:
        if algo.lower() == "fp4":  # DeepSeek-V4's own word for its MXFP4 experts
            return self._algo("W4A16_MXFP4", 32, "expert_dtype")
        return self._algo(algo, self.keys.get("group_size"), "moe_quant_algo")

    def _algo(
        self, algo: str, group_size: object, by: str, activations: DeclaredActivations | None = None
    ) -> Declared:
        name = algo.upper()
        if name not in FP4_ALGOS and name not in OTHER_ALGOS:
            known = ", ".join(sorted({*FP4_ALGOS, *OTHER_ALGOS}))
            raise ConfigError(f"{self.source}: {by} {algo!r} is unknown; known: {known}")
        unknown: tuple[None, DeclaredActivations] = (None, "unsaid")
        form, declared = FP4_ALGOS.get(name, unknown)
        if group_size is not None and (isinstance(group_size, bool) or type(group_size) is not int):
            raise ConfigError(f"{self.source}: {by}: group_size {group_size!r} is no number")
        if form is not None and activations is None:
            activations = self._activations(form, declared)
        size = group_size if isinstance(group_size, int) else None
        return Declared(name, form, activations or declared, size, by)

    def _activations(self, form: str, declared: DeclaredActivations) -> DeclaredActivations:
        said = self.keys.get("activations")  # this project's own key
        if said in ("static", "dynamic", "none"):
            return said  # type: ignore[no-any-return]
        # Of an fp8 config, activation_scheme speaks of the FP8 linears.
        scheme = self.keys.get("activation_scheme")
        method = str(self.keys.get("quant_method") or "").lower()
        if form == "nvfp4" and declared == "static" and method != "fp8" and scheme == "dynamic":
            return "dynamic"
        if declared == "static" and self._default_group_has_no_activations():
            return "none"
        return declared

    def _default_group_has_no_activations(self) -> bool:
        groups = self.keys.get("config_groups")
        if not isinstance(groups, Mapping) or self.keys.get("quantized_layers"):
            return False
        return any(
            isinstance(g, Mapping)
            and "input_activations" in g
            and g["input_activations"] is None
            and "Linear" in (g.get("targets") or ())
            for g in groups.values()
        )

    def _layers(self) -> dict[str, Declared]:
        table = self.keys.get("quantized_layers")
        while isinstance(table, Mapping) and isinstance(table.get("quantized_layers"), Mapping):
            table = table["quantized_layers"]
        if table is None:
            return {}
        if not isinstance(table, Mapping):
            raise ConfigError(f"{self.source}: quantized_layers is no table")
        found: dict[str, Declared] = {}
        for name, entry in table.items():
            algo = entry.get("quant_algo") if isinstance(entry, Mapping) else entry
            if not isinstance(algo, str):
                raise ConfigError(f"{self.source}: quantized_layers[{name!r}] has no quant_algo")
            size = entry.get("group_size") if isinstance(entry, Mapping) else None
            d = self._algo(algo, size, f"quantized_layers[{name!r}]")
            found[name] = Declared(d.algo, d.format, d.activations, d.group_size, d.by, named=True)
        return found

    def _groups(self, method: str) -> tuple[tuple[Patterns, bool, Declared], ...]:
        groups = self.keys.get("config_groups")
        if groups is None:
            return ()
        if not isinstance(groups, Mapping):
            raise ConfigError(f"{self.source}: config_groups is no table")
        found = []
        for name, group in groups.items():
            if not isinstance(group, Mapping) or not isinstance(group.get("targets", []), list):
                raise ConfigError(f"{self.source}: config_groups[{name!r}] is malformed")
            declared = self._group(name, group, method)
            targets = group.get("targets", [])
            everything = "Linear" in targets or not targets
            found.append((Patterns(t for t in targets if t != "Linear"), everything, declared))
        return tuple(found)

    def _group(self, name: str, group: Mapping[str, Any], method: str) -> Declared:
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            raise ConfigError(f"{self.source}: config_groups[{name!r}] has no weights")
        by = f"config_groups[{name!r}]"
        algo = _group_algo(group, weights, str(self.keys.get("format") or ""))
        # ModelOpt repeats quant_algo in one coarse group: the name is the finer statement.
        named = str(self.keys.get("quant_algo") or "").upper()
        if method.startswith("modelopt") and named in FP4_ALGOS and algo in FP4_ALGOS:
            algo = named
        inputs = group.get("input_activations")
        activations: DeclaredActivations = "none"
        if isinstance(inputs, Mapping):
            activations = "dynamic" if inputs.get("dynamic") is True else "static"
        if FP4_ALGOS.get(algo, (None, "unsaid"))[1] == "none":
            activations = "none"
        elif activations == "static" and self.keys.get("activation_scheme") == "dynamic":
            activations = "dynamic"
        return self._algo(algo, weights.get("group_size"), by, activations)


def _group_algo(group: Mapping[str, Any], weights: Mapping[str, Any], top_format: str) -> str:
    form = str(group.get("format") or top_format).lower()
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if form.startswith(("nvfp4", "mxfp4")):
        return form[:5].upper()
    if bits == 4 and kind == "float":
        return "MXFP4" if size == 32 else "NVFP4"
    if bits == 8 and kind == "float":
        return "MXFP8" if size == 32 else "FP8"
    return "INT8" if bits == 8 else "W4A16"
