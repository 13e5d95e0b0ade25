"""CRC-32, as in zlib, of parts of a file and of the whole file from those of its parts.

``isal`` computes it at memory speed. A CRC is a remainder of
polynomials over two elements, modulo the reflected polynomial of zlib (RFC 1952): that of ``ab`` is
that of ``a`` times ``x^(8 len(b))``, plus that of ``b``.
"""

from collections.abc import Iterable
from functools import cache, lru_cache

from isal.isal_zlib import crc32

__all__ = ["crc32", "whole"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # bit 31 is the coefficient of x^0


def whole(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of bytes that were cut into parts.

    Args:
        parts: (length, CRC-32), in order.
    """
    found = 0
    for length, crc in parts:
        found = _times(_power(length), found) ^ crc
    return found


def _times(a: int, b: int) -> int:
    """The product of two remainders."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=1 << 12)  # tensors of a model have few sizes
def _power(length: int) -> int:
    """``x^(8 length)``."""
    found, bit = _ONE, 3
    while length:
        if length & 1:
            found = _times(_square(bit), found)
        length >>= 1
        bit += 1
    return found


@cache
def _square(bit: int) -> int:
    """``x^(2^bit)``."""
    return _ONE >> 1 if bit == 0 else _times(_square(bit - 1), _square(bit - 1))
