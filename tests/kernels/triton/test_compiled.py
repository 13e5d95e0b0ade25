"""What Triton compiles for Ampere, Ada and Hopper, without a GPU; and addresses beyond 2^31, on
the emulator."""

import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from rubin_moe.kernels.triton.host import TritonExperts, TritonKernel
from tests.kernels.triton.ahead import Launches
from tests.kernels.triton.layers import Machine, batch, kernel_of, run
from tests.layers.backends import INTERPRETED, weights_of
from tests.oracles import moe, problems

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles; the interpreter was asked for")
EMULATOR = Machine("emulator")
LAYERS = {
    "nvfp4-bf16": (problems.layer(1, "nvfp4-ue4m3", 5, 160, 96), torch.bfloat16, 7),
    "gpt-oss-fp16-many": (
        problems.layer(1, "mxfp4", 5, 288, 96, kind="swigluoai", bias=True, limit=7.0),
        torch.float16,
        300,
    ),
}


def memory_of(compiled, capability: int, folder) -> list[str]:
    """What ptxas says about registers and spills."""
    (folder / "kernel.ptx").write_text(compiled.asm["ptx"])
    arch = f"sm_{capability}{'a' if capability == 90 else ''}"
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", "kernel.ptx", "-o", "cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [line for line in (done.stdout + done.stderr).splitlines() if "spill" in line]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_kernels_compile_without_spills(capability, name, monkeypatch, tmp_path):
    layer, dtype, num_tokens = LAYERS[name]
    started = Launches(monkeypatch, capability, emulate=False)
    kernel = kernel_of(layer, EMULATOR, dtype=dtype)
    run(kernel, layer, *batch(layer, num_tokens, dtype=dtype))
    names = [compiled.metadata.name for compiled in started.compiled]
    assert names == ["route", "fc1", "fc2", "sum_choices"]
    products = "wgmma.mma_async.sync" if capability == 90 else "mma.sync.aligned.m16n8k16"
    for compiled in started.compiled:
        assert (products in compiled.asm["ptx"]) == compiled.metadata.name.startswith("fc")
        assert compiled.asm["cubin"].startswith(b"\x7fELF")
        assert compiled.metadata.shared <= 99 << 10  # of a block on sm_86 and sm_89
        spills = memory_of(compiled, capability, tmp_path)
        assert spills
        assert all(" 0 bytes spill stores, 0 bytes spill loads" in line for line in spills)


def test_weights_of_more_than_two_to_the_31_bytes(monkeypatch):
    """2100 experts of 1 MiB of codes a projection, all zero pages but the last one's."""
    num_experts, hidden, last = 2100, 16384, 2099
    few = problems.layer(46, "nvfp4-ue4m3", 1, hidden, 64, kind="relu2")
    small = kernel_of(few, EMULATOR, 1)
    one = small.prepare(weights_of(few)).tensors()
    sizes = {"num_experts": num_experts, "global_num_experts": num_experts}
    kernel = TritonKernel(replace(small.problem, **sizes), "cpu")

    def spread(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not name.startswith(("codes", "scales")):
            return tensor.expand(num_experts, *tensor.shape[1:]).contiguous()
        wide = torch.from_numpy(np.zeros((num_experts, *tensor.shape[1:]), dtype=np.uint8))
        wide[last] = tensor[0]
        return wide

    many = {n: t if n.startswith("bias") else spread(n, t) for n, t in one.items()}
    assert many["codes2"].numel() > 2**31
    Launches(monkeypatch)
    x, ids = torch.ones(1, hidden, dtype=torch.bfloat16) / 64, np.array([[last]])
    weights = torch.ones(1, 1)
    out = kernel.run(TritonExperts(**many), x, torch.from_numpy(ids), weights)
    expected = moe.moe(few, x.double().numpy(), ids * 0, weights.numpy())
    worst = np.abs(out.double().numpy() - expected).max()
    assert worst < 2e-2 * np.abs(expected).max()
