"""Instructions that compilers emit seldom."""

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.engine.harness import elementwise, module, run

RNG = np.random.default_rng(0)
X = RNG.integers(0, 1 << 32, 512, dtype=np.uint32)
Y = RNG.integers(0, 40, 512).astype(np.uint32)
F = np.concatenate(
    [
        np.float32([0, -0.0, 1, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38]),
        RNG.normal(size=503).astype(np.float32),
    ]
)


def test_masks_and_sign_extension() -> None:
    width = np.minimum(Y, 32).astype(np.uint64)
    mask = ((np.uint64(1) << width) - np.uint64(1)).astype(np.uint32)
    ours = elementwise(" bmsk.clamp.b32 %r63, 3, %r1;", [X, Y], np.uint32)
    np.testing.assert_array_equal(ours, (mask.astype(np.uint64) << np.uint64(3)).astype(np.uint32))
    ours = elementwise(" szext.clamp.u32 %r63, %r0, %r1;", [X, Y], np.uint32)
    np.testing.assert_array_equal(ours, X & mask)
    ours = elementwise(" szext.clamp.s32 %r63, %r0, %r1;", [X, Y], np.uint32)
    top = np.where(Y == 0, 0, X >> np.clip(Y.astype(int) - 1, 0, 31) & 1)
    np.testing.assert_array_equal(ours, np.where(top == 1, X | ~mask, X & mask))


def test_short_products() -> None:
    ours = elementwise(" mul24.lo.u32 %r63, %r0, %r1;", [X, Y], np.uint32)
    np.testing.assert_array_equal(ours, (X & 0xFFFFFF) * Y)
    ours = elementwise(" mad24.lo.s32 %r63, %r0, %r1, %r0;", [X, Y], np.int32)
    short = (X << 8).view(np.int32) >> 8
    np.testing.assert_array_equal(ours, short * Y.view(np.int32) + X.view(np.int32))


def test_selection_by_sign_and_set() -> None:
    ours = elementwise(" slct.b32.s32 %r63, %r1, 5, %r0;", [X, Y], np.uint32)
    np.testing.assert_array_equal(ours, np.where(X.view(np.int32) >= 0, Y, 5))
    ours = elementwise(" set.lt.u32.u32 %r63, %r0, %r1;", [X, Y], np.uint32)
    np.testing.assert_array_equal(ours, np.where(X < Y, 0xFFFFFFFF, 0))
    ours = elementwise(" set.gt.f32.f32 %r63, %r0, 0f00000000;", [F], np.float32)
    np.testing.assert_array_equal(ours, (F > 0).astype(np.float32))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("finite", np.isfinite), ("infinite", np.isinf), ("notanumber", np.isnan),
        ("number", lambda x: ~np.isnan(x)),
        ("normal", lambda x: np.isfinite(x) & (np.abs(x) >= 2.0**-126)),
        ("subnormal", lambda x: (x != 0) & (np.abs(x) < 2.0**-126)),
    ],
)  # fmt: skip
def test_classification(name: str, model) -> None:
    body = f" testp.{name}.f32 %p1, %r0; selp.b32 %r63, 1, 0, %p1;"
    np.testing.assert_array_equal(elementwise(body, [F], np.uint32), model(F))


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
def test_float_redux(op: str, modifiers: str) -> None:
    values = np.resize(F, 512).reshape(16, 32).copy()
    values[:8] = RNG.normal(size=(8, 32))
    values[15] = np.nan
    flat = np.ascontiguousarray(values.reshape(-1))
    ours = elementwise(f" redux.sync.{op}{modifiers}.f32 %r63, %r0, -1;", [flat], np.float32)
    source = np.abs(values) if "abs" in modifiers else values
    functions = {("min", False): np.fmin, ("max", False): np.fmax,
                 ("min", True): np.minimum, ("max", True): np.maximum}  # fmt: skip
    with np.errstate(invalid="ignore"):
        expected = functions[op, "NaN" in modifiers].reduce(source, axis=1)
    np.testing.assert_array_equal(ours.reshape(16, 32), np.repeat(expected[:, None], 32, 1))


