"""Which tensors of a quantized matrix outside the experts are read; asked while planning, so
without torch. `dense` reads them."""

from collections.abc import Collection

from rubin_moe.errors import CheckpointError
from rubin_moe.loader.dialect import Dialect, Part, Reading

FP8_SCALES = ("weight_scale", "weight_scale_inv", "scale")
"""Names of the scales of an FP8 matrix. All multiply: ``weight_scale_inv`` is DeepSeek-V3's name
for block scales, ``scale`` DeepSeek-V4's."""

FP8_LEAVES = frozenset(("weight", "input_scale", *FP8_SCALES))


def needed_leaves(dialect: Dialect | None, stored: Collection[str], name: str) -> frozenset[str]:
    """Which of the stored leaves `dense.dense` reads; ``dialect`` None stands for FP8.

    Args:
        name: of the matrix, for messages.

    Raises:
        CheckpointError: a leaf that nobody knows, or one that is missing.
    """
    leaves = frozenset(stored) - {"bias"}  # the layer's own
    return _fp8(leaves, name) if dialect is None else _fp4(dialect, leaves, name)


def _fp8(leaves: frozenset[str], name: str) -> frozenset[str]:
    if leaves - FP8_LEAVES:
        raise CheckpointError(f"{name}.{min(leaves - FP8_LEAVES)}: unknown beside an FP8 weight")
    if not leaves & set(FP8_SCALES):
        raise CheckpointError(f"{name}: FP8 weight without {' or '.join(FP8_SCALES)}")
    return leaves - {"input_scale"}


def _fp4(dialect: Dialect, leaves: frozenset[str], name: str) -> frozenset[str]:
    needed = set()
    found: set[Part] = set()
    for leaf in leaves:
        reading = dialect.read(leaf)
        if reading is None:
            raise CheckpointError(f"{name}.{leaf}: unknown to {dialect}")
        if isinstance(reading, Reading) and reading.part != "input_dec":
            needed.add(leaf)
            found.add(reading.part)
    wanted: tuple[Part, ...] = ("qdata", "sf", "dec") if dialect.needs_dec else ("qdata", "sf")
    missing = [dialect.leaf(part) for part in wanted if part not in found]
    if missing:
        raise CheckpointError(f"{name}: {dialect} without {' and '.join(missing)}")
    return frozenset(needed)
