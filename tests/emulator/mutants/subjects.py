"""The kernels that get faults, each as a launch with the memory it starts from.

Peers' kernels as CuTe DSL compiles them, ours for sm_107a and sm_90a, and Triton's; small problems
in which every role works.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rubin_moe.emulation import EmulatorLauncher, aligned, storages
from rubin_moe.emulator.dsl import emulated_device
from rubin_moe.emulator.ptx import parse_ptx
from rubin_moe.emulator.saved import SavedBuffer, SavedLaunch
from rubin_moe.kernels.launch import Argument, CompiledKernel, pack

TRITON = Path(__file__).parent.parent / "ptx"


@dataclass(frozen=True)
class Subject:
    """A kernel under test. ``record`` compiles it and returns its launch."""

    name: str
    origin: str
    record: Callable[[], SavedLaunch]


def _peer(key: str) -> Subject:
    """A case of the peers' suite."""

    def record() -> SavedLaunch:
        from tests.emulator.peers.suite import CASES

        (case,) = [case for case in CASES if case.key == key]
        with (
            tempfile.TemporaryDirectory() as folder,
            emulated_device(case.target, execute=False, save_to=Path(folder)) as gpu,
        ):
            prepared = case.prepare()
            gpu.register(*prepared.inputs, *prepared.outputs)
            prepared.reset()
            prepared.launch()
            (path,) = Path(folder).iterdir()
            return SavedLaunch.load(path)

    return Subject(key, "FlashInfer", record)


