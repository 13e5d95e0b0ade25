"""What a layer compiles and when: all before its first call, and nothing that is on disk."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rubin_moe.errors import ConfigError
from rubin_moe.formats.spec import MXFP4, NVFP4_UE4M3
from rubin_moe.kernels import compile_cache
from rubin_moe.kernels.base import CompilesAhead, MoEProblem
from rubin_moe.kernels.launch import CompiledKernel
from rubin_moe.kernels.sm90 import choice, fp8_host, host, prefill_host, sort_host
from rubin_moe.kernels.sm90.calls import choices, plan_of
from rubin_moe.layers.experts import MoEExperts

KEPT = (
    host.kernel_of, prefill_host.prefill_kernels, prefill_host.gemm_kernel, sort_host.sort_kernel,
    sort_host.sum_kernel, fp8_host.fp8_kernels, fp8_host.fp8_gemm, fp8_host.rows_kernel,
)  # fmt: skip
FORMATS = {
    "nvfp4 w4a16": {"weight_format": NVFP4_UE4M3},
    "mxfp4 w4a16": {"weight_format": MXFP4},
    "mxfp4 w4a8": {"weight_format": MXFP4, "activation_format": "fp8-e4m3"},
}
MEASURED = (128, 8, 2048, 768)  # of a file of configs/tuning with NVFP4
UNMEASURED = (24, 3, 320, 192)


@dataclass
class Spy:
    """Stands for the compiler and the GPU."""

    compiled: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    launched: list[str] = field(default_factory=list)

    def compile(self, arch: str, module: str, build: Callable[[], Any]) -> tuple[str, bytes, str]:
        self.compiled.append(module)
        return "", b"", "entry"

    def load(self, kernel: CompiledKernel) -> None:
        self.loaded.add(kernel.key)

    def launch(self, kernel: CompiledKernel, grid: int, args: Any) -> None:
        assert kernel.key in self.loaded, f"{kernel.name} is loaded by its first launch"
        assert 1 <= grid < 2**31
        self.launched.append(kernel.name)

    def forget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As in a new process."""
        for kept in KEPT:
            kept.cache_clear()
        monkeypatch.setattr(compile_cache, "_loaded", {})
        self.compiled.clear()
        self.loaded.clear()


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    found = Spy()
    found.forget(monkeypatch)
    monkeypatch.setattr(compile_cache, "_compile", found.compile)
    monkeypatch.setattr(compile_cache, "dsl_version", lambda: "4.8.1")
    monkeypatch.setenv("RUBIN_MOE_CACHE_DIR", str(tmp_path))
    yield found
    for kept in KEPT:  # of kernels without code
        kept.cache_clear()


def problem_of(sizes: tuple[int, int, int, int], fmt: str, **fields: Any) -> MoEProblem:
    e, top_k, hidden, intermediate = sizes
    more = {"global_num_experts": e, **FORMATS[fmt], **fields}
    return MoEProblem(
        num_experts=e, top_k=top_k, hidden=hidden, intermediate=intermediate, **more
    )  # fmt: skip


def layer_of(problem: MoEProblem, spy: Spy) -> host.Sm90Kernel:
    """Of tensors without storage."""
    fp8 = problem.activation_format == "fp8-e4m3"
    return (fp8_host.Fp8Kernel if fp8 else host.Sm90Kernel)(problem, spy, 132, "meta")


def call(kernel: host.Sm90Kernel, num_tokens: int) -> None:
    p, none = kernel.problem, torch.empty(1, device="meta")
    kernel.run(
        host.Sm90Experts(*6 * [none]),
        torch.empty(num_tokens, p.hidden, dtype=torch.bfloat16, device="meta"),
        torch.empty(num_tokens, p.top_k, dtype=torch.int32, device="meta"),
        torch.empty(num_tokens, p.top_k, device="meta"),
        torch.empty(p.global_num_experts, dtype=torch.int32, device="meta"),
    )


