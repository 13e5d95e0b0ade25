"""The custom operator: defined once, traced whole, checked by torch."""

import gc
import subprocess
import sys

import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.layers import ops
from tests.layers.backends import call, experts_of, one_a_backend, tokens, with_case
from tests.oracles import problems


@pytest.fixture(params=one_a_backend())
def bound(request):
    """A case, its layer, and the name it is bound to."""
    case = request.param
    experts = experts_of(with_case(problems.layer(30, case.fmt), case), case)
    name = f"layers.0.{case.backend.name}"
    ops.bind(name, experts)
    yield case, experts, name
    ops.unbind(name)


def routed(num_tokens: int, seed: int = 0):
    ids, weights = problems.routing(seed, "some_missing", num_tokens, 4, 2)
    return torch.from_numpy(ids), torch.from_numpy(weights)


def test_the_op_is_the_layer(bound):
    case, experts, name = bound
    x = tokens(1, 5)
    ids, weights = routed(5)
    device = case.backend.device
    out = ops.moe_experts(x.to(device), ids.to(device), weights.to(device), None, name)
    assert torch.equal(out.cpu(), call(experts, case, x, ids.numpy(), weights.numpy()))


@pytest.mark.parametrize("with_map", [False, True])
def test_opcheck(bound, with_map):
    case, _, name = bound
    ids, weights = routed(6)
    expert_map = torch.tensor([1, -1, 0, 2], dtype=torch.int32) if with_map else None
    args = (tokens(2, 6), ids, weights, expert_map)
    moved = tuple(None if t is None else t.to(case.backend.device) for t in args)
    checks = torch.library.opcheck(torch.ops.rubin_moe.moe_experts.default, (*moved, name))
    assert set(checks.values()) == {"SUCCESS"}


def test_compiled_whole_with_any_number_of_tokens(bound):
    """Field report 96: fullgraph, dynamic M, 0 tokens too; one compilation for all sizes."""
    case, experts, name = bound
    device, compilations = case.backend.device, 0

    def backend(graph, example_inputs):
        nonlocal compilations
        compilations += 1
        assert any("moe_experts" in str(n.target) for n in graph.graph.nodes)
        return graph.forward

    def block(x, ids, weights):
        return x + ops.moe_experts(x * 0.5, ids, weights, None, name)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (3, 9, 33):
        x = tokens(3, num_tokens)
        ids, weights = routed(num_tokens)
        got = compiled(x.to(device), ids.to(device), weights.to(device)).cpu()
        expected = x + call(experts, case, x * 0.5, ids.numpy(), weights.numpy())
        assert torch.equal(got, expected)
    assert compilations == 1
    ids, weights = routed(0)
    empty = compiled(tokens(3, 0).to(device), ids.to(device), weights.to(device))
    assert empty.shape == (0, 64)


def test_compiled_with_autograd_backend_traces_the_fake(bound):
    case, experts, name = bound
    torch._dynamo.reset()
    ids, weights = (t.to(case.backend.device) for t in routed(4))
    block = torch.compile(
        lambda x: ops.moe_experts(x, ids, weights, None, name) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    x = tokens(4, 4).to(case.backend.device)
    assert torch.equal(block(x), experts(x, ids, weights) * 2)


def test_registering_again_does_nothing(bound):
    before = torch.ops.rubin_moe.moe_experts.default
    ops.register()
    ops.register()
    assert torch.ops.rubin_moe.moe_experts.default is before


def test_importing_defines_no_operator():
    code = (
        "import torch, rubin_moe.layers.ops as o\n"
        "print(hasattr(torch.ops.rubin_moe, 'moe_experts'))\n"
        "o.register(); o.register()\n"
        "print(hasattr(torch.ops.rubin_moe, 'moe_experts'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]


def test_names_belong_to_living_layers(bound):
    case, experts, name = bound
    other = experts_of(with_case(problems.layer(31, case.fmt), case), case)
    ops.bind(name, experts)  # the same layer: no error
    with pytest.raises(ConfigError, match="two layers of one name"):
        ops.bind(name, other)
    ops.bind("temporary", other)
    del other
    gc.collect()
    ids, weights = routed(1)
    with pytest.raises(ConfigError, match="no layer is bound to 'temporary'"):
        ops.moe_experts(tokens(0, 1), ids, weights, None, "temporary")
    ops.unbind("temporary")
    ops.unbind("never bound")


def test_the_op_checks_its_arguments(bound):
    case, _, name = bound
    x, ids, weights = (t.to(case.backend.device) for t in (tokens(0, 2), *routed(2)))
    with pytest.raises(ConfigError, match=r"topk_ids is .*int16"):
        ops.moe_experts(x, ids.short(), weights, None, name)
    assert ops.moe_experts(x, ids, weights, None, name).isfinite().all()
