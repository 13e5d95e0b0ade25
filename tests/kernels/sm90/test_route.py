"""Router logits to ids and weights on the sm_90a kernel, against the layers' own routing."""

import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import NVFP4_UE4M3
from rubin_moe.kernels.base import MoEProblem
from rubin_moe.layers.routing import Routing, route

from .layers import MACHINES


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


def test_logits_of_another_shape_are_refused():
    problem = MoEProblem(8, 8, 2, 64, 32, NVFP4_UE4M3)
    kernel = MACHINES[0].values[0].kernel(problem)
    with pytest.raises(ConfigError, match=r"logits \[3, 9\]: expected contiguous \[M, 8\]"):
        kernel.route(torch.zeros(3, 9))
