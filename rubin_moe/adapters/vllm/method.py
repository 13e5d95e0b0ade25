"""The method of one MoE layer: from vLLM's description of it to a prepared backend."""

import itertools
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

from rubin_moe import envs
from rubin_moe.adapters.vllm import compat
from rubin_moe.adapters.vllm.experts import RubinExperts
from rubin_moe.adapters.vllm.loading import LayerLoading
from rubin_moe.adapters.vllm.report import ServingReport
from rubin_moe.adapters.vllm.warm_up import warm_up
from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.formats.experts import ExpertWeights
from rubin_moe.kernels import registry
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import ActivationFormat, InputScale, MoEProblem
from rubin_moe.layers import ops
from rubin_moe.layers.experts import MoEExperts
from rubin_moe.loader.for_activations import default_activations, fit, weight_format_for
from rubin_moe.loader.sharding import Shard
from rubin_moe.loader.spec import ExpertsSpec

_logger = init_logger("vllm.rubin_moe")

_ACTIVATIONS = {
    "silu": Activation("silu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu2_no_mul": Activation("relu2"),
    # gpt-oss does not hand its limit to the layer; vLLM's own default is the released 7.
    "swigluoai": Activation("swigluoai", limit=7.0),
    "swigluoai_uninterleave": Activation("swigluoai", limit=7.0),
}
"""vLLM's names. How rows lie in a checkpoint is the loader's business, not the activation's."""


class RubinMoeMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Weights, selection and call of one MoE layer.

    Args:
        moe: vLLM's config of the layer.
        spec: the layer as the checkpoint has it.
        name: module path, for messages and as the handle of its operator.
        report: collects what serves which layer, for the log.
    """

    def __init__(self, moe: Any, spec: ExpertsSpec, name: str, report: ServingReport) -> None:
        super().__init__(moe)
        self._spec, self._name, self._report = spec, name, report
        self._experts: MoEExperts | None = None
        self.moe_kernel: Any = None
        self._handle: str | None = None
        self._routes_itself = compat.cpu_needs_own_router()

    # -- weights ---------------------------------------------------------------------------------

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Select the backend and register what vLLM's loaders fill.

        Raises:
            UnsupportedError: nothing here computes this layer; with every candidate's reason.
        """
        shard = self._shard(layer, num_experts)
        self._problem = self._describe(layer, shard, hidden_size)
        self._target = compat.target()
        self._selection = registry.select(self._problem, self._target)
        if self._selection.backend.endswith("-emulated"):
            from rubin_moe import emulation

            emulation.install()
        reads_input_scales = self._problem.activation_format == "nvfp4-ue4m3"
        self._loading = LayerLoading(
            self._spec,
            self._name,
            shard,
            "require" if reads_input_scales else "ignore",
            self._install,
        )
        self._loading.register(layer)
        self._report.add_experts(self._name, self._selection, self._spec)

    def _shard(self, layer: Any, num_experts: int) -> Shard:
        parallel = self.moe.moe_parallel_config
        ids = None
        if layer.expert_map is not None:
            local = {int(v): g for g, v in enumerate(layer.expert_map.tolist()) if v >= 0}
            ids = tuple(local[i] for i in range(num_experts))
        return Shard(parallel.tp_rank, parallel.tp_size, expert_ids=ids)

    def _describe(self, layer: Any, shard: Shard, hidden: int) -> MoEProblem:
        spec = self._spec
        if self.moe.is_lora_enabled:
            raise UnsupportedError(f"{self._name}: LoRA on FP4 experts is not computed", {})
        if hidden != spec.hidden:
            raise UnsupportedError(
                f"{self._name}: vLLM pads the hidden size {spec.hidden} to {hidden} for its "
                f"all-to-all backend, and the stored scale blocks cannot be padded",
                {},
            )
        vec = spec.fmt.sf_vec_size
        activations = _activation_format(spec, compat.target().capability)
        return MoEProblem(
            num_experts=len(shard.experts(spec.num_experts)),
            global_num_experts=spec.num_experts,
            top_k=self.moe.experts_per_token,
            hidden=spec.hidden,
            intermediate=shard.columns(spec.intermediate, vec).padded,
            weight_format=weight_format_for(spec.fmt, activations),
            activation=self._activation(layer),
            activation_format=activations,
            dtype=str(self.moe.in_dtype).removeprefix("torch."),
            has_bias=spec.has_bias,
            deterministic=envs.flag("RUBIN_MOE_DETERMINISTIC", True),
            batch_invariant=envs.flag("RUBIN_MOE_BATCH_INVARIANT", compat.batch_invariant()),
            input_scale=cast(
                InputScale, envs.choice("RUBIN_MOE_INPUT_SCALE", get_args(InputScale))
            ),
        )

    def _activation(self, layer: Any) -> Activation:
        kind = layer.activation.value
        if kind not in _ACTIVATIONS:
            raise ConfigError(
                f"{self._name}: activation {kind!r}; known: {', '.join(sorted(_ACTIVATIONS))}"
            )
        given = {
            "limit": layer.swiglu_limit,
            "alpha": layer.swiglu_alpha,
            "beta": layer.swiglu_beta,
        }
        return replace(_ACTIVATIONS[kind], **{k: v for k, v in given.items() if v is not None})

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare what has been loaded and hand vLLM the tensors as parameters."""
        weights = self._loading.finish()
        if weights is not None:
            self._install(weights)
        assert self._experts is not None
        for name, tensor in self._experts.tensors().items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(f"prepared_{name}", parameter)
        if self.moe_kernel is None:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            warm_up(self._experts, self.moe)
            self._handle = _bind(self._name, self._experts)
            step = RubinExperts(self.moe, self.moe_quant_config, self._handle, self._problem)
            self.moe_kernel = compat.modular_kernel(self.moe, self.moe_quant_config, layer, step)
        self._report.loaded(self._name)

    def _install(self, weights: ExpertWeights) -> None:
        """Prepare ``weights``; into the storage that is there already, after the first time."""
        mode = envs.text("RUBIN_MOE_FOLD")
        p = self._problem
        if mode or weights.fmt != p.weight_format:
            weights, _ = fit(weights, p.activation_format, mode or "exact")  # type: ignore[arg-type]
        if self._experts is None:
            self._experts = MoEExperts(weights, self._problem, self._target)
            compat.shield_llvmlite()  # a backend may have imported it
        else:
            self._experts.reload(weights)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """For vLLM's prepare step: activations arrive in the model's dtype."""
        return FusedMoEQuantConfig.make(quant_dtype=None)

    # -- call ------------------------------------------------------------------------------------

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM hands over router logits (`compat.cpu_needs_own_router`)."""
        return self._routes_itself

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """``[M, hidden]`` and its routing -> ``[M, hidden]``, reduced over this rank's experts.

        vLLM's prepare and finalize around the experts are left out where all they do is to copy
        the result twice.
        """
        assert self._experts is not None
        assert self._handle is not None
        if compat.tokens_stay(self.moe_kernel) and not layer.apply_router_weight_on_input:
            return ops.moe_experts(x, topk_ids, topk_weights, layer.expert_map, self._handle)
        slots = next(iter(self._experts.tensors().values()))  # only its leading size is asked for
        out: Tensor = self.moe_kernel.apply(
            x,
            slots,
            slots,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )
        return out

    def apply_monolithic(
        self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        """As `apply`, after vLLM 0.26's own CPU routing."""
        topk_weights, topk_ids = compat.route(layer, x, router_logits)
        return self.apply(layer, x, topk_weights, topk_ids)


def _activation_format(spec: ExpertsSpec, capability: tuple[int, int] | None) -> ActivationFormat:
    """The one asked for, else this checkpoint's on this machine."""
    asked = envs.text("RUBIN_MOE_ACTIVATION_FORMAT")
    asked = asked or default_activations(spec.fmt, spec.scheme, capability)
    if asked not in get_args(ActivationFormat):
        known = ", ".join(get_args(ActivationFormat))
        raise ConfigError(f"RUBIN_MOE_ACTIVATION_FORMAT={asked!r}; known: {known}")
    return cast(ActivationFormat, asked)


def _bind(name: str, experts: MoEExperts) -> str:
    """Bind the layer to its operator name; numbered if another model here has a layer so named."""
    for number in itertools.count():
        handle = f"{name}#{number}" if number else name
        try:
            ops.bind(handle, experts)
        except ConfigError:
            continue
        return handle
    raise AssertionError
