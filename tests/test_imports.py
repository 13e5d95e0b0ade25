"""What importing costs, and which way imports may not point."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "cutlass", "triton", "numba", "llvmlite", "transformers")
LIGHT_MODULES = (
    "rubin_moe",
    "rubin_moe.errors",
    "rubin_moe.envs",
    "rubin_moe.formats.spec",
    "rubin_moe.kernels.base",
    "rubin_moe.kernels.registry",
    "rubin_moe.cli",
)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_import_no_framework(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
