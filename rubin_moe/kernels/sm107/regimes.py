"""Up to how many tokens an expert weights belong on the instruction's M side. Standard library.

Both ways of laying out one expert's GEMM are judged by what does not depend on a clock: bytes that
shared memory is filled with, and multiply-adds issued, padding included. Swap-AB (weights on M) is
this backend's kernel. Tokens on M is the best that sm_107a offers it: pairs of CTAs, 512 tokens by
256 features with B-reuse, or 256 x 256 without (first seed, section 4.1). Swap-AB pads tokens to 8
or 16 and passes over the weights once for every tile of tokens; the other pads tokens to 256 or 512
and passes over the weights less often.
"""

from dataclasses import dataclass
from functools import lru_cache

from rubin_moe.kernels.sm107 import plan as plans

MOST_TOKENS = 4096
TOKENS_ON_M = (256, 512)
"""Rows of a pair's tile: without and with B-reuse."""
FEATURES_ON_N = 256


@dataclass(frozen=True)
class Work:
    """Of one expert's GEMM: bytes into shared memory, multiply-adds issued."""

    nbytes: int
    macs: int

    @property
    def product(self) -> int:
        """A layout that moves twice the bytes for half the multiply-adds is as good."""
        return self.nbytes * self.macs


def swap_ab(fmt: str, tokens: int, features: int, k: int) -> Work:
    """As the kernels do it with the planner's tile for ``tokens``."""
    o = plans.OPERANDS[fmt]
    tile_n = next((n for n in plans.TILES_N if n >= tokens), plans.TILES_N[-1])
    group = plans.choose_cta_group(fmt, tile_n)
    k_tiles, row_tiles = plans.tiles_of(fmt, k), -(-features // plans.TILE_M)
    token_tiles = -(-tokens // tile_n)
    weights = token_tiles * row_tiles * o.weight_bytes
    codes = tokens * -(-row_tiles // group) * plans.TOKEN_ROW_BYTES
    scales = tokens * row_tiles * o.scales_k
    step = 8 * group
    full, rest = divmod(tokens, tile_n)
    columns = full * tile_n + -(-rest // step) * step
    macs = row_tiles * plans.TILE_M * columns * k_tiles * o.tile_k
    return Work((weights + codes + scales) * k_tiles, macs)


def tokens_on_m(fmt: str, tokens: int, features: int, k: int, rows: int) -> Work:
    """A pair's tile of ``rows`` tokens x 256 features: each CTA has its rows of tokens with their
    scales, half of the features, and the scales of all of them."""
    o = plans.OPERANDS[fmt]
    k_tiles, m_tiles = plans.tiles_of(fmt, k), -(-tokens // rows)
    n_tiles = -(-features // FEATURES_ON_N)
    tokens_bytes = tokens * n_tiles * (plans.TOKEN_ROW_BYTES + o.scales_k)
    weights = m_tiles * features * (o.weight_row_bytes + 2 * o.scales_k)
    macs = m_tiles * rows * -(-features // 16) * 16 * k_tiles * o.tile_k
    return Work((tokens_bytes + weights) * k_tiles, macs)


@lru_cache(maxsize=256)
def swap_ab_loses_from(fmt: str, features: int, k: int) -> int | None:
    """Tokens an expert from which on (up to `MOST_TOKENS`) tokens on M take less: the product of
    bytes and multiply-adds is smaller for one of its tiles. None: swap-AB never loses there."""
    limit = None
    for tokens in range(MOST_TOKENS, 0, -1):
        mine = swap_ab(fmt, tokens, features, k).product
        theirs = min(tokens_on_m(fmt, tokens, features, k, m).product for m in TOKENS_ON_M)
        if theirs >= mine:
            break
        limit = tokens
    return limit
