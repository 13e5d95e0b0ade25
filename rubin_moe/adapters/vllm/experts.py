"""The experts step of vLLM's modular kernel: capability answers, shapes, one call.

vLLM's prepare and finalize around it bring TP, EP and DP; `layers` computes.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from rubin_moe.kernels.base import MoEProblem
from rubin_moe.layers import ops


class RubinExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """Routed experts of one layer.

    Args:
        handle: name under which `layers.ops` knows the prepared weights.
        problem: what the layer computes; the backend that computes it has been selected.
    """

    def __init__(
        self, moe_config: Any, quant_config: Any, handle: str, problem: MoEProblem
    ) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config)
        self._handle, self._problem = handle, problem

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    # vLLM's oracle asks these of its own experts; here the registry has answered before.
    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Hidden states come in the model's dtype; a backend quantizes them itself."""
        return True

    def moe_problem_size(
        self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        """Local experts, tokens, rows of w13, hidden, top-k: from the problem, since the weights
        are in a layout of the backend's."""
        p = self._problem
        rows = p.intermediate * (2 if p.activation.gated else 1)
        return p.num_experts, a1.size(0), rows, p.hidden, topk_ids.size(1)

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspace of vLLM's is used; the output is ``[M, hidden]``."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sum of this rank's experts into ``output`` ``[M, hidden]``. Router
        weights that belong to the input are part of it already: vLLM's prepare step did that."""
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)
        y = ops.moe_experts(hidden_states, topk_ids, topk_weights, expert_map, self._handle)
        output.copy_(y)
