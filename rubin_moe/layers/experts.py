"""One layer's routed experts: weights, problem and machine -> a backend, prepared and called.

Eager entry point; what torch.compile and CUDA graphs see is `rubin_moe.layers.ops`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from rubin_moe.errors import ConfigError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import ActivationFormat, CompilesAhead, MoEProblem, Target
from rubin_moe.kernels.registry import select

logger = logging.getLogger(__name__)
_ID_DTYPES = (torch.int32, torch.int64)


def problem_of(
    weights: ExpertWeights,
    top_k: int,
    activation: Activation,
    dtype: torch.dtype = torch.bfloat16,
    activation_format: ActivationFormat = "16bit",
    global_num_experts: int | None = None,
    router_weight_on_input: bool = False,
    deterministic: bool = True,
    batch_invariant: bool = False,
) -> MoEProblem:
    """The problem that ``weights`` pose, for `MoEExperts`.

    Args:
        global_num_experts: of the whole model; default the local number.

    Raises:
        ConfigError: names the layer and a size below 1.
    """
    try:
        return MoEProblem(
            num_experts=weights.num_experts,
            global_num_experts=global_num_experts or weights.num_experts,
            top_k=top_k,
            hidden=weights.hidden,
            intermediate=weights.intermediate,
            weight_format=weights.fmt,
            activation=activation,
            activation_format=activation_format,
            dtype=str(dtype).removeprefix("torch."),
            has_bias=weights.has_bias,
            router_weight_on_input=router_weight_on_input,
            deterministic=deterministic,
            batch_invariant=batch_invariant,
        )
    except ConfigError as error:
        raise ConfigError(f"{weights.name}: {error}") from error


class MoEExperts:
    """Routed experts of one layer on one backend.

    Attributes:
        name: module name; problem: what is computed; selection: which backend, and why no other.

    Raises:
        UnsupportedError: no backend, or not the one named; carries every candidate's reason.
        ConfigError: weights and problem contradict each other.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        problem: MoEProblem,
        target: Target,
        backend: str | None = None,
    ) -> None:
        _check_problem(weights, problem)
        self.name = weights.name
        self.problem = problem
        self.selection = select(problem, target, backend)
        logger.debug("%s: %s", self.name, self.selection)
        self._kernel = self.selection.kernel()
        self._prepared = self._kernel.prepare(weights)
        self._expert_map = _own_map(weights, problem, target.device)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._device = target.device

    def nbytes(self) -> int:
        """Bytes that the prepared weights hold."""
        return self._prepared.nbytes()

    def tensors(self) -> Mapping[str, Tensor]:
        """The prepared weights, by name; the storage that every call reads."""
        return self._prepared.tensors()

    def reload(self, weights: ExpertWeights) -> None:
        """Other weights of the same problem, into the storage that is there: captured graphs keep
        pointing at it, and the bytes are those of a fresh layer."""
        _check_problem(weights, self.problem)
        fresh = self._kernel.prepare(weights).tensors()
        for name, tensor in self.tensors().items():
            tensor.copy_(fresh[name])
        own = _own_map(weights, self.problem, self._device)
        if own is not None and self._expert_map is not None:
            self._expert_map.copy_(own)
        else:
            self._expert_map = own

    def warm_up(self, num_tokens: int) -> None:
        """Compile and load now what calls of up to ``num_tokens`` tokens can need, where the
        backend compiles ahead; call it before serving or capturing.

        Raises:
            ConfigError: a kernel was never compiled here, and its compiler is not installed.
        """
        if isinstance(self._kernel, CompilesAhead):
            self._kernel.warm_up(num_tokens)

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of the experts' outputs.

        Args:
            x: ``[M, hidden]`` of the problem's dtype; M may be 0.
            topk_ids: int32 or int64 ``[M, top_k]``, global ids, -1 where there is no expert: such
                a slot adds nothing, whatever its row holds.
            topk_weights: float32 ``[M, top_k]``, applied as they are.
            expert_map: integer ``[global_num_experts]``, global id -> local id or -1 (elsewhere);
                default from the weights' own ``expert_ids``.
            out: ``[M, hidden]`` of x's dtype, written and returned; default a new tensor.

        Raises:
            ConfigError: a shape, dtype or device that is not as above; on the CPU also an id out of
                range.
        """
        self._check_call(x, topk_ids, topk_weights, expert_map, out)
        if x.shape[0] == 0:
            return torch.empty_like(x) if out is None else out
        if expert_map is None and self._expert_map is not None:
            expert_map = self._expert_map.to(x.device)
        if expert_map is not None:
            expert_map = expert_map.to(torch.int32)
        return self._kernel.run(self._prepared, x, topk_ids, topk_weights, expert_map, out)

    def _check_call(
        self, x: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, out: Tensor | None
    ) -> None:
        p = self.problem
        if x.dim() != 2 or x.shape[1] != p.hidden or x.dtype != self._dtype:
            raise self._error("x", x, f"[M, {p.hidden}] {self._dtype}")
        if ids.shape != (x.shape[0], p.top_k) or ids.dtype not in _ID_DTYPES:
            raise self._error("topk_ids", ids, f"[{x.shape[0]}, {p.top_k}] int32 or int64")
        if weights.shape != ids.shape or weights.dtype != torch.float32:
            raise self._error("topk_weights", weights, f"{list(ids.shape)} torch.float32")
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
            raise self._error("out", out, f"{list(x.shape)} {x.dtype}")
        if expert_map is not None and (
            expert_map.shape != (p.global_num_experts,) or expert_map.dtype not in _ID_DTYPES
        ):
            raise self._error("expert_map", expert_map, f"[{p.global_num_experts}] int32 or int64")
        self._check_devices(x, ids, weights, expert_map, out)
        if self._device == "cpu":
            self._check_range("topk_ids", ids, p.global_num_experts, "the model", "global")
            if expert_map is not None:
                self._check_range("expert_map", expert_map, p.num_experts, "this rank", "local")

    def _check_devices(self, *tensors: Tensor | None) -> None:
        """A kernel reads addresses: one of another device would not be an error but a crash."""
        names = ("x", "topk_ids", "topk_weights", "expert_map", "out")
        for name, tensor in zip(names, tensors, strict=True):
            if tensor is not None and tensor.device.type != self._device:
                raise ConfigError(
                    f"{self.name}: {name} is on {tensor.device}, the layer's weights on "
                    f"{self._device}"
                )

    def _check_range(self, argument: str, ids: Tensor, count: int, whose: str, kind: str) -> None:
        if not ids.numel():
            return
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < -1 or high >= count:
            raise ConfigError(
                f"{self.name}: {argument} hold {low if low < -1 else high}, and {whose} has "
                f"{count} experts ({kind} ids, -1 for none)"
            )

    def _error(self, argument: str, got: Tensor, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.name}: {argument} is {list(got.shape)} {got.dtype}, expected {expected}"
        )


def _check_problem(weights: ExpertWeights, problem: MoEProblem) -> None:
    """Each field that both sides know must agree."""
    pairs = {
        "num_experts": (weights.num_experts, problem.num_experts),
        "hidden": (weights.hidden, problem.hidden),
        "intermediate": (weights.intermediate, problem.intermediate),
        "weight format": (weights.fmt.name, problem.weight_format.name),
        "gated": (weights.gated, problem.activation.gated),
        "has_bias": (weights.has_bias, problem.has_bias),
    }
    for field, (have, asked) in pairs.items():
        if have != asked:
            raise ConfigError(
                f"{weights.name}: {field} of the weights {have}, of the problem {asked}"
            )
    if problem.batch_invariant and not problem.deterministic:
        raise ConfigError(f"{weights.name}: batch invariance asks for deterministic runs")
    last = max(weights.expert_ids, default=-1)
    if last >= problem.global_num_experts:
        raise ConfigError(
            f"{weights.name}: holds expert {last} of a model of {problem.global_num_experts}"
        )
    if problem.router_weight_on_input and problem.top_k != 1:
        raise ConfigError(
            f"{weights.name}: router weights on the input exist for top-1 only, not "
            f"top-{problem.top_k}: one input row would need {problem.top_k} values"
        )


def _own_map(weights: ExpertWeights, problem: MoEProblem, device: str) -> Tensor | None:
    """int32 ``[global_num_experts]``, or None where global ids are local ids."""
    if weights.expert_ids == tuple(range(problem.global_num_experts)):
        return None
    own = torch.full((problem.global_num_experts,), -1, dtype=torch.int32)
    own[list(weights.expert_ids)] = torch.arange(weights.num_experts, dtype=torch.int32)
    return own.to(device)