class Recorder(EmulatorLauncher):
    """Executes launches, and keeps them as they were before."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[SavedLaunch] = []

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        """One launch."""
        self.saved.append(saved_launch(kernel, grid, args))
        super().launch(kernel, grid, args)


def saved_launch(kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> SavedLaunch:
    """The launch of a compiled kernel with the memory of its tensors."""
    buffers = tuple(_buffer(start, size) for start, size in storages(args))
    return SavedLaunch(
        kernel.arch, kernel.ptx, kernel.entry, (grid, 1, 1), (kernel.block, 1, 1),
        (kernel.cluster, 1, 1), kernel.smem_bytes, b"".join(aligned(pack(args))), buffers,
    )  # fmt: skip


def _buffer(start: int, size: int) -> SavedBuffer:
    return SavedBuffer(start, ctypes.string_at(start, size))


def _sm107(part: str, pair: bool = False) -> Subject:
    """A kernel of our sm_107a layer, by a part of its entry's name. ``pair``: MXFP4 x MXFP8 as
    gpt-oss has it, in pairs of CTAs."""

    def record() -> SavedLaunch:
        from rubin_moe.kernels.activation import Activation
        from rubin_moe.kernels.sm107.host import Sm107Kernel
        from rubin_moe.layers.experts import problem_of
        from tests.kernels.sm107.layers import Case

        case = Case("nvfp4-ue5m3", 23, 4, 320, 352)
        if pair:
            case = Case("mxfp4", 70, 1, 640, 640, top_k=1, kind="swigluoai")
        activation = Activation(case.kind, limit=case.layer().limit)  # type: ignore[arg-type]
        problem = problem_of(
            case.weights(), case.k, activation, torch.float32, activation_format=case.act,  # type: ignore[arg-type]
            deterministic=True,
        )  # fmt: skip
        recorder = Recorder()
        kernel = Sm107Kernel(problem, recorder, num_ctas=2 if pair else 3)
        kernel.run(kernel.prepare(case.weights()), *case.batch())
        return next(launch for launch in recorder.saved if part in launch.kernel)

    return Subject(f"sm107 {part}{' mxfp8 pair' if pair else ''}", "ours", record)


def _sm90(name: str, part: str, wide: bool = False, from_logits: bool = False) -> Subject:
    """A kernel of our sm_90a layer, by a part of its entry's name, with two blocks; of the decode
    kernels or, ``wide``, of the one for many tokens."""

    def record() -> SavedLaunch:
        from tests.kernels.sm90 import layers
        from tests.layers.backends import weights_of
        from tests.oracles import problems

        layer = problems.layer(11, "nvfp4-ue4m3", 3, 160, 96)
        recorder = Recorder()
        kernel = layers.kernel_of(layer, tiles=layers.WIDE if wide else layers.TILES)
        kernel._launch, kernel._num_blocks = recorder, 2
        prepared = kernel.prepare(weights_of(layer))
        x, ids, weights = layers.batch(layer, 7)
        if from_logits:
            generator = torch.Generator().manual_seed(3)
            kernel.run_from_logits(prepared, x, torch.randn(7, 3, generator=generator))
        else:
            kernel.run(prepared, x, torch.from_numpy(ids), torch.from_numpy(weights))
        return next(launch for launch in recorder.saved if part in launch.kernel)

    return Subject(f"sm90 {name}", "ours", record)


def _sm90_prefill(name: str, part: str, number: int = 0, experts: int = 3) -> Subject:
    """One of the launches of our sm_90a layer for prefill: the ``number``-th of those whose entry
    has ``part`` in its name."""

    def record() -> SavedLaunch:
        from rubin_moe.kernels.sm90.prefill_plan import PrefillTiles
        from tests.kernels.sm90 import layers
        from tests.oracles import problems

        layer = problems.layer(11, "nvfp4-ue4m3", experts, 160, 96)
        tiles = PrefillTiles(pass_tokens=16, groups=2, stages13=2, stages2=2, panel=2, lag=1)
        recorder = Recorder()
        kernel = layers.kernel_of(layer, tiles=tiles)
        kernel._launch, kernel._num_blocks = recorder, 2
        layers.run(kernel, layer, *layers.batch(layer, 33 + experts, kind="power_law"))
        return [launch for launch in recorder.saved if part in launch.kernel][number]

    return Subject(f"sm90 {name}", "ours", record)


def _triton(name: str, grid: tuple[int, int, int], make: Callable[[], list[Any]]) -> Subject:
    """A kernel of tests/emulator/ptx; ``make`` gives its arguments."""

    def record() -> SavedLaunch:
        facts = json.loads((TRITON / f"{name}.json").read_text())
        text = (TRITON / f"{name}.ptx").read_text()
        entry = next(e for e in parse_ptx(text).entries if e.name == facts["entry"])
        block = bytearray(entry.param_bytes)
        tensors: list[torch.Tensor] = []
        values: list[Any] = []
        for argument in make():
            matrix = getattr(argument, "matrix", None)
            if matrix is not None:
                tensors.append(matrix)
                values += [argument.encode(), *matrix.shape, *matrix.stride()]
            elif isinstance(argument, torch.Tensor):
                tensors.append(argument)
                values.append(argument.data_ptr())
            else:
                values.append(argument)
        for param, value in zip(entry.params, [*values, 0, 0], strict=True):
            raw = value if isinstance(value, bytes) else int(value).to_bytes(param.size, "little")
            block[param.offset : param.offset + param.size] = raw
        buffers = tuple(
            _buffer(t.data_ptr(), t.untyped_storage().nbytes()) for t in tensors
        )  # fmt: skip
        return SavedLaunch(
            "sm_90a", text, entry.name, grid, tuple(facts["block"]), (1, 1, 1),
            facts["dynamic_smem_bytes"], bytes(block), buffers,
        )  # fmt: skip

    return Subject(f"triton {name}", "Triton", record)


def _matrices(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(5)
    a, b = (
        torch.from_numpy(rng.integers(-4, 5, (rows, k)).astype(np.float32)).bfloat16()
        for rows in (m, n)
    )
    return a, b, torch.full((m, n), float("nan"), dtype=torch.bfloat16)


def _wgmma_arguments() -> list[Any]:
    m, n, k = 73, 88, 208
    return [*_matrices(m, n, k), m, n, k]


def _tma_arguments() -> list[Any]:
    from tests.emulator.ptx.test_triton_kernels import TensorMap

    m, n, k = 128, 96, 160
    return [*map(TensorMap, _matrices(m, n, k)), k]


SUBJECTS: tuple[Subject, ...] = (
    _peer("sm_107a-dense_nvfp4_ue4m3_128x64"),
    _peer("sm_107a-dense_nvfp4_ue5m3_2cta_breuse_512x128"),
    _peer("sm_107a-dense_mxfp8_x_mxfp4_128x128"),
    _peer("sm_100a-dense_nvfp4_2cta_256x128"),
    _peer("sm_107a-fc1_gather_swiglu_cpasync"),
    _peer("sm_107a-fc2_finalize"),
    _peer("sm_107a-fc2_finalize_2cta_ue5m3"),
    _peer("sm_103a-dense_nvfp4_128x128"),
    _peer("sm_107a-dense_mxfp4_x_mxfp8_2cta_256x128"),
    _peer("sm_100a-swap_ab_fc1_nvfp4_128x64"),
    _peer("sm_90a-fc2_finalize_128x128"),
    _sm107("gather_gemm_swiglu"),
    _sm107("gemm_finalize"),
    _sm107("quantize_tokens"),
    _sm107("gather_gemm_swiglu", pair=True),
    _sm107("gemm_finalize", pair=True),
    _sm90("decode", "DecodeMoe"),
    _sm90("decode wgmma", "WideMoe", wide=True),
    _sm90("top_k", "TopK", from_logits=True),
    _sm90_prefill("sort", "Sort", experts=40),
    _sm90_prefill("prefill fc1", "PrefillGemm"),
    _sm90_prefill("prefill fc2", "PrefillGemm", 1),
    _triton("matmul_wgmma", (2, 2, 1), _wgmma_arguments),
    _triton("matmul_tma", (2, 2, 1), _tma_arguments),
)
