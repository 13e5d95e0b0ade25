"""FP4 mixture-of-experts serving backend: NVFP4 and MXFP4 experts on every machine.

Importing this package imports none of torch, vllm, cutlass, triton; each is imported by the
file that needs it.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rubin-moe")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
