"""What CuTe DSL must be told for its compiled host code to run on the stand-in runtime.

Seen with nvidia-cutlass-dsl 4.8.1: the architecture, the runtime library and the kept artifacts
are plain attributes of each DSL object's environment manager, read at every compile. So nothing
has to be set before `import cutlass`, and everything is put back on exit.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rubin_moe.emulator.errors import EmulatorError

TESTED_VERSION = "4.8"

#: Set on functions, and their executors, that are linked to the stand-in runtime.
_MARK = "_rubin_moe_emulated"


def check_version() -> None:
    """Raises EmulatorError when CuTe DSL is missing or of a version that was never tried."""
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise EmulatorError(
            "emulated_device runs CuTe DSL host functions: install 'nvidia-cutlass-dsl[cu13]'"
        ) from None
    if not version.startswith(TESTED_VERSION + "."):
        raise EmulatorError(
            f"emulated_device reaches into nvidia-cutlass-dsl and was written for "
            f"{TESTED_VERSION}.x; {version} is installed"
        )


@contextlib.contextmanager
def configured(
    arch: str,
    runtime: Path,
    dump_dir: Path,
    *,
    multiprocessors: int,
    on_function: Callable[[Any], None],
    after_run: Callable[[], None],
) -> Iterator[None]:
    """Every CuTe DSL compile inside targets `arch`, keeps PTX and cubin, and links `runtime`.

    on_function(compiled function) is called for each one that is created; after_run() after each
    run of host code, also when it failed, and may raise. A function that was compiled outside any
    such context is refused.
    """
    import cutlass.cute  # creates the DSL objects

    with contextlib.ExitStack() as stack:
        settings = {
            "_arch": arch,
            "shared_libs": str(runtime),
            "keep_ptx": True,
            "keep_cubin": True,
            "dump_dir": str(dump_dir),
            "no_cache": True,  # implied by keeping artifacts, which warns otherwise
        }
        for dsl in _dsl_objects():
            for name, value in settings.items():
                stack.enter_context(_attribute(dsl.envar, name, value))
            _use_copy(stack, dsl, "compile_options")  # a compile writes settings into these
        _use_copy(stack, cutlass.cute.compile, "_compile_options")
        # Read by DSL objects created inside, and by helpers that ask the environment.
        stack.enter_context(_environment({"CUTE_DSL_ARCH": arch, "CUTE_DSL_LIBS": str(runtime)}))
        _patch_executor(stack, on_function, after_run)
        _patch_hardware_info(stack, multiprocessors)
        yield


def _use_copy(stack: contextlib.ExitStack, owner: Any, name: str) -> None:
    stack.enter_context(_attribute(owner, name, copy.deepcopy(vars(owner)[name])))


def _dsl_objects() -> list[Any]:
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    return list(DSLSingletonMeta._instances.values())


def _patch_executor(
    stack: contextlib.ExitStack, on_function: Callable[[Any], None], after_run: Callable[[], None]
) -> None:
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction as Function

    create, load, bind = Function.__init__, Function._load_cuda_library, Function.to

    def create_and_tell(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        setattr(self, _MARK, True)
        on_function(self)

    def load_unowned(self: Any) -> list[Any]:
        _refuse_foreign(self)
        try:
            load(self)
        finally:
            after_run()
        return []  # no library handles: the DSL would pass them to the CUDA runtime to unload

    def bind_and_mark(self: Any, device: int | None = None) -> Any:
        executor = bind(self, device)
        setattr(executor, _MARK, getattr(self, _MARK, False))
        return executor

    def checked(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_and_check(self: Any, *args: Any, **kwargs: Any) -> Any:
            _refuse_foreign(self)
            try:
                return run(self, *args, **kwargs)
            finally:
                after_run()

        return run_and_check

    replacements = [
        (Function, "__init__", create_and_tell),
        (Function, "_load_cuda_library", load_unowned),
        (Function, "to", bind_and_mark),
        (Function, "num_devices", 1),
        (JitExecutor, "run_compiled_program", checked(JitExecutor.run_compiled_program)),
    ]
    for ffi in _tvm_ffi_function_classes():
        replacements.append((ffi, "__call__", checked(ffi.__call__)))
    for owner, name, value in replacements:
        stack.enter_context(_attribute(owner, name, value))


def _refuse_foreign(function: Any) -> None:
    if not getattr(function, _MARK, False):
        raise EmulatorError(
            "this function was compiled before the emulated_device block and is linked to the "
            "real CUDA runtime: compile it inside"
        )


def _tvm_ffi_function_classes() -> list[Any]:
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:  # apache-tvm-ffi is optional
        return []
    return [provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs]


def _patch_hardware_info(stack: contextlib.ExitStack, multiprocessors: int) -> None:
    from cutlass.utils import HardwareInfo

    def create(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    def max_active_clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return max(1, multiprocessors // cluster_size)

    def multiprocessor_count(self: Any) -> int:
        return multiprocessors

    for name, method in (
        ("__init__", create),
        ("get_max_active_clusters", max_active_clusters),
        ("get_device_multiprocessor_count", multiprocessor_count),
    ):
        stack.enter_context(_attribute(HardwareInfo, name, method))


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a class or object for a while; descriptors are put back as they were."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
