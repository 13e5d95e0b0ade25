"""Every error this package raises on purpose.

A message names what was found, where (tensor, layer, expert) and what was expected.
"""

from collections.abc import Mapping


class RubinMoeError(Exception):
    """Base of all errors below."""


class FormatError(RubinMoeError, ValueError):
    """A number format, scale or code is not what its definition allows."""


class CheckpointError(RubinMoeError, ValueError):
    """A checkpoint's files, names, shapes or values are not what its dialect says."""


class ConfigError(RubinMoeError, ValueError):
    """A quantization config or model config is contradictory or unknown."""


class FoldError(RubinMoeError, ValueError):
    """Folding a global scale would lose more than was allowed."""


class ConvertError(RubinMoeError):
    """A checkpoint cannot be converted as asked, or could not be written; the source is intact."""


class LayoutError(RubinMoeError, ValueError):
    """A shape that a storage layout cannot hold."""


class PlanError(RubinMoeError, ValueError):
    """A kernel plan that breaks a hardware rule; names the rule and each field."""


class UnsupportedError(RubinMoeError):
    """No backend computes what was asked; carries every candidate's reason.

    Attributes:
        reasons: backend name -> why it cannot.
    """

    def __init__(self, what: str, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        super().__init__("\n".join([what, *lines]))
