"""Kernels on the emulator: the one place that knows both.

`install` makes the emulator a launcher by name; a backend that names it runs its compiled kernels
here, on CPU tensors at their own addresses. Executed on the emulator is not measured on hardware.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from rubin_moe.emulator.compile import Kernel, load_ptx
from rubin_moe.emulator.findings import Mode
from rubin_moe.emulator.launch import Device
from rubin_moe.emulator.report import Report
from rubin_moe.kernels.launch import Argument, At, CompiledKernel, install_launcher, pack

logger = logging.getLogger(__name__)


class EmulatorLauncher:
    """Runs each launch to its end before it returns.

    Args:
        seed: delays asynchronous operations, legally.
        rules: ``enforce`` ends a launch that breaks a rule of the hardware, ``report`` notes it.

    Attributes:
        reports: of the launches so far, newest last, if ``keep_reports``.
    """

    def __init__(
        self, seed: int | None = None, keep_reports: bool = False, rules: Mode | None = None
    ) -> None:
        self.seed = seed
        self.keep_reports = keep_reports
        self.rules: Mode | None = rules
        self.reports: list[Report] = []
        self._kernels: dict[str, Kernel] = {}

    def launch(self, kernel: CompiledKernel, grid: int, args: Sequence[Argument]) -> None:
        """One launch; raises what the emulator raises, with kernel, CTA, warp and PTX line."""
        device = Device(kernel.arch)
        for start, nbytes in storages(args):
            device.register_range(start, nbytes, kernel.name)
        report = device.launch(
            self._kernel(kernel),
            grid,
            kernel.block,
            b"".join(aligned(pack(args))),
            cluster=kernel.cluster,
            dynamic_smem=kernel.smem_bytes,
            seed=self.seed,
            rules=self.rules,
        )
        if self.keep_reports:
            self.reports.append(report)
        logger.debug("%s", report)

    def load(self, kernel: CompiledKernel) -> None:
        """Reads its PTX."""
        self._kernel(kernel)

    def _kernel(self, kernel: CompiledKernel) -> Kernel:
        if kernel.key not in self._kernels:
            module = load_ptx(
                kernel.ptx, deferred=self.seed is not None, checked=self.rules is not None
            )
            self._kernels[kernel.key] = module.entry(kernel.entry)
        return self._kernels[kernel.key]


def storages(args: Sequence[Argument]) -> list[tuple[int, int]]:
    """Address and bytes of every tensor's storage, each once."""
    tensors = [a.tensor if isinstance(a, At) else a for a in args]
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return sorted({(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()})


def aligned(parts: list[bytes]) -> list[bytes]:
    """Parameters at their natural alignment, as the ABI lays them out."""
    out: list[bytes] = []
    at = 0
    for part in parts:
        padding = -at % len(part)
        out += [bytes(padding), part]
        at += padding + len(part)
    return out


def install(seed: int | None = None, keep_reports: bool = False, rules: Mode | None = None) -> None:
    """Makes ``emulator`` a launcher; arguments are `EmulatorLauncher`'s."""
    install_launcher("emulator", lambda: EmulatorLauncher(seed, keep_reports, rules))