def numbers(problem: MoEProblem, most: int) -> list[int]:
    """Each up to 300 and beyond those around which the plan changes, and the last."""
    plans = {m: plan_of(problem, m) for m in range(1, most + 1)}
    edges = [m for m in range(301, most) if plans[m] != plans[m + 1]]
    near = {m + d for m in edges for d in (-1, 0, 1, 2)}
    return sorted({*range(1, 301), *near, most - 1, most} & set(plans))


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("sizes", [MEASURED, UNMEASURED], ids=["measured", "unmeasured"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_after_the_warm_up_no_number_of_tokens_compiles(
    fmt: str, sizes: Any, invariant: bool, ranks: int, spy: Spy, monkeypatch: Any
) -> None:
    most = 8192
    problem = problem_of(
        sizes, fmt, batch_invariant=invariant, global_num_experts=ranks * sizes[0]
    )  # fmt: skip
    kernel = layer_of(problem, spy)
    kernel.warm_up(most)
    assert isinstance(kernel, CompilesAhead)
    counters, compiled = dict(kernel._counters), len(spy.compiled)
    assert compiled == len(spy.loaded)
    for num_tokens in numbers(problem, most):
        call(kernel, num_tokens)
    assert len(spy.compiled) == compiled
    assert kernel._counters == counters  # nor is memory zeroed, which a graph would do again

    spy.forget(monkeypatch)
    layer_of(problem, spy).warm_up(most)
    assert not spy.compiled  # a machine that has seen it
    assert len(spy.loaded) == compiled


def test_every_kind_of_kernel_is_launched_by_these_calls(spy: Spy) -> None:
    wanted = {
        "nvfp4 w4a16": "decode prefill_fc1 prefill_fc2 sort finalize",
        "mxfp4 w4a8": "fp8_fc1 fp8_fc2 fp8_rows sort finalize",
    }
    for fmt, names in wanted.items():
        kernel = layer_of(problem_of(UNMEASURED, fmt), spy)
        kernel.warm_up(2000)
        spy.launched.clear()
        call(kernel, 1)
        call(kernel, 2000)
        assert set(spy.launched) == {f"sm90_{name}" for name in names.split()}


def test_without_a_warm_up_a_call_compiles(spy: Spy, monkeypatch: Any) -> None:
    """The spy sees what it looks for."""
    monkeypatch.setattr(spy, "launch", lambda *_: None)
    kernel = layer_of(problem_of(UNMEASURED, "mxfp4 w4a8"), spy)
    call(kernel, 1)
    assert len(spy.compiled) == 6
    kernel.warm_up(8)  # and one up to fewer tokens leaves some for later
    compiled = len(spy.compiled)
    call(kernel, 8192)
    assert len(spy.compiled) > compiled


def test_a_machine_without_the_compiler_says_what_is_missing_before_it_serves(
    spy: Spy, monkeypatch: Any
) -> None:
    problem = problem_of(UNMEASURED, "mxfp4 w4a8")
    layer_of(problem, spy).warm_up(8)
    spy.forget(monkeypatch)
    monkeypatch.setattr(compile_cache, "dsl_version", lambda: None)
    layer_of(problem, spy).warm_up(8)
    with pytest.raises(ConfigError, match=r"sm90_.* is not in .*, and nvidia-cutlass-dsl is not"):
        layer_of(problem, spy).warm_up(8192)
    assert not spy.compiled


def test_a_few_plans_serve_all_numbers_of_tokens() -> None:
    """Each costs seconds when a layer is loaded for the first time."""
    for fmt in FORMATS:
        for sizes in (MEASURED, UNMEASURED, (256, 8, 7168, 256), (1, 1, 64, 64)):
            assert 1 <= len(choices(problem_of(sizes, fmt), 16384)) <= 16
    few = problem_of(UNMEASURED, "nvfp4 w4a16", batch_invariant=True)
    assert choices(few, 1 << 20) == choices(few, choice.max_tokens(few))
    assert choices(few, 0) == ()


def test_a_layer_passes_it_on_where_its_backend_compiles_ahead(spy: Spy) -> None:
    layer = object.__new__(MoEExperts)
    layer._kernel = object()  # type: ignore[assignment]
    layer.warm_up(8)
    layer._kernel = layer_of(problem_of(UNMEASURED, "nvfp4 w4a16"), spy)
    layer.warm_up(8)
    assert spy.compiled
