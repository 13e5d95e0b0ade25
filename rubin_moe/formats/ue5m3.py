"""UE5M3 block scales (PTX ``ue5m3``): all eight bits used. Maximum 114688 (0xFE), NaN 0xFF, no
infinity, smallest positive value 2^-17. torch has no such dtype: stored as uint8, and never viewed
as E4M3 (byte 0x80 is 2.0 here and -0 there).
"""

from rubin_moe.formats.minifloat import Minifloat

UE5M3 = Minifloat("ue5m3", mantissa_bits=3, bias=15, max_code=0xFE)
