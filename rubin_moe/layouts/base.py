"""What a storage layout promises."""

from typing import Protocol

from torch import Tensor


class Layout(Protocol):
    """One physical order of one kind of tensor (codes, scales, rows of ``w13``).

    A layout is a value: equal parameters mean an equal ``key``. ``pack`` is pure and
    ``unpack(pack(t), t.shape)`` equals ``t`` bit for bit, for zero sizes and sizes that are no
    multiple of a tile too; padding is written (with zero), never left as it was.
    """

    @property
    def key(self) -> str:
        """Names the order and its parameters, for caches and messages."""

    def storage_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        """Shape after ``pack``. Raises LayoutError if the order cannot hold ``logical``."""

    def pack(self, logical: Tensor) -> Tensor:
        """A new tensor of ``storage_shape``; the input is left alone."""

    def unpack(self, stored: Tensor, logical: tuple[int, ...]) -> Tensor:
        """A new tensor of shape ``logical``."""
