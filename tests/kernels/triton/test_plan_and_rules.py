"""Plans, scales, selection and memory of the Triton backend; no Triton."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rubin_moe.errors import FormatError, UnsupportedError
from rubin_moe.formats.spec import FORMATS, MXFP4, MXFP8, NVFP4_UE4M3, NVFP4_UE5M3, WEIGHT_FORMATS
from rubin_moe.kernels import registry
from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.base import MoEProblem, Target
from rubin_moe.kernels.triton import plan as plans
from rubin_moe.kernels.triton import rules
from rubin_moe.kernels.triton.host import TritonKernel
from rubin_moe.kernels.triton.scales import kernel_scales, taken_out, unit
from rubin_moe.layouts.fp4_planes import CodePlanes, ScaleTiles
from tests.layers.backends import weights_of
from tests.oracles import problems, quant

VERSIONS = {"triton": "3.6.0", "nvidia-cutlass-dsl": "4.8.1"}
DTYPES = ("bfloat16", "float16", "float32")


def gpu(major: int, minor: int) -> Target:
    return Target("cuda", (major, minor), VERSIONS)


def problem(**fields) -> MoEProblem:
    base = {"num_experts": 8, "global_num_experts": 8, "top_k": 2, "hidden": 64}
    return MoEProblem(**{**base, "intermediate": 32, "weight_format": NVFP4_UE4M3, **fields})


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_ampere_and_ada_get_it_and_are_told_that_nobody_ran_it_there(capability):
    chosen = registry.select(problem(), gpu(*capability))
    assert chosen.backend == "triton"
    name = "sm_{}{}".format(*capability)
    assert f"compiled for {name}, never run on such a GPU" in str(chosen)
    assert "compiled for sm_90a" in chosen.reasons["sm90"]


def test_hopper_gets_it_where_the_fast_path_refuses_or_it_is_named(monkeypatch):
    assert registry.select(problem(), gpu(9, 0)).backend == "sm90"
    wide = registry.select(problem(dtype="float32"), gpu(9, 0))
    assert wide.backend == "triton"
    assert "float32" in wide.reasons["sm90"]
    assert "never run on such a GPU" not in wide.why
    monkeypatch.setenv("RUBIN_MOE_BACKEND", "triton")
    assert registry.select(problem(), gpu(9, 0)).backend == "triton"


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (10, 7), (12, 0)])
def test_other_gpus_are_refused(capability):
    reason = rules.why_not(problem(), gpu(*capability))
    assert reason.startswith("is compiled for sm_80, sm_86, sm_89, sm_90; this is sm_")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight_format": MXFP8}, "no decoder for mxfp8"),
        ({"activation_format": "mxfp8"}, "own activations, not mxfp8"),
        ({"dtype": "float64"}, "hidden states of float64"),
        ({"num_experts": 5000}, "at most 4096 experts; these are 5000"),
    ],
)
def test_what_it_does_not_compute_is_refused_with_a_reason(fields, reason):
    assert reason in rules.why_not(problem(**fields), gpu(8, 0))


@pytest.mark.parametrize("versions", [{}, {"triton": "3.5.1"}])
def test_a_missing_or_old_compiler_is_named(versions):
    reason = rules.why_not(problem(), Target("cuda", (8, 0), versions))
    assert reason == "needs triton 3.6 to compile its kernels: pip install 'rubin-moe[triton]'"


def test_a_cpu_gets_it_in_the_interpreter_only_and_only_by_name(monkeypatch):
    cpu = Target("cpu", None, {**VERSIONS, "torch": "2.13", "llvmlite": "0.45"})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1"):
        registry.select(problem(), cpu, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert registry.select(problem(), cpu, backend="triton").backend == "triton"
    assert registry.select(problem(), cpu).backend == "cpu"


def test_rules_import_neither_torch_nor_triton():
    code = (
        "import sys, rubin_moe.kernels.triton.rules\n"
        "print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("num_experts", [1, 8, 128, 300, 4096])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 4096, 10**6])
def test_plans_hold_every_routing(num_experts, num_tokens):
    """All to one expert, and as evenly as can be with one pair more than full groups."""
    p = problem(num_experts=num_experts, top_k=min(8, num_experts))
    made = plans.make_plan(p, num_tokens)
    pairs = min(num_tokens, plans.max_tokens(p)) * p.top_k
    assert pairs <= plans.MAX_PAIRS
    assert made.experts > num_experts
    assert made.experts & (made.experts - 1) == 0
    assert -(-pairs // made.own) * made.own >= made.max_groups  # `route` writes every group
    for used in {1, min(num_experts, pairs)}:
        counts = np.ones(used, dtype=int)
        left = pairs - used
        counts[: left // made.group] += 0  # one pair each first, whole groups to the first expert
        counts[0] += left
        assert (-(-counts // made.group)).sum() <= made.max_groups
    assert f"group={made.group}" in str(rules.plan(p, num_tokens))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["nvfp4-ue4m3", "nvfp4-ue5m3", "mxfp4"])
def test_every_product_of_element_and_scale_is_exact(fmt, dtype):
    """All codes of the format at once; float16 and UE8M0: the exponents that fit at once."""
    table = quant.SCALES[quant.SCALE_TYPE[fmt]]
    codes = torch.arange(256, dtype=torch.uint8)[torch.from_numpy(np.isfinite(table))]
    if fmt == "mxfp4" and dtype == "float16":
        codes = codes[200:237]
    q = torch.full((1, len(codes) * FORMATS[fmt].sf_vec_size // 2), 0x71, dtype=torch.uint8)
    read, factor = kernel_scales(codes[None], q, FORMATS[fmt], dtype, "test")
    shift = 23 if fmt == "mxfp4" else 20
    bits = read[0].to(torch.int32) << shift
    if fmt == "mxfp4":
        bits[read[0] == 0] = 1 << 22
    decoded = bits.view(torch.float32) * unit(FORMATS[fmt].scale, dtype)
    assert np.array_equal(decoded.double().numpy() * factor, table[codes.numpy()])
    products = torch.tensor(quant.E2M1)[:, None].double() * decoded.double()
    rounded = products.to(getattr(torch, dtype))
    assert torch.equal(rounded.double(), products)


@pytest.mark.parametrize(
    ("fmt", "codes", "reason"),
    [
        (NVFP4_UE4M3, [0x7F], "code 0x7f is no ue4m3 number"),
        (NVFP4_UE4M3, [0x80], "code 0x80 is no ue4m3 number"),
        (NVFP4_UE5M3, [0xFF], "code 0xff is no ue5m3 number"),
        (MXFP4, [0xFF], "code 0xff is no ue8m0 number"),
        (MXFP4, [100, 140], r"2\^-27 to 2\^13; with float16 .* hold 37 exponents"),
    ],
)
def test_scales_that_cannot_be_held_are_named(fmt, codes, reason):
    sf = torch.tensor([codes], dtype=torch.uint8)
    q = torch.full((1, len(codes) * fmt.sf_vec_size // 2), 0x11, dtype=torch.uint8)
    with pytest.raises(FormatError, match=f"experts.w2 of expert 3: .*{reason}"):
        kernel_scales(sf, q, fmt, "float16", "experts.w2 of expert 3")


def test_a_block_of_zeros_may_have_any_scale():
    sf = torch.tensor([[0, 120]], dtype=torch.uint8)
    q = torch.tensor([[0x80] * 16 + [0x11] * 16], dtype=torch.uint8)  # -0 and 0, then 0.5
    read, factor = kernel_scales(sf, q, MXFP4, "float16", "test")
    assert (int(read[0, 1]), factor) == (120, 1.0)
    assert 104 <= int(read[0, 0]) <= 140
    assert taken_out("ue8m0", "float16") == 0


@pytest.mark.parametrize("fmt", WEIGHT_FORMATS, ids=str)
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_prepared_weights_are_the_layouts_of_each_half(fmt, kind):
    layer = problems.layer(3, fmt.name, 3, 160, 96, kind=kind, bias=True)
    weights = weights_of(layer)
    p = problem(
        num_experts=3, hidden=160, intermediate=96, weight_format=fmt, has_bias=True,
        activation=Activation(kind), global_num_experts=3,
    )  # fmt: skip
    kernel = TritonKernel(p, "cpu")
    made = kernel.prepare(weights).tensors()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads
    try:
        again = kernel.prepare(weights).tensors()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {n: t.dtype for n, t in made.items()} == {n: t.dtype for n, t in again.items()}
    assert all(torch.equal(made[name], again[name]) for name in made)
    halves = 1 if kind == "relu2" else 2
    for half in range(halves):
        rows = slice(half * 96, (half + 1) * 96)
        codes = CodePlanes().unpack(made["codes13"][2, half], (96, 80))
        assert torch.equal(codes, weights.w13.qdata[2, rows])
        columns = 160 // fmt.sf_vec_size
        scales = ScaleTiles(fmt.sf_vec_size).unpack(made["scales13"][2, half], (96, columns))
        assert torch.equal(scales, weights.w13.sf[2, rows])
        assert torch.equal(made["bias13"][2, half, :96], weights.w13.bias[2, rows])
        assert not made["bias13"][2, half, 96:].any()
    assert torch.equal(CodePlanes().unpack(made["codes2"][1], (160, 48)), weights.w2.qdata[1])
    factor = 2.0 ** taken_out(fmt.scale, "bfloat16")
    assert torch.equal(made["alpha13"], weights.w13.dec * factor)
    assert torch.equal(made["alpha2"], weights.w2.dec[:, 0] * factor)


class Allocations(TorchDispatchMode):
    """Bytes of every storage that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.sizes.append(out.untyped_storage().nbytes())
        return out


def test_preparing_never_makes_more_than_one_expert_at_once():
    weights = weights_of(problems.layer(4, "nvfp4-ue4m3", 16, 512, 256))
    kernel = TritonKernel(problem(num_experts=16, hidden=512, intermediate=256), "cpu")
    with Allocations() as made:
        kept = {t.untyped_storage().nbytes() for t in kernel.prepare(weights).tensors().values()}
    one_half = weights.w13.qdata[0].numel() // 2
    others = [size for size in made.sizes if size not in kept]
    assert 0 < max(others) <= one_half


def test_weights_of_another_format_are_refused():
    layer = problems.layer(3, "mxfp4", 2)
    with pytest.raises(FormatError, match="mxfp4 weights for nvfp4-ue4m3"):
        TritonKernel(problem(num_experts=2), "cpu").prepare(weights_of(layer))
