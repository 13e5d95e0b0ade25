"""The sm_107a host code over the launcher named ``emulator``."""

from rubin_moe.kernels.base import MoEProblem
from rubin_moe.kernels.launch import launcher
from rubin_moe.kernels.sm107.host import Sm107Kernel

NUM_CTAS = 4


def build(problem: MoEProblem) -> Sm107Kernel:
    """The kernel object of one layer. Raises ConfigError if no emulator is installed as a
    launcher (`rubin_moe.emulation.install`)."""
    return Sm107Kernel(problem, launcher("emulator"), NUM_CTAS)
