"""What is asked of a kernel, what it answers, and how it is run.

``MoEProblem`` and ``Target`` are plain data: rules are decided without torch and without a
device. A backend is two files: ``rules.py`` (``why_not`` and ``plan``, standard library only) and
``host.py`` (an ``ExpertsKernel``), named in one row of `registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import BlockFormat
from rubin_moe.kernels.activation import Activation

if TYPE_CHECKING:
    from torch import Tensor

    from rubin_moe.formats.experts import ExpertWeights

ActivationFormat = Literal["16bit", "nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp8", "fp8-e4m3", "int8"]
"""What the GEMMs read as activations; ``16bit`` is the model's own dtype (W4A16), ``fp8-e4m3`` has
one scale a token (`formats.fp8_rows`)."""
InputScale = Literal["layer", "expert"]


@dataclass(frozen=True)
class MoEProblem:
    """One MoE layer's experts as a backend sees them.

    Attributes:
        num_experts: local experts; global_num_experts: of the whole model.
        top_k: experts a token; hidden, intermediate: logical sizes of this rank.
        weight_format, activation_format: what the GEMMs multiply.
        dtype: of hidden states: ``bfloat16``, ``float16`` or ``float32``.
        router_weight_on_input: Llama-4: the weight scales the input, top-1 only.
        deterministic: bit-equal runs, and a row independent of the others as long as their number
            stays in one range of the backend's (Hopper: decode, prefill).
        batch_invariant: a row independent of its batch whatever its size, bit for bit.
        input_scale: of UE4M3 activations of FC1: the layer's largest, or each expert's own
            (`kernels.input_scales`).

    Raises:
        ConfigError: a size below 1.
    """

    num_experts: int
    global_num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight_format: BlockFormat
    activation: Activation = field(default_factory=Activation)
    activation_format: ActivationFormat = "16bit"
    dtype: str = "bfloat16"
    has_bias: bool = False
    router_weight_on_input: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    input_scale: InputScale = "layer"

    def __post_init__(self) -> None:
        for name in ("num_experts", "global_num_experts", "top_k", "hidden", "intermediate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: expected 1 or more")


@dataclass(frozen=True)
class Target:
    """Where a layer runs.

    Attributes:
        device: ``cpu`` or ``cuda``.
        capability: CUDA compute capability such as (10, 7); None on a CPU.
        versions: distribution name -> installed version, of what backends need.
    """

    device: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.capability is None:
            return self.device
        return "sm_{}{}".format(*self.capability)


@dataclass(frozen=True)
class KernelPlan:
    """What a backend decided for a number of tokens; prints in one line.

    Attributes:
        backend: registry name; fields: tile sizes, stages, memory, in the backend's own terms.
    """

    backend: str
    fields: Mapping[str, int | float | str]

    def __str__(self) -> str:
        parts = " ".join(f"{k}={v}" for k, v in self.fields.items())
        return f"{self.backend}: {parts}" if parts else self.backend


class Rules(Protocol):
    """The light half of a backend: a module with these two functions."""

    def why_not(self, problem: MoEProblem, target: Target) -> str | None:
        """None if this backend computes exactly ``problem`` on ``target``, else the reason."""

    def plan(self, problem: MoEProblem, num_tokens: int) -> KernelPlan:
        """Tiles and memory for ``num_tokens``. Raises PlanError."""


class PreparedExperts(Protocol):
    """Weights in a backend's own layout."""

    def nbytes(self) -> int:
        """Bytes held."""

    def tensors(self) -> Mapping[str, Tensor]:
        """All that is held, by name. A server makes them its parameters and may overwrite them in
        place (a reload), so `ExpertsKernel.run` reads these very tensors."""


class ExpertsKernel(Protocol):
    """The heavy half of a backend: one object per layer."""

    def prepare(self, weights: ExpertWeights) -> PreparedExperts:
        """Weights in this kernel's layouts. Pure: the same bytes each time; needs at most one
        expert of memory beyond the result."""

    def run(
        self,
        prepared: PreparedExperts,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of the experts' outputs.

        Args:
            x: ``[M, hidden]``. topk_ids: int32 or int64 ``[M, top_k]``, global ids, -1: no expert.
            topk_weights: float32 ``[M, top_k]``.
            expert_map: int32 ``[global_num_experts]``: global id -> local id or -1 (not here).
            out: ``[M, hidden]`` of x's dtype, or None to allocate.
        """


@runtime_checkable
class CompilesAhead(Protocol):
    """An `ExpertsKernel` that knows all device code which its calls can need."""

    def warm_up(self, num_tokens: int) -> None:
        """Has every kernel that a call of 1 to ``num_tokens`` tokens can need compiled, or read
        from the cache, and loaded: such calls then compile nothing, captured in a graph or not.

        Raises:
            ConfigError: one was never compiled here, and its compiler is not installed.
        """
