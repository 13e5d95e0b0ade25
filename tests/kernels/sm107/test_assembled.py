"""ptxas of CUDA 13.5 takes the kernels for sm_107a, and spills nothing."""

import re
import shutil
import subprocess
from importlib.metadata import files
from pathlib import Path

import pytest

from rubin_moe.kernels.launch import CompiledKernel
from rubin_moe.kernels.sm107.compiled import (
    fc1_kernel,
    fc2_kernel,
    quantize_kernel,
    route_kernel,
    sum_kernel,
)
from rubin_moe.kernels.sm107.plan import OPERANDS, choose_cta_group, plan_gemm

NOTHING = {"stack frame": 0, "spill stores": 0, "spill loads": 0}


@pytest.fixture(scope="module")
def ptxas(tmp_path_factory) -> Path:
    """The wheel's file lacks the run bit."""
    source = next(f for f in files("nvidia-cuda-nvcc") or [] if f.name == "ptxas")
    path = tmp_path_factory.mktemp("ptxas") / "ptxas"
    shutil.copy(str(source.locate()), path)
    path.chmod(0o700)
    return path


def spilled(ptxas: Path, kernel: CompiledKernel, folder: Path) -> dict[str, int]:
    """Bytes of stack, spill stores and spill loads."""
    text = folder / "kernel.ptx"
    text.write_text(kernel.ptx)
    said = subprocess.run(
        [ptxas, "-v", f"-arch={kernel.arch}", text, "-o", folder / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    found = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", said)
    return {what: int(count) for count, what in found}


@pytest.mark.parametrize("fmt", OPERANDS)
@pytest.mark.parametrize("tile_n", [32, 128, 256])
def test_gemms(ptxas, tmp_path, fmt, tile_n):
    plan = plan_gemm(fmt, tile_n, choose_cta_group(fmt, tile_n))
    for kernel in (fc1_kernel(plan), fc2_kernel(plan, atomic=False)):
        assert spilled(ptxas, kernel, tmp_path) == NOTHING


@pytest.mark.parametrize(
    "make",
    [
        route_kernel,
        lambda: quantize_kernel("ue4m3", "bfloat16"),
        lambda: quantize_kernel("ue8m0", "bfloat16"),
        lambda: sum_kernel("bfloat16"),
    ],
    ids=["route", "quantize to NVFP4", "quantize to MXFP8", "sum"],
)
def test_rowwise_kernels(ptxas, tmp_path, make):
    assert spilled(ptxas, make(), tmp_path) == NOTHING
