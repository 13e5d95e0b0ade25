"""A functional emulator of PTX kernels. An island: imports nothing else of the package.

``load_ptx(text)`` compiles; ``Device(arch).launch(...)`` runs and returns a :class:`Report`.
"""

from __future__ import annotations

from rubin_moe.emulator.async_ops import DelayPolicy, ImmediatePolicy
from rubin_moe.emulator.compile import Kernel, Module, load_ptx
from rubin_moe.emulator.errors import EmulationError
from rubin_moe.emulator.forms import UnsupportedInstructionError
from rubin_moe.emulator.launch import Device, LaunchError
from rubin_moe.emulator.ptx import PtxSyntaxError
from rubin_moe.emulator.report import Report
from rubin_moe.emulator.worker import Limits

__all__ = [
    "DelayPolicy",
    "Device",
    "EmulationError",
    "ImmediatePolicy",
    "Kernel",
    "LaunchError",
    "Limits",
    "Module",
    "PtxSyntaxError",
    "Report",
    "UnsupportedInstructionError",
    "load_ptx",
]
