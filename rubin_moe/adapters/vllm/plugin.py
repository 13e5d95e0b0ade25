"""vLLM's entry point ``vllm.general_plugins``: runs once in every process vLLM starts."""

import logging

NAME = "rubin_moe"

_logger = logging.getLogger("vllm.rubin_moe")


def register() -> None:
    """Make ``--quantization rubin_moe`` known to vLLM. Idempotent.

    vLLM calls this in the front end, the engine core and each worker, whether or not anybody
    wants rubin_moe, so it never raises: what is wrong is said when a model asks for it.
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from rubin_moe.adapters.vllm import compat

    compat.shield_llvmlite()
    reason = compat.why_not(compat.vllm_version())
    if reason is None:
        try:
            from rubin_moe.adapters.vllm.config import RubinMoeConfig
        except ImportError as error:
            reason = f"rubin_moe cannot be imported beside this vLLM: {error!r}"
        else:
            register_quantization_config(NAME)(RubinMoeConfig)
            return
    _logger.error("%s", reason)
    register_quantization_config(NAME)(_refusing(reason))


def _refusing(reason: str) -> type:
    """A quantization config that answers every use with the reason."""
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    from rubin_moe.errors import ConfigError

    class Refusing(QuantizationConfig):  # type: ignore[misc]
        """Stands in for the real config where that cannot work."""

        def get_name(self) -> str:
            return NAME

        def get_supported_act_dtypes(self) -> list:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict) -> "Refusing":
            raise ConfigError(reason)

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict, user_quant: str | None, hf_config: object = None
        ) -> str | None:
            if user_quant == NAME:
                raise ConfigError(reason)
            return None

        def get_quant_method(self, layer: object, prefix: str) -> None:
            raise ConfigError(reason)

    return Refusing
