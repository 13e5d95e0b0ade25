"""Values of codes by table."""

from torch import Tensor


def look_up(table: Tensor, codes: Tensor) -> Tensor:
    """``table[codes]`` of uint8 codes of any shape, on their device.

    Not by torch's own indexing: that wants int64 and takes five times as long on a CPU.
    """
    found = table.to(codes.device).index_select(0, codes.reshape(-1).int())
    return found.view(codes.shape)
