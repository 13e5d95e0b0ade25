"""What the assembler made of the prefill kernels: asynchronous products and free registers."""

import pytest

from rubin_moe.kernels.activation import Activation
from rubin_moe.kernels.launch import CompiledKernel
from rubin_moe.kernels.sm90.fp8_host import fp8_gemm
from rubin_moe.kernels.sm90.fp8_plan import Fp8Plan, Fp8Tiles, check_fp8, fp8_sizes
from rubin_moe.kernels.sm90.plan import LayerSizes
from rubin_moe.kernels.sm90.prefill_host import gemm_kernel
from rubin_moe.kernels.sm90.prefill_plan import PrefillPlan, PrefillTiles, check_prefill

from . import sass

SIZES = LayerSizes(128, 8, 2048, 768, gated=True, exponent_only=False)
TILES = (
    PrefillTiles(160, stages13=5, stages2=5),
    PrefillTiles(144, narrower=1, step=16, stages13=5, stages2=5),
    PrefillTiles(80, narrower=3, stages13=4, stages2=4, blocks13=2, blocks2=2),
)
FP8_SIZES = LayerSizes(128, 4, 2880, 2880, gated=True, exponent_only=True)
FP8_TILES = (Fp8Tiles(), Fp8Tiles(144, narrower=1, promote=0))
pytestmark = pytest.mark.skipif(sass.disassembler() is None, reason="there is no nvdisasm")


@pytest.fixture(
    params=[pytest.param((t, False), id=f"FC2 {t}") for t in TILES]
    + [pytest.param((t, False), id=f"FC2 {t}") for t in FP8_TILES]
    + [pytest.param((t, True), id=f"FC1 {t}", marks=pytest.mark.long) for t in TILES + FP8_TILES]
)
def kernel(request) -> CompiledKernel:
    tiles, fc1 = request.param
    if isinstance(tiles, Fp8Tiles):
        plan = check_fp8(Fp8Plan(fp8_sizes(FP8_SIZES), tiles))
        return fp8_gemm(plan, fc1, Activation(), False)
    return gemm_kernel(check_prefill(PrefillPlan(SIZES, tiles)), fc1, Activation(), False)


def test_products_run_while_the_next_are_prepared(kernel):
    """Serialized ones would be waited for one by one (the assembler's C7512)."""
    code = sass.instructions(kernel)
    products = sum(ins.opcode.startswith(sass.PRODUCTS) for ins in code)
    waits = sum(ins.opcode.startswith("WARPGROUP.DEPBAR") for ins in code)
    assert products >= 8
    assert waits < products
    assert not sass.touched_in_flight(code)


def test_registers_touched_in_flight_are_found(kernel):
    code = sass.instructions(kernel)
    last = max(i for i, ins in enumerate(code) if ins.opcode.startswith(sass.PRODUCTS))
    product = sass.product_of(code[last])
    for at in (min(product.a), min(product.acc)):
        fault = sass.Instruction("MOV", (f"R{at}", "RZ"))
        assert sass.touched_in_flight([*code[: last + 1], fault, *code[last + 1 :]]) == [fault]
