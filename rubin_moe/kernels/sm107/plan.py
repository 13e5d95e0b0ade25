"""Tiles, stages and addresses of the sm_107a grouped GEMMs. Standard library only.

Both GEMMs share a mainloop: A is 128 rows of weights (one bulk copy a stage, in the order of
`layouts.sm107_tiles`), B is up to ``tile_n`` tokens gathered by row index. Scales of tokens go to
shared memory with 4-byte ``cp.async`` straight into 128 x 4 chunks and from there by UTCCP: a K
tile has ``4 tile_n`` such words, 4 a thread at 128 tokens, where transform warps with
``tcgen05.st`` would cost four more warps, four stages of 16 TMEM columns and 64 shared loads.
"""

from dataclasses import dataclass
from functools import lru_cache

from rubin_moe.arch import SM107A, barriers, instr_desc
from rubin_moe.arch.mma_rules import Mma
from rubin_moe.arch.smem_plan import Buffer, SmemPlan, plan_smem
from rubin_moe.arch.tmem_plan import TmemPlan, TmemRequest, plan_tmem
from rubin_moe.errors import PlanError

TILE_M = 128
TILE_K = 256
MMA_K = 128
WEIGHT_STAGE_BYTES = 18_432
SFB_STAGE_BYTES = 2_048
EPILOGUE_WARPS = 4
GATHER_WARPS = 4
MMA_WARP = EPILOGUE_WARPS
WEIGHT_WARP = MMA_WARP + 1
FIRST_GATHER_WARP = WEIGHT_WARP + 1
THREADS = 32 * (EPILOGUE_WARPS + 2 + GATHER_WARPS)
LAG = 3  # cp.async groups a gather thread keeps in flight
TILES_N = (32, 64, 128)


@dataclass(frozen=True)
class GemmPlan:
    """One grouped GEMM's kernel.

    Attributes:
        tile_n: tokens of a tile at most; the instruction's N is set at run time.
        scale: ``ue4m3`` or ``ue5m3``, of both operands.
        stages: of the shared ring of weights and tokens.
        idesc: instruction descriptor with N = 0 and scale ids 0.
    """

    tile_n: int
    scale: str
    stages: int
    smem: SmemPlan
    tmem: TmemPlan
    idesc: int

    def offset(self, buffer: str) -> int:
        """Byte address of a buffer in the block's shared memory."""
        return next(p.offset for p in self.smem.placed if p.name == buffer)

    @property
    def smem_bytes(self) -> int:
        return self.smem.used

    @property
    def weight_edge(self) -> barriers.Edge:
        return barriers.tma_to_mma("weights", WEIGHT_STAGE_BYTES)

    @property
    def token_edge(self) -> barriers.Edge:
        return barriers.threads_to_mma("tokens", GATHER_WARPS)

    @property
    def accumulator_edge(self) -> barriers.Edge:
        return barriers.mma_to_epilogue("accumulator", EPILOGUE_WARPS)

    def __str__(self) -> str:
        return (
            f"tile {TILE_M}x{self.tile_n}x{TILE_K} {self.scale}, {self.stages} stages, "
            f"{self.smem_bytes} bytes of shared memory, {self.tmem.allocated} TMEM columns"
        )


@lru_cache(maxsize=32)
def plan_gemm(tile_n: int, scale: str) -> GemmPlan:
    """The plan for tiles of ``tile_n`` tokens. Raises PlanError for one that is not built."""
    if tile_n not in TILES_N:
        raise PlanError(f"tile_n = {tile_n}: built are {', '.join(map(str, TILES_N))}")
    mma = Mma("mxf4nvf4", TILE_M, tile_n, MMA_K, scale=scale)
    idesc = instr_desc.build(SM107A, mma) & ~(0x3F << 17)
    tmem = plan_tmem(SM107A, TmemRequest(tile_n, TILE_K, 16, sfb_rows=tile_n))
    smem = plan_smem(
        SM107A,
        [
            Buffer("sB", tile_n * TILE_K // 2, "tokens", cp_async=True),
            Buffer("sSFB", SFB_STAGE_BYTES, "tokens", cp_async=True),
            Buffer("sA", WEIGHT_STAGE_BYTES, "weights"),
        ],
    )
    return GemmPlan(tile_n, scale, smem.stages["weights"], smem, tmem, idesc)


def tiles_of(k: int) -> int:
    """K tiles of a GEMM over ``k`` elements."""
    return -(-k // TILE_K)


def choose_tile_n(num_tokens: int, top_k: int, num_experts: int) -> int:
    """The smallest tile that holds the tokens an expert gets when they spread evenly; a tile
    more for a skewed routing costs a second pass over that expert's weights, no wrong result."""
    mean = -(-num_tokens * top_k // max(1, num_experts))
    return next((n for n in TILES_N if n >= mean), TILES_N[-1])
