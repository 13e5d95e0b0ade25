"""Router logits to ids and weights on the sm_90a kernel, against the layers' own routing."""

import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import NVFP4_UE4M3
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.layers.routing import Routing, route
from tests.layers.backends import assert_close, tokens, weights_of
from tests.oracles import problems

from .layers import EMULATOR, MACHINES, kernel_of


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "dtype"),
    [(128, 8, torch.bfloat16), (8, 2, torch.float16), (200, 6, torch.float32)],
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_best_of_softmax(num_experts, top_k, dtype, renormalize, machine):
    """Among bfloat16 logits of 128 experts there are ties: they go to the lower id."""
    problem = MoEProblem(num_experts, num_experts, top_k, 64, 32, NVFP4_UE4M3)
    logits = 3 * torch.randn(9, num_experts, generator=torch.Generator().manual_seed(1))
    logits[1] = -logits[1].abs()
    logits[2, 5:] = float("-inf") if top_k < 5 else -100.0
    logits = logits.to(dtype)
    weights, ids = route(logits, Routing(top_k, renormalize=renormalize))
    kernel = machine.kernel(problem)
    found_ids, found = kernel.route(logits.to(kernel.device), renormalize)
    assert torch.equal(found_ids.cpu(), ids)
    torch.testing.assert_close(found.cpu(), weights, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("logits", "got"),
    [
        (torch.zeros(3, 9), r"\[3, 9\] torch.float32"),
        (torch.zeros(3, 8, dtype=torch.float64), r"\[3, 8\] torch.float64"),
        (torch.zeros(8, 3).T, r"\[3, 8\] torch.float32"),
    ],
)
def test_other_logits_are_refused(logits, got):
    problem = MoEProblem(8, 8, 2, 64, 32, NVFP4_UE4M3)
    kernel = EMULATOR.kernel(problem)
    with pytest.raises(ConfigError, match=rf"logits {got}: expected contiguous \[M, 8\] of "):
        kernel.route(logits)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("pairs", [512, 8])
def test_a_layer_from_logits(machine, pairs):
    """As routed first; also where the tokens take several launches."""
    layer = problems.layer(3, "nvfp4-ue4m3", 5)
    x = tokens(1, 7, layer.w2.qdata.shape[1], torch.bfloat16)
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    kernel = kernel_of(layer, machine=machine)
    kernel._step = pairs // 2
    prepared = kernel.prepare(weights_of(layer))
    x, logits = x.to(kernel.device), logits.to(kernel.device)
    ids, weights = kernel.route(logits)
    out = kernel.run_from_logits(prepared, x, logits)
    assert torch.equal(out, kernel.run(prepared, x, ids, weights))
    assert_close(layer, x.cpu(), ids.cpu().numpy(), weights.cpu().numpy(), out.cpu())