def test_generic_cluster_addresses() -> None:
    body = """
     .shared .align 8 .b8 s[64]; mov.u32 %i0, %tid.x; mov.u32 %i1, %cluster_ctarank;
     mov.u64 %addr1, s; cvta.shared.u64 %addr2, %addr1; mapa.u64 %addr3, %addr2, 1;
     getctarank.u64 %r1, %addr3; cvt.u32.u64 %r2, %addr1; mapa.shared::cluster.u32 %r3, %r2, 1;
     getctarank.shared::cluster.u32 %r4, %r3;
     cvta.to.shared::cluster.u64 %addr4, %addr3; cvt.u32.u64 %r5, %addr4;
     setp.eq.u32 %p1, %r5, %r3; isspacep.shared::cluster %p2, %addr3; and.pred %p1, %p1, %p2;
     isspacep.global %p3, %addr3; not.pred %p3, %p3; and.pred %p1, %p1, %p3;
     selp.b32 %r6, 1, 0, %p1;
     setp.eq.u32 %p4, %i1, 0; mov.b32 %r7, 77; @%p4 st.u32 [%addr3], %r7;
     barrier.cluster.arrive; barrier.cluster.wait;
     ld.shared.u32 %r8, [s];
     ld.param.u64 %addr5, [a]; mul.wide.u32 %addr6, %i1, 16; add.s64 %addr5, %addr5, %addr6;
     st.global.v4.b32 [%addr5], {%r1, %r4, %r6, %r8};"""
    storage = np.zeros(16, np.uint32)
    start = -storage.ctypes.data % 16 // 4
    a = storage[start : start + 8]
    run(module(body, ".param .u64 a"), [a], 2, 32, cluster=2)
    np.testing.assert_array_equal(a[[0, 1, 2, 4, 5, 6]], 1)
    assert a[7] == 77


def test_saturation_and_relu() -> None:
    with np.errstate(invalid="ignore"):
        clamped = np.where(F + F > 0, np.minimum(F + F, 1), 0).astype(np.float32)
    ours = elementwise(" add.sat.f32 %r63, %r0, %r0;", [F], np.float32)
    np.testing.assert_array_equal(ours, clamped)
    ours = elementwise(" cvt.sat.f32.f32 %r63, %r0;", [F], np.float32)
    np.testing.assert_array_equal(ours, np.where(F > 0, np.minimum(F, 1), 0))
    codes = elementwise(" cvt.rn.relu.bf16.f32 %h31, %r0;", [F], np.uint16)
    with np.errstate(invalid="ignore"):
        positive = np.where(F < 0, np.float32(0), F)
    finite = ~np.isnan(F) & (F != 0)
    expected = positive.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(codes[finite], expected[finite])
    assert (codes[F == 0] == 0).all()


def test_rounding_to_integral_floats() -> None:
    x = np.concatenate([F[np.isfinite(F)], np.float32([0.5, 1.5, 2.5, -0.5, -2.5])])
    models = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for mode, model in models.items():
        ours = elementwise(f" cvt.{mode}.f32.f32 %r63, %r0;", [x], np.float32)
        np.testing.assert_array_equal(ours, model(x))


def test_sixteen_bit_integers_and_floats() -> None:
    x = RNG.integers(0, 1 << 16, 300).astype(np.uint16)
    ours = elementwise(" cvt.rn.f16.u16 %h31, %h0;", [x], np.uint16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(ours.view(np.float16), x.astype(np.float16))
    half = RNG.normal(scale=100, size=300).astype(np.float16)
    ours32 = elementwise(" cvt.rzi.s32.f16 %r63, %h0;", [half.view(np.uint16)], np.int32)
    np.testing.assert_array_equal(ours32, np.trunc(half.astype(np.float32)))
    ours = elementwise(" cvt.rn.bf16.f16 %h31, %h0;", [half.view(np.uint16)], np.uint16)
    expected = half.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(ours, expected)
    for op, model in (("min", np.minimum), ("max", np.maximum)):
        other = np.roll(half, 1)
        body = f" {op}.f16x2 %r63, %r0, %r1;"
        pair = [np.repeat(v.view(np.uint16), 2).view(np.uint32) for v in (half, other)]
        ours = elementwise(body, pair, np.uint32)
        np.testing.assert_array_equal(ours & 0xFFFF, model(half, other).view(np.uint16))


def test_vector_reductions_and_policies() -> None:
    body = """
     mov.u32 %i0, %tid.x; ld.param.u64 %addr1, [a]; mov.b32 %r1, 0f3F800000;
     createpolicy.fractional.L2::evict_last.b64 %d1;
     red.global.v4.add.f32 [%addr1], {%r1, %r1, %r1, %r1};
     ld.global.L1::no_allocate.L2::cache_hint.b32 %r2, [%addr1], %d1; membar.gl; fence.sc.gpu;
     prefetch.global.L2 [%addr1]; nanosleep.u32 20;"""
    storage = np.zeros(8, np.float32)
    start = -storage.ctypes.data % 16 // 4
    a = storage[start : start + 4]
    run(module(body, ".param .u64 a"), [a])
    np.testing.assert_array_equal(a, 32)
