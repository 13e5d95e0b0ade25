"""Floating-point instructions: NumPy where IEEE decides, bounds where the ISA leaves room."""

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.engine.harness import elementwise

NAN = 0x7FFFFFFF
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1.5, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 3e38, -3e38, 1e-38, 0.5],
    np.float32,
)


def values(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    first, second = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    edges = [first, second, np.roll(first, 3)][:count]
    bits = rng.integers(0, 1 << 32, (count, 1000), dtype=np.uint32)
    near = rng.normal(size=(count, 1000)).astype(np.float32)
    return [
        np.concatenate([e, b.view(np.float32), n])
        for e, b, n in zip(edges, bits, near, strict=True)
    ]


def same_bits(ours: np.ndarray, expected: np.ndarray) -> None:
    """Bit equality, with NaN in the GPU's one encoding."""
    expected = np.ascontiguousarray(expected.astype(np.float32)).view(np.uint32).copy()
    expected[(expected & 0x7FFFFFFF) > 0x7F800000] = NAN
    np.testing.assert_array_equal(ours.view(np.uint32), expected)


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_arithmetic(op: str, ftz: str) -> None:
    a, b = values(2)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op]
    x, y = (flush(a), flush(b)) if ftz else (a, b)
    with np.errstate(all="ignore"):
        expected = function(x, y)
    expected = flush(expected) if ftz else expected
    same_bits(elementwise(f" {op}{ftz}.f32 %r63, %r0, %r1;", [a, b], np.float32), expected)
    pair = np.stack([a, np.roll(a, 1)], 1).copy().view(np.uint64)[:, 0]
    other = np.stack([b, np.roll(b, 1)], 1).copy().view(np.uint64)[:, 0]
    both = elementwise(f" {op}.rn{ftz}.f32x2 %d31, %d0, %d1;", [pair, other], np.uint64)
    halves = both.view(np.float32).reshape(-1, 2)
    same_bits(np.ascontiguousarray(halves[:, 0]), expected)
    same_bits(np.ascontiguousarray(halves[:, 1]), np.roll(expected, 1))


def test_fma_rounds_once() -> None:
    a, b, c = values(3)
    keep = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[keep], b[keep], c[keep]
    ours = elementwise(" fma.rn.f32 %r63, %r0, %r1, %r2;", [a, b, c], np.float32)
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    with np.errstate(all="ignore"):
        expected = exact.astype(np.float32)
    agree = ours == expected
    # extended precision may itself round: never more than one step away, and rarely
    assert agree.mean() > 0.999
    assert (np.abs(ours[~agree].view(np.int32) - expected[~agree].view(np.int32)) <= 1).all()


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
@pytest.mark.parametrize("three", [False, True])
def test_extrema(op: str, nan: str, three: bool) -> None:
    a, b, c = values(3)
    sources = [a, b, c] if three else [a, b]
    operands = ", ".join(f"%r{j}" for j in range(len(sources)))
    ours = elementwise(f" {op}{nan}.f32 %r63, {operands};", sources, np.float32)
    function = {("min", ""): np.fmin, ("max", ""): np.fmax, ("min", ".NaN"): np.minimum,
                ("max", ".NaN"): np.maximum}[op, nan]  # fmt: skip
    with np.errstate(all="ignore"):
        expected = function(a, b)
        expected = function(expected, c) if three else expected
    zero = expected == 0
    same_bits(ours[~zero], expected[~zero])
    assert (ours[zero] == 0).all()
    signs = elementwise(f" {op}.f32 %r63, %r0, %r1;",
                        [np.float32([0, -0.0]), np.float32([-0.0, 0])], np.float32)  # fmt: skip
    assert np.signbit(signs).all() == (op == "min")


def test_xorsign_of_magnitudes() -> None:
    a, b = (v[~np.isnan(v)] for v in values(2))
    n = min(len(a), len(b))
    a, b = a[:n], b[:n]
    ours = elementwise(" max.xorsign.abs.f32 %r63, %r0, %r1;", [a, b], np.float32)
    expected = np.maximum(np.abs(a), np.abs(b))
    same_bits(ours, np.where(np.signbit(a) != np.signbit(b), -expected, expected))


def test_sign_manipulation() -> None:
    a, b = values(2)
    bits = a.view(np.uint32)
    for op, expected in (("neg", bits ^ 0x80000000), ("abs", bits & 0x7FFFFFFF)):
        ours = elementwise(f" {op}.f32 %r63, %r0;", [a], np.float32)
        same_bits(ours, expected.view(np.float32))
    ours = elementwise(" copysign.f32 %r63, %r0, %r1;", [a, b], np.uint32)
    expected = (b.view(np.uint32) & 0x7FFFFFFF) | (bits & 0x80000000)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("name", "function", "ulps"),
    [
        ("rcp.approx.ftz", lambda x: 1 / x, 1),
        ("rsqrt.approx.ftz", lambda x: 1 / np.sqrt(x), 1),
        ("sqrt.approx.ftz", np.sqrt, 1),
        ("ex2.approx.ftz", np.exp2, 2),
        ("lg2.approx.ftz", np.log2, 2),
        ("tanh.approx", np.tanh, 2),
    ],
)
def test_approximations_stay_close(name: str, function, ulps: int) -> None:
    x = np.concatenate([np.linspace(-20, 20, 3001), np.geomspace(1e-30, 1e30, 2000)])
    x = x.astype(np.float32)
    with np.errstate(all="ignore"):
        expected = function(x.astype(np.float64)).astype(np.float32)
    ours = elementwise(f" {name}.f32 %r63, %r0;", [x], np.float32)
    normal = np.isfinite(expected) & (np.abs(expected) >= 2.0**-126)
    steps = np.abs(ours[normal].view(np.int32).astype(np.int64) - expected[normal].view(np.int32))
    assert steps.max() <= ulps
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(expected))


