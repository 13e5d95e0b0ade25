"""Which tensors of a quantized matrix outside the experts are read; asked while planning, so
without torch. `dense` reads them."""

from collections.abc import Iterable

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.dialect import Dialect, Reading

FP8_LEAVES = {
    "weight": ("F8_E4M3",),
    "weight_scale": ("F32", "BF16"),
    "weight_scale_inv": ("F32", "BF16"),
    "input_scale": ("F32", "BF16"),
}
"""Leaves of FP8 matrices. ``weight_scale`` and ``weight_scale_inv`` both multiply: the latter is
DeepSeek's name for block scales."""


def needed_leaves(dialect: Dialect | None, stored: Iterable[str]) -> frozenset[str]:
    """Which of the stored leaves `dense.dense` reads; ``dialect`` None stands for FP8.

    Raises:
        CheckpointError: a leaf that nobody knows.
    """
    needed = set()
    for leaf in stored:
        if leaf == "bias":  # the layer's own
            continue
        if dialect is None:
            if leaf not in FP8_LEAVES:
                raise CheckpointError(f"{leaf}: unknown beside an FP8 weight")
            if leaf != "input_scale":
                needed.add(leaf)
            continue
        reading = dialect.read(leaf)
        if reading is None:
            raise CheckpointError(f"{leaf}: unknown to {dialect}")
        if isinstance(reading, Reading) and reading.part != "input_dec":
            needed.add(leaf)
    return frozenset(needed)
