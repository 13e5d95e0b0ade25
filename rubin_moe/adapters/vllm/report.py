"""What serves which layers of one model and why, said once in the log."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.logger import init_logger

from rubin_moe.kernels.registry import Selection
from rubin_moe.loader.for_activations import FIRST_WITHOUT_16_BIT, default_activations
from rubin_moe.loader.spec import ExpertsSpec

SEPARATOR = " | "

_logger = init_logger("vllm.rubin_moe")


@dataclass
class ServingReport:
    """Collected while vLLM builds a model, logged when its last MoE layer has its weights."""

    _waiting: set[str] = field(default_factory=set)
    _experts: dict[str, str] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _notes: dict[str, None] = field(default_factory=dict)
    _others: Counter[str] = field(default_factory=Counter)

    def add_experts(self, name: str, selection: Selection, spec: ExpertsSpec) -> None:
        """A MoE layer that `registry.select` gave to a backend."""
        p = selection.problem
        self._waiting.add(name)
        self._experts[name] = (
            f"{spec.fmt} experts ({spec.num_experts} x {spec.hidden} x {spec.intermediate}, "
            f"{spec.dialect}, {p.activation_format} activations) on backend {selection.backend} "
            f"({selection.why})"
        )
        self._reasons |= selection.reasons
        for note in spec.notes:
            self._notes[note] = None
        if spec.intermediate % p.intermediate:
            self._notes[
                f"an expert width of {spec.intermediate} does not come out even: {p.intermediate} "
                f"a rank, zeros where it is padded"
            ] = None
        if spec.scheme != "w4a16" and p.activation_format == "16bit":
            note = (
                f"the checkpoint is {spec.scheme.upper()}; backend {selection.backend} reads "
                f"{p.dtype} activations (W4A16) and ignores its input scales"
            )
            if selection.target.device == "cpu":  # no GPU that computes 16bit has them
                theirs = default_activations(spec.fmt, spec.scheme, FIRST_WITHOUT_16_BIT)
                note += f"; RUBIN_MOE_ACTIVATION_FORMAT={theirs} computes with quantized ones"
            self._notes[note] = None

    def add_other(self, what: str) -> None:
        """Any other layer, by who computes it."""
        self._others[what] += 1

    def loaded(self, name: str) -> None:
        """A MoE layer has its weights; the last one writes the summary."""
        if name not in self._waiting:
            return
        self._waiting.discard(name)
        if not self._waiting:
            _logger.info("%s", self)

    def __str__(self) -> str:
        parts = [f"{n} layers of {what}" for what, n in Counter(self._experts.values()).items()]
        parts += [f"not {name}: {reason}" for name, reason in self._reasons.items()]
        parts += [f"{n} {what}" for what, n in self._others.items()]
        parts += list(self._notes)
        return "rubin_moe serves " + SEPARATOR.join(parts)