def test_ex2_corners() -> None:
    x = np.array([-np.inf, np.inf, np.nan, -200, 200, 0, -0.0], np.float32)
    ours = elementwise(" ex2.approx.ftz.f32 %r63, %r0;", [x], np.float32)
    same_bits(ours, np.array([0, np.inf, np.nan, 0, np.inf, 1, 1], np.float32))


@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_half_precision_rounds_once(kind: str, dtype: type, op: str) -> None:
    rng = np.random.default_rng(4)
    arrays = [rng.normal(scale=s, size=4000).astype(dtype) for s in (1, 3, 40)]
    wide = [x.astype(np.float64) for x in arrays]
    exact = {
        "add": lambda: wide[0] + wide[1],
        "mul": lambda: wide[0] * wide[1],
        "fma": lambda: wide[0] * wide[1] + wide[2],
    }[op]()
    expected = exact.astype(dtype)
    count = 3 if op == "fma" else 2
    operands = ", ".join(f"%h{j}" for j in range(count))
    rounding = ".rn" if op == "fma" else ""
    inputs = [x.view(np.uint16) for x in arrays[:count]]
    ours = elementwise(f" {op}{rounding}.{kind} %h31, {operands};", inputs, np.uint16)
    # float64 to the small type is one rounding for float16; ml_dtypes goes through float32
    mismatch = ours != expected.view(np.uint16)
    allowed = 0 if dtype is np.float16 else 2
    assert mismatch.sum() <= allowed
    pairs = [np.ascontiguousarray(np.stack([x, x], 1)).view(np.uint32)[:, 0] for x in inputs]
    operands = ", ".join(f"%r{j}" for j in range(count))
    both = elementwise(f" {op}{rounding}.{kind}x2 %r63, {operands};", pairs, np.uint32)
    np.testing.assert_array_equal(both, ours.astype(np.uint32) * 0x10001)


def test_mixed_add_takes_a_bf16() -> None:
    a = np.random.default_rng(5).normal(size=500).astype(ml_dtypes.bfloat16)
    b = np.random.default_rng(6).normal(size=500).astype(np.float32)
    ours = elementwise(" add.rn.f32.bf16 %r63, %h0, %r1;", [a.view(np.uint16), b], np.float32)
    same_bits(ours, a.astype(np.float32) + b)


def test_float_comparisons_order_nan() -> None:
    a, b = values(2)
    with np.errstate(invalid="ignore"):
        models = {"lt": a < b, "ge": a >= b, "eq": a == b, "ne": (a < b) | (a > b),
                  "ltu": ~(a >= b), "neu": a != b, "num": ~np.isnan(a) & ~np.isnan(b),
                  "nan": np.isnan(a) | np.isnan(b)}  # fmt: skip
    for name, expected in models.items():
        body = f" setp.{name}.f32 %p1, %r0, %r1; selp.b32 %r63, 1, 0, %p1;"
        np.testing.assert_array_equal(elementwise(body, [a, b], np.uint32), expected)


def test_float64() -> None:
    rng = np.random.default_rng(7)
    a, b, c = (rng.normal(size=300) for _ in range(3))
    np.testing.assert_array_equal(
        elementwise(" add.f64 %d31, %d0, %d1;", [a, b], np.float64), a + b
    )
    ours = elementwise(" fma.rn.f64 %d31, %d0, %d1, %d2;", [a, b, c], np.float64)
    np.testing.assert_allclose(ours, a * b + c, rtol=1e-12)
    ours = elementwise(" cvt.rn.f32.f64 %r63, %d0;", [a], np.float32)
    np.testing.assert_array_equal(ours, a.astype(np.float32))


def test_bf16_fma_keeps_a_sticky_bit_below_float64() -> None:
    """188 * 144 is a tie in bfloat16; the addend, 2^-57 of it, decides it (as on an H200)."""
    a, b, c = (np.full(4, x, np.uint16) for x in (0x55BC, 0x4E90, 0xC8A6))
    ours = elementwise(" fma.rn.bf16 %h31, %h0, %h1, %h2;", [a, b, c], np.uint16)
    assert (ours == 0x64D3).all()
    up = elementwise(" fma.rn.bf16 %h31, %h0, %h1, %h2;", [a, b, c ^ 0x8000], np.uint16)
    assert (up == 0x64D4).all()
