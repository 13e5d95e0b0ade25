"""`emulated_device`: host functions of CuTe DSL, unchanged, on CPU tensors."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.base_dsl.common import DSLCudaRuntimeError
from cutlass.base_dsl.dsl import DSLSingletonMeta
from cutlass.base_dsl.jit_executor import JitExecutor
from cutlass.cute.runtime import from_dlpack, make_ptr
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction
from cutlass.utils import HardwareInfo

from rubin_moe.emulator.dsl import EmulatedDevice, emulated_device
from rubin_moe.emulator.errors import EmulatorError
from rubin_moe.emulator.saved import SavedLaunch

_BLOCK = 64


@cute.kernel
def _scale_and_add(x: cute.Tensor, factor: cutlass.Float32, addend: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * _BLOCK + thread
    x[index] = x[index] * factor + cutlass.Float32(addend)


@cute.kernel
def _negate(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    x[block * _BLOCK + thread] = -x[block * _BLOCK + thread]


@cute.jit
def _scale_add_negate(
    x: cute.Tensor, factor: cutlass.Float32, addend: cutlass.Int32, stream: cuda.CUstream
):
    blocks = cute.size(x) // _BLOCK
    _scale_and_add(x, factor, addend).launch(
        grid=[blocks, 1, 1], block=[_BLOCK, 1, 1], cluster=[2, 1, 1], stream=stream, use_pdl=True
    )
    _negate(x).launch(grid=[blocks, 1, 1], block=[_BLOCK, 1, 1], stream=stream)


@cute.jit
def _through_pointer(pointer: cute.Pointer, count: cutlass.Int64, stream: cuda.CUstream):
    x = cute.make_tensor(pointer, cute.make_layout((count,)))
    _negate(x).launch(grid=[count // _BLOCK, 1, 1], block=[_BLOCK, 1, 1], stream=stream)


def _arguments(x: torch.Tensor, addend: int = 3, stream: int = 0) -> tuple[object, ...]:
    return (from_dlpack(x), cutlass.Float32(2.0), cutlass.Int32(addend), cuda.CUstream(stream))


def _counting() -> torch.Tensor:
    return torch.arange(256, dtype=torch.float32)


@pytest.fixture
def gpu():
    with emulated_device("sm_107a") as device:
        yield device


def test_two_launches_of_one_host_function_run_in_order(gpu: EmulatedDevice) -> None:
    x = _counting()
    gpu.register(x)
    compiled = cute.compile(_scale_add_negate, *_arguments(x))
    compiled(*_arguments(x, addend=5))
    assert torch.equal(x, -(2 * _counting() + 5))
    first, second = gpu.launches
    assert (first.grid, first.block, first.cluster) == ((4, 1, 1), (64, 1, 1), (2, 1, 1))
    assert second.cluster == (1, 1, 1)
    assert (first.programmatic, second.programmatic) == (True, False)
    assert first.kernel != second.kernel
    assert first.report is not None
    assert first.report.warp_instructions > 0


def test_jit_without_compile_runs_too(gpu: EmulatedDevice) -> None:
    x = _counting()
    gpu.register(x)
    _scale_add_negate(*_arguments(x))
    assert torch.equal(x, -(2 * _counting() + 3))


def test_pointers_stand_for_device_pointers(gpu: EmulatedDevice) -> None:
    x = _counting()
    gpu.register(x)
    pointer = make_ptr(cutlass.Float32, x.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
    arguments = (pointer, cutlass.Int64(x.numel()), cuda.CUstream(0))
    cute.compile(_through_pointer, *arguments)(*arguments)
    assert torch.equal(x, -_counting())


def test_streams_are_recorded_and_change_no_order(gpu: EmulatedDevice) -> None:
    x = _counting()
    gpu.register(x)
    compiled = cute.compile(_scale_add_negate, *_arguments(x))
    compiled(*_arguments(x, stream=7))
    compiled(*_arguments(x, stream=8))
    assert [launch.stream for launch in gpu.launches] == [7, 7, 8, 8]
    assert torch.equal(x, -(2 * -(2 * _counting() + 3) + 3))


def test_compiled_function_outlives_its_context() -> None:
    x = _counting()
    with emulated_device("sm_100a"):
        compiled = cute.compile(_scale_add_negate, *_arguments(x))
    with pytest.raises(DSLCudaRuntimeError, match="NoDevice"):
        compiled(*_arguments(x))
    for _ in range(2):
        y = _counting()
        with emulated_device("sm_100a") as gpu:
            gpu.register(y)
            compiled(*_arguments(y))
        assert torch.equal(y, -(2 * _counting() + 3))


def test_two_kernels_of_one_name_are_told_apart(gpu: EmulatedDevice) -> None:
    def build(factor: float) -> Callable[..., object]:
        @cute.kernel
        def scale(x: cute.Tensor):
            thread, _, _ = cute.arch.thread_idx()
            x[thread] = x[thread] * cutlass.Float32(factor)

        @cute.jit
        def host(x: cute.Tensor, stream: cuda.CUstream):
            scale(x).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

        return host

    x = torch.ones(32)
    gpu.register(x)
    arguments = (from_dlpack(x), cuda.CUstream(0))
    by_three, by_five = (cute.compile(build(factor), *arguments) for factor in (3.0, 5.0))
    by_three(*arguments)
    assert torch.equal(x, torch.full((32,), 3.0))
    by_five(*arguments)
    assert torch.equal(x, torch.full((32,), 15.0))
    assert gpu.launches[0].kernel == gpu.launches[1].kernel


def test_emulator_error_reaches_the_caller(gpu: EmulatedDevice) -> None:
    x = _counting()  # not registered
    compiled = cute.compile(_scale_add_negate, *_arguments(x))
    with pytest.raises(Exception, match=hex(x.data_ptr())[2:8]) as caught:
        compiled(*_arguments(x))
    assert not isinstance(caught.value, DSLCudaRuntimeError)
    assert len(gpu.launches) == 1  # the second kernel was not launched


def test_nested_and_concurrent_contexts_are_refused(gpu: EmulatedDevice) -> None:
    with pytest.raises(EmulatorError, match="active already"), emulated_device("sm_107a"):
        pass
    caught: list[BaseException] = []

    def other() -> None:
        try:
            with emulated_device("sm_100a"):
                pass
        except EmulatorError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_cute_dsl_is_left_as_it_was() -> None:
    def state() -> list[object]:
        dsls = DSLSingletonMeta._instances.values()
        settings = [{**vars(dsl.envar), "options": dsl.compile_options.to_str()} for dsl in dsls]
        classes = (CudaDialectJitCompiledFunction, JitExecutor, HardwareInfo)
        options = cute.compile._compile_options.to_str()
        return [options, *settings, *(dict(vars(owner)) for owner in classes)]

    before = state()
    inside = []

    def leave_by_an_exception() -> None:
        with emulated_device("sm_107a"):
            cute.compile(_scale_add_negate, *_arguments(_counting()))
            inside.append(state())
            raise KeyError

    with pytest.raises(KeyError):
        leave_by_an_exception()
    assert inside[0] != before
    assert state() == before


def test_hardware_info_answers_for_the_emulated_device() -> None:
    with emulated_device("sm_107a", multiprocessors=6):
        info = HardwareInfo()
        assert info.get_device_multiprocessor_count() == 6
        assert info.get_max_active_clusters(4) == 1


def test_recording_only_runs_nothing() -> None:
    x = _counting()
    with emulated_device("sm_107a", execute=False) as gpu:
        cute.compile(_scale_add_negate, *_arguments(x))(*_arguments(x))
    assert torch.equal(x, _counting())
    assert [launch.report for launch in gpu.launches] == [None, None]
    assert int.from_bytes(gpu.launches[0].params[:8], "little") == x.data_ptr()


def test_saved_launch_runs_again(tmp_path: Path) -> None:
    x = _counting()
    with emulated_device("sm_100a", save_to=tmp_path) as gpu:
        gpu.register(x)
        cute.compile(_scale_add_negate, *_arguments(x))(*_arguments(x))
    first, second = sorted(tmp_path.glob("*.launch"))
    script = (
        "import sys; from pathlib import Path\n"
        "from rubin_moe.emulator.saved import SavedLaunch\n"
        "report, (memory,) = SavedLaunch.load(Path(sys.argv[1])).run()\n"
        "print(memory.view('float32').tolist())\n"
    )
    for path, want in ((first, 2 * _counting() + 3), (second, -(2 * _counting() + 3))):
        command = [sys.executable, "-c", script, str(path)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert json.loads(result.stdout) == want.tolist()
    with pytest.raises(EmulatorError, match="fresh process"):
        SavedLaunch.load(first).run()  # x is still at its address


def test_other_files_are_no_saved_launches(tmp_path: Path) -> None:
    path = tmp_path / "x.launch"
    path.write_text("nothing of the kind")
    with pytest.raises(EmulatorError, match="not a saved launch"):
        SavedLaunch.load(path)


def test_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="sm_42"), emulated_device("sm_42"):
        pass


def test_function_compiled_outside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = _counting()
    for dsl in DSLSingletonMeta._instances.values():
        monkeypatch.setattr(dsl.envar, "_arch", "sm_107a")
    compiled = cute.compile(_scale_add_negate, *_arguments(x))
    with emulated_device("sm_107a"), pytest.raises(EmulatorError, match="compile it inside"):
        compiled(*_arguments(x))
