"""The codec of each block scale type."""

from rubin_moe.formats.minifloat import Minifloat
from rubin_moe.formats.spec import ScaleType
from rubin_moe.formats.ue4m3 import UE4M3
from rubin_moe.formats.ue5m3 import UE5M3
from rubin_moe.formats.ue8m0 import UE8M0, PowerOfTwo

CODECS: dict[ScaleType, Minifloat | PowerOfTwo] = {"ue4m3": UE4M3, "ue5m3": UE5M3, "ue8m0": UE8M0}
