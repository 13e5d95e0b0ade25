"""What differs between vLLM versions, each difference with its bounds, and what runs where.

Tested with vLLM 0.26 to 0.33. ``tests/adapters/vllm_signatures.json`` pins what is called and
overridden; a version outside the bounds is refused with a sentence and never tried.
"""

import sys
from typing import Any

from packaging.version import Version

from rubin_moe.errors import ConfigError, UnsupportedError
from rubin_moe.kernels.base import Target
from rubin_moe.kernels.target import detect

LOWEST, BELOW = Version("0.26"), Version("0.34")

_MODELOPT_CONFIGS = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")


def vllm_version() -> Version:
    """Version of the vLLM that is imported (its distribution may have another name)."""
    import vllm

    return Version(vllm.__version__)


def why_not(found: Version) -> str | None:
    """None if this vLLM is one the plugin is tested with, else a sentence for the user."""
    release = Version(".".join(str(part) for part in found.release[:2]))
    if LOWEST <= release < BELOW:
        return None
    return (
        f"rubin_moe is tested with vLLM {LOWEST} up to, not including, {BELOW}; this is vLLM "
        f"{found}. Install a vLLM in that range, or a rubin-moe release that names {release}"
    )


def target() -> Target:
    """Where vLLM runs the layers of this process. Raises ConfigError on another platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return detect("cpu")
    if current_platform.is_cuda():
        return detect("cuda")
    raise ConfigError(
        f"rubin_moe serves on CPUs and NVIDIA GPUs; vLLM runs on {current_platform.device_name}"
    )


def batch_invariant() -> bool:
    """Whether the user asked vLLM for results that do not depend on the batch."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)


def is_attention(layer: Any) -> bool:
    """Whether ``layer`` holds a key-value cache."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    return isinstance(layer, Attention | MLAAttention)


def own_config(raw: dict[str, Any]) -> Any:
    """The config that vLLM itself makes of a checkpoint's ``quantization_config``."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    name = str(raw["quant_method"])
    if name.startswith("modelopt"):
        for candidate in _MODELOPT_CONFIGS:
            config = get_quantization_config(candidate)
            name = config.override_quantization_method(raw, None) or name
    return get_quantization_config(name).from_config(raw)


def cpu_needs_own_router() -> bool:
    """vLLM 0.26 on a CPU: its router calls a CUDA operator, so the layer is handed the logits.

    Since 0.27 a CPU router exists. Remove when 0.26 is out of bounds.
    """
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu()) and vllm_version() < Version("0.27")


def route(layer: Any, x: Any, router_logits: Any) -> tuple[Any, Any]:
    """Router weights and ids of vLLM 0.26's own CPU router, for `cpu_needs_own_router`."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    weights, ids = select_experts(
        hidden_states=x,
        router_logits=router_logits,
        top_k=layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )
    return weights, ids


def prepare_workspaces() -> None:
    """vLLM 0.26's CPU worker never makes the workspace manager that its modular kernel asks for.

    Does nothing where a manager is there or is not needed. Remove when 0.26 is out of bounds.
    """
    if not cpu_needs_own_router():
        return
    import torch
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cpu"))


def modular_kernel(moe: Any, quant_config: Any, layer: Any, experts: Any) -> Any:
    """vLLM's prepare / experts / finalize around ``experts``, for any TP, EP and DP setting.

    Only the arguments that are the same from 0.26 to 0.33 are passed.

    Raises:
        UnsupportedError: vLLM's all-to-all backend hands over tokens in another form.
    """
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

    prepare_workspaces()
    prepare_finalize = maybe_make_prepare_finalize(
        moe=moe,
        quant_config=quant_config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
    )
    if prepare_finalize.activation_format != experts.activation_format():
        raise UnsupportedError(
            f"vLLM's {type(prepare_finalize).__name__} sorts tokens into a batch per expert; "
            "rubin_moe takes them with their expert ids. Choose another all2all backend",
            {},
        )
    return mk.FusedMoEKernel(prepare_finalize, experts)


def tokens_stay(kernel: Any) -> bool:
    """Whether the prepare and finalize steps of `modular_kernel` neither send tokens to other ranks
    nor change them."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import (
        MoEPrepareAndFinalizeNoDPEPModular,
    )

    return isinstance(kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular)


def shield_llvmlite() -> None:
    """Make llvmlite's library handle answer truthfully that it has no ``__dict__``.

    It takes any attribute for a C function. vLLM 0.32 and 0.33 read ``vars()`` of everything in
    every module when an engine starts, so an engine in a process that has used llvmlite (our CPU
    backend, numba) fails. Idempotent; does nothing where llvmlite has not been imported. Remove
    when vLLM asks no more, or llvmlite refuses names with two underscores itself.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    handle = None if ffi is None else type(ffi.lib)
    if handle is None or getattr(handle, "_refuses_dunder", False):
        return
    lookup = handle.__getattr__

    def without_dunder(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lookup(self, name)

    handle.__getattr__ = without_dunder  # type: ignore[method-assign]
    handle._refuses_dunder = True  # type: ignore[attr-defined]
