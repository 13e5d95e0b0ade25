"""The vLLM plugin: ``--quantization rubin_moe``. Only `plugin` is imported by vLLM itself."""
