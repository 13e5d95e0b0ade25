"""UE4M3 block scales: the non-negative half of E4M3. Maximum 448 (0x7E), NaN 0x7F, smallest
positive value 2^-9. A set sign bit (0x80 and above, -0 among them) is no scale and decodes to NaN.
"""

from rubin_moe.formats.minifloat import Minifloat

UE4M3 = Minifloat("ue4m3", mantissa_bits=3, bias=7, max_code=0x7E)
